"""The Llama of models/: what it computes, apart from any training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from trainfleet import models
from trainfleet.config.types import Model
from trainfleet.models.llama import Cache, Llama
from trainfleet.plan import estimate

SHAPE = Model("test", "llama", 3, 32, 4, 2, 48, 96, 64, 10_000.0, 1e-5, False)
SHAPES = [
    SHAPE,
    replace(SHAPE, tie_word_embeddings=True),
    replace(SHAPE, kv_heads=4),
    replace(SHAPE, layers=1, kv_heads=1),
]


def make(shape: Model = SHAPE, seed: int = 0) -> Llama:
    model = models.build(shape)
    model.initialize(seed)
    return model


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, SHAPE.vocab_size, (2, 20), generator=torch.Generator().manual_seed(7))


def test_no_position_sees_a_later_one(tokens: Tensor) -> None:
    model, changed = make(), tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % SHAPE.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :12], after[:, :12]) and not torch.equal(
        before[:, 12:], after[:, 12:]
    )


def test_positions_matter(tokens: Tensor) -> None:
    """Without rotation attention is a sum over a set: two tokens swapped would leave what comes after them as it was."""
    model, swapped = make(), tokens.clone()
    swapped[:, [3, 9]] = tokens[:, [9, 3]]
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1], atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_cached_tokens_give_the_logits_of_a_whole_forward(shape: Model, tokens: Tensor) -> None:
    model, cache = make(shape), Cache()
    parts = [
        model(tokens[:, :11], cache),
        *(model(tokens[:, i : i + 1], cache) for i in range(11, 20)),
    ]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_plan_counts_what_the_model_has(shape: Model) -> None:
    model = make(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == estimate.count_parameters(
        shape
    )


def test_weights_follow_from_the_seed() -> None:
    same, other = make().state_dict(), make(seed=1).state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in make().state_dict().items())
    assert not torch.equal(same["lm_head.weight"], other["lm_head.weight"])


def test_what_writes_to_the_residual_stream_starts_smaller() -> None:
    weights = make(
        replace(SHAPE, hidden_size=256, intermediate_size=256, layers=8, heads=4, kv_heads=4)
    ).state_dict()
    assert weights["layers.0.mlp.down_proj.weight"].std() == pytest.approx(
        0.02 / 4, rel=0.05
    )  # sqrt(2 x 8 blocks) = 4
    assert weights["layers.0.mlp.up_proj.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert (weights["norm.weight"] == 1).all()


def test_loss_before_training_is_that_of_a_guess(tokens: Tensor) -> None:
    loss = torch.nn.functional.cross_entropy(make()(tokens).flatten(0, 1), tokens.flatten())
    assert loss.item() == pytest.approx(torch.tensor(float(SHAPE.vocab_size)).log().item(), abs=0.1)


def test_parameters_are_registered_in_the_order_of_use(tokens: Tensor) -> None:
    """DDP fills its buckets from the last parameter to the first, so this is what lets it send while backward still runs."""
    model, ready = make(), list[str]()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    model(tokens).sum().backward()
    blocks = [name.split(".")[1] for name in ready if name.startswith("layers.")]
    assert (
        blocks == sorted(blocks, reverse=True)
        and ready[0].startswith(("lm_head", "norm"))
        and ready[-1].startswith("embed")
    )
