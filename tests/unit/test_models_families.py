"""GPT-2, BERT and RoBERTa beside Llama: what each computes, how many numbers and FLOPs, and what its plan names."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trainfleet import models
from trainfleet.config import sizes
from trainfleet.config.families import FAMILIES
from trainfleet.config.types import Model
from trainfleet.models import loss as losses
from trainfleet.models.llama import Cache
from trainfleet.models.loss import IGNORED

LENGTH = 40
LLAMA = Model("test", "llama", 3, 48, 6, 2, 80, 120, 64, 10_000.0, 1e-5, False)
SHAPES = {
    name: replace(LLAMA, family=name, kv_heads=6, tie_word_embeddings=True) for name in FAMILIES
} | {
    "untied": replace(LLAMA, family="bert", kv_heads=6),
    "wide heads": replace(LLAMA, family="qwen3", head_dim=16),
}


def make(shape: Model, seed: int = 0) -> models.Network:
    model = models.build(shape)
    model.initialize(seed)
    return model


def batch(family: str, count: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 120, (count, LENGTH), generator=generator)
    if FAMILIES[family].causal:
        return tokens, tokens.roll(-1, 1)
    targets = torch.full_like(tokens, IGNORED)
    targets[:, 5 : 5 + FAMILIES[family].guesses(LENGTH)] = 7
    if family == "bert":
        targets[:, 0] = torch.arange(count) % 2
    return tokens, targets


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_arithmetic_counts_what_the_module_has_and_does(shape: Model) -> None:
    model, (tokens, targets) = make(shape), batch(shape.family)
    assert sum(parameter.numel() for parameter in model.parameters()) == sizes.count_parameters(
        shape
    )
    with (
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):  # counted as matrix products, the causal half too
        model(tokens, targets=targets).backward()
    unseen = (
        6.0 * shape.layers * LENGTH * shape.heads * shape.head_features
        if FAMILIES[shape.family].causal
        else 0.0
    )
    told = (sizes.flops_per_token(shape, LENGTH) + unseen) * tokens.numel()
    assert counter.get_total_flops() == pytest.approx(told, rel=1e-6)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_only_hidden_tokens_count_and_all_of_them(family: str) -> None:
    model, (tokens, targets) = make(SHAPES[family]), batch(family)
    chosen = targets.clone()
    if family == "bert":
        chosen[:, 0] = IGNORED
    plain = nn.functional.cross_entropy(model(tokens).flatten(0, 1), chosen.flatten())
    if isinstance(model, models.Bert):
        plain = plain + nn.functional.cross_entropy(
            model.pooler(model.features(tokens)), targets[:, 0]
        )
    torch.testing.assert_close(model(tokens, targets=targets), plain)
    guesses = 2 * FAMILIES[family].guesses(LENGTH)
    torch.testing.assert_close(model(tokens, targets=targets, reduction="sum") / guesses, plain)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_every_position_sees_the_whole_sequence(family: str) -> None:
    model, (tokens, _) = make(SHAPES[family]), batch(family)
    changed = tokens.clone()
    changed[:, -1] += 1
    assert not torch.equal(model(tokens)[:, 0], model(changed)[:, 0])


def test_segments_are_seen() -> None:
    model, (tokens, _) = make(SHAPES["bert"]), batch("bert")
    plain = model(torch.stack((tokens, torch.zeros_like(tokens)), 2))
    assert torch.equal(plain, model(tokens))
    assert not torch.equal(plain, model(torch.stack((tokens, torch.ones_like(tokens)), 2)))


def test_gpt2_sees_nothing_later_and_caches() -> None:
    model, (tokens, _) = make(SHAPES["gpt2"]), batch("gpt2")
    changed, cache = tokens.clone(), Cache()
    changed[:, 12] += 1
    assert torch.equal(model(tokens)[:, :12], model(changed)[:, :12])
    parts = [
        model(tokens[:, :11], cache),
        *(model(tokens[:, i : i + 1], cache) for i in range(11, 20)),
    ]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens)[:, :20], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_plans_name_modules_and_leave_no_matrix_of_a_block_out(shape: Model) -> None:
    model = make(shape)
    names, plan = {name for name, _ in model.named_modules()}, model.plan
    for name in (
        *plan.first,
        *plan.last,
        plan.head,
        *plan.embeddings,
        plan.divided,
        *plan.norms,
        *plan.gathered,
        *plan.column,
        *plan.row,
    ):
        assert name.replace("*", "0") in names, name
    linear = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith("layers.0.")
    }
    assert linear == {name.replace("*", "0") for name in (*plan.column, *plan.row)} - {plan.head}


def test_dropout_is_only_for_training() -> None:
    model, (tokens, _) = make(replace(SHAPES["roberta"], dropout=0.5)), batch("roberta")
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_documents_packed_into_a_row_are_as_if_alone(family: str) -> None:
    model, (tokens, targets) = make(SHAPES[family]), batch(family, 3)
    documents = torch.zeros_like(tokens, dtype=torch.int32)
    documents[1, 9:], documents[2, 1:], documents[2, 30:] = 1, 1, 2
    packed = model(tokens, targets=targets, documents=documents, reduction="sum")
    alone = torch.zeros(())
    for row, cuts in ((0, (0, LENGTH)), (1, (0, 9, LENGTH)), (2, (0, 1, 30, LENGTH))):
        for first, last in pairwise(cuts):
            part = slice(first, last)
            alone = alone + model(
                tokens[row : row + 1, part], targets=targets[row : row + 1, part], reduction="sum"
            )
    assert packed.item() == pytest.approx(alone.item(), rel=1e-6)
    whole = model(tokens, targets=targets, reduction="sum")
    assert packed.item() != pytest.approx(whole.item(), rel=1e-6)
    ours, theirs = (torch.autograd.grad(loss, [*model.parameters()]) for loss in (packed, alone))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def head_and_targets(format: torch.dtype) -> tuple[nn.Linear, Tensor, Tensor]:
    """An output layer, what enters it [3, 40, 48], and targets of which some are not guessed."""
    generator = torch.Generator().manual_seed(1)
    head = nn.Linear(48, 120, bias=False)
    with torch.no_grad():
        head.weight.normal_(0, 0.1, generator=generator)
    x, targets = (
        torch.randn(3, LENGTH, 48, generator=generator),
        torch.randint(0, 120, (3, LENGTH), generator=generator),
    )
    targets[1, :5] = IGNORED
    return head.to(format), x.to(format).requires_grad_(), targets


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("format", [torch.float32, torch.bfloat16])
def test_a_loss_in_pieces_is_the_loss(
    monkeypatch: pytest.MonkeyPatch, format: torch.dtype, cast: bool
) -> None:
    """And its gradients, of weights in either format and of products that autocast casts; a step scales both by what follows."""
    near = 1e-6 if format == torch.float32 and not cast else 2e-2
    found = []
    for limit in (1 << 30, 50 * 120 * 4):
        monkeypatch.setattr(losses, "LOGITS_BYTES", limit)
        head, x, targets = head_and_targets(format)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            loss = losses.next_token_loss(x, head, targets, "sum")
        with torch.no_grad():
            assert losses.next_token_loss(x, head, targets, "sum").item() == pytest.approx(
                loss.item(), rel=1e-3 if cast else 1e-6
            )
        found.append((loss.detach(), *torch.autograd.grad(loss * 3, (x, head.weight))))
    whole, pieces = found
    for mine, other in zip(pieces, whole, strict=True):
        assert mine.dtype == other.dtype
        assert float((mine - other).float().norm() / other.float().norm()) < near


@pytest.mark.parametrize("format", [torch.float16, torch.float32])
def test_in_pieces_no_sum_in_fp16_overflows_that_a_lower_loss_scale_would_save(
    monkeypatch: pytest.MonkeyPatch, format: torch.dtype
) -> None:
    """4,096 alike tokens: their sum, 4,096 x 40, is more than fp16 has, and their mean is 40."""
    monkeypatch.setattr(losses, "LOGITS_BYTES", 2048 * 120 * 4)
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 120, bias=False).to(format)
    x, targets = torch.full((1, 4096, 8), 40.0, dtype=format), torch.full((1, 4096), 7)
    x[..., 1:] = torch.randn(4096, 7)
    with torch.autocast("cpu", torch.float16, enabled=format == torch.float32):
        losses.next_token_loss(x, head, targets).backward()
    exact = head.weight.detach().double().requires_grad_()
    torch.nn.functional.cross_entropy((x.double() @ exact.T)[0], targets[0]).backward()
    assert (
        head.weight.grad is not None and exact.grad is not None and head.weight.grad.dtype == format
    )
    assert float((head.weight.grad - exact.grad).norm() / exact.grad.norm()) < 2e-3


def test_a_loss_in_pieces_computes_no_product_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """And keeps nothing as large as all logits are."""
    head, x, targets = head_and_targets(torch.float32)
    flops, kept = [], list[int]()
    for limit in (1 << 30, 50 * 120 * 4):
        monkeypatch.setattr(losses, "LOGITS_BYTES", limit)
        kept.clear()
        with (
            FlopCounterMode(display=False) as counter,
            torch.autograd.graph.saved_tensors_hooks(
                lambda each: kept.append(each.numel()) or each, lambda each: each
            ),
        ):
            losses.next_token_loss(x, head, targets).backward()
        flops.append(counter.get_total_flops())
    assert (
        flops[1] <= flops[0] == 3 * 2 * 3 * LENGTH * 48 * 120
    )  # one of the three in place, which is not counted
    assert max(kept) < 3 * LENGTH * 120


def test_a_loss_in_pieces_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOGITS_BYTES", 50 * 120 * 4)
    head, x, targets = head_and_targets(torch.float32)
    graphs = list[object]()

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(losses.next_token_loss, fullgraph=True, backend=backend)
    assert compiled(x, head, targets).item() == pytest.approx(
        losses.next_token_loss(x, head, targets).item(), rel=1e-6
    )
    assert len(graphs) == 1
