"""Products in fp8: which ones, how near they come to bf16, and who is refused. torch computes them on CPUs too, if slowly."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from requirement import need
from trainfleet import models
from trainfleet.config.types import Model
from trainfleet.devices.cpu import Cpu
from trainfleet.engine.parallel import blocks
from trainfleet.trust.errors import RunError


class Able(Cpu):
    """A device that says that it has fp8."""

    native_fp8 = True


def made(convert: bool, inner: int = 96) -> models.Network:
    model = models.build(Model("test", "llama", 2, 64, 4, 4, inner, 256, 64, 10_000.0, 1e-5, False))
    model.initialize(0)
    model.to(torch.bfloat16)
    if convert:
        need("torchao", "pip install torchao==0.18.0")
        blocks.convert(model.get_submodule(model.plan.blocks).children(), Able())
    return model


def gradients(model: models.Network) -> tuple[float, Tensor]:
    """The loss of one batch, and its gradients in a row."""
    tokens = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(1))
    loss = model(tokens, targets=tokens.roll(-1, 1))
    loss.backward()
    return loss.item(), torch.cat(
        [parameter.grad.flatten().float() for parameter in model.parameters()]
    )  # type: ignore[union-attr]


def test_fp8_comes_near_bf16_and_is_not_the_same() -> None:
    (loss, ours), (exact, theirs) = gradients(made(True)), gradients(made(False))
    assert loss == pytest.approx(exact, rel=1e-3) and not torch.equal(ours, theirs)
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.99
    assert (ours - theirs).norm() < 0.1 * theirs.norm()


def test_the_matrices_of_blocks_are_taken_and_nothing_else() -> None:
    model = made(True, inner=88)  # which 16 does not divide
    taken = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear
    }
    assert taken == {
        f"layers.{block}.self_attn.{part}_proj" for block in range(2) for part in "qkvo"
    }
    assert type(model.get_submodule(model.plan.head)) is nn.Linear


def test_the_parameters_stay_what_they_were() -> None:
    model = made(False)
    before = dict(model.named_parameters())
    need("torchao", "pip install torchao==0.18.0")
    blocks.convert(model.get_submodule(model.plan.blocks).children(), Able())
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)


def test_a_device_without_fp8_is_refused() -> None:
    with pytest.raises(RunError) as error:
        blocks.convert([], Cpu())
    assert (
        error.value.where == Cpu().name
        and "no fp8 instructions" in error.value.why
        and error.value.next == "set train.precision=auto"
    )


def test_without_torchao_the_line_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(RunError) as error:
        blocks.convert([], Able())
    assert (
        "needs the package torchao" in error.value.what
        and "requirements-extras.lock" in error.value.next
    )
