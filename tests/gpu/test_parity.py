"""A model, its blocks' economies and every optimizer compute on the device what they compute on the CPU."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from requirement import need
from trainfleet import models
from trainfleet.config.types import Model
from trainfleet.devices import Device
from trainfleet.devices.cpu import Cpu
from trainfleet.engine import optimizer, optimizers
from trainfleet.engine.parallel import blocks
from trainfleet.engine.parallel.rank_model import TorchParts
from trainfleet.engine.step_guard import StepGuard
from trainfleet.engine.world import World, join
from trainfleet.models import Network
from trainfleet.models.loss import IGNORED
from unit.test_engine_parts import TRAIN

LENGTH = 96
FAMILIES = {"llama": 2, "gpt2": 4}  # and their heads of keys and values
STORED = Path(__file__).with_name("losses.json")
LOSSES = json.loads(STORED.read_text()) if STORED.exists() else {}


def model_of(family: str = "llama", layers: int = 2) -> Network:
    shape = Model(
        "test",
        family,
        layers,
        128,
        4,
        FAMILIES[family],
        256,
        320,
        LENGTH,
        10_000.0,
        1e-5,
        family == "gpt2",
    )
    model = models.build(shape)
    model.initialize(0)
    return model


def tokens_on(device: torch.device) -> Tensor:
    return torch.randint(0, 320, (3, LENGTH + 1), generator=torch.Generator().manual_seed(1)).to(
        device
    )


def gradients(model: Network, documents: bool = False) -> tuple[float, Tensor]:
    """The loss of a batch, and all gradients in a row on the host."""
    tokens = tokens_on(next(model.parameters()).device)
    places = (
        {"documents": (torch.arange(LENGTH, device=tokens.device) // 40).int().expand(3, -1)}
        if documents
        else {}
    )
    loss = model(tokens[:, :-1], targets=tokens[:, 1:], **places)
    loss.backward()
    return loss.item(), torch.cat(
        [parameter.grad.flatten().float().cpu() for parameter in model.parameters()]
    )  # type: ignore[union-attr]


def off(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_the_cpus(
    device: Device, exact: None, family: str, documents: bool
) -> None:
    model = model_of(family)
    theirs, ours = (
        gradients(copy.deepcopy(model), documents),
        gradients(model.to(device.torch_device), documents),
    )
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5) and off(ours[1], theirs[1]) < 1e-4


def ten_losses(family: str, device: Device) -> list[float]:
    """Of ten steps of fp32 AdamW from the CPU's weights, each on another batch."""
    heads = {"bert": 4} | FAMILIES
    shape = Model(
        "test",
        family,
        2,
        128,
        4,
        heads[family],
        256,
        320,
        LENGTH,
        10_000.0,
        1e-5,
        family != "llama",
    )
    model = models.build(shape)
    model.initialize(0)
    model.to(device.torch_device)
    update = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(10):
        tokens = torch.randint(
            0, 320, (4, LENGTH + 1), generator=torch.Generator().manual_seed(step)
        )
        targets = tokens[:, 1:]
        if family == "bert":  # it guesses some, and whether the second text follows the first
            targets = torch.where(torch.arange(LENGTH) % 7 == 0, targets, IGNORED)
            targets[:, 0] = tokens[:, 0] % 2
        loss = model(
            tokens[:, :-1].to(device.torch_device), targets=targets.to(device.torch_device)
        )
        loss.backward()
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", LOSSES)
def test_ten_steps_have_the_losses_that_a_cpu_had(device: Device, exact: None, family: str) -> None:
    """`python tests/gpu/test_parity.py` writes them anew, on a CPU."""
    assert ten_losses(family, device) == pytest.approx(LOSSES[family], rel=1e-4)


def test_in_bf16_they_are_near(device: Device) -> None:
    model = model_of()
    theirs, ours = (
        gradients(copy.deepcopy(model)),
        gradients(model.to(device.torch_device, torch.bfloat16)),
    )
    assert ours[0] == pytest.approx(theirs[0], rel=5e-3) and off(ours[1], theirs[1]) < 5e-2


def test_fp8_is_near_bf16_and_not_the_same(device: Device) -> None:
    if not device.native_fp8:
        pytest.skip(f"{device.name} has no fp8 instructions")
    need("torchao", "pip install torchao==0.18.0")
    exact, model = (
        model_of().to(device.torch_device, torch.bfloat16),
        model_of().to(device.torch_device, torch.bfloat16),
    )
    blocks.convert(model.get_submodule(model.plan.blocks).children(), device)
    theirs, ours = gradients(exact), gradients(model)
    assert ours[0] == pytest.approx(theirs[0], rel=5e-3) and 1e-4 < off(ours[1], theirs[1]) < 0.15


@pytest.mark.parametrize(
    ("how", "compiled"),
    [(how, compiled) for how in ("none", "full", "selective") for compiled in (False, True)]
    + [(0.5, True)],
)
def test_economies_of_blocks_change_no_gradient(
    device: Device, exact: None, how: Any, compiled: bool
) -> None:
    torch._dynamo.reset()
    theirs = gradients(model_of().to(device.torch_device))
    model = model_of().to(device.torch_device)
    inside = list(model.get_submodule(model.plan.blocks).children())
    blocks.recompute(inside, how, device)
    if compiled:
        blocks.compile_blocks(model, inside, how, device)
    ours = gradients(model)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5) and off(ours[1], theirs[1]) < 1e-4


class Counted(TorchDispatchMode):
    """Counts the operations that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("format", [torch.float32, torch.bfloat16])
def test_selective_recomputation_keeps_attention_and_products(
    device: Device, format: torch.dtype
) -> None:
    """Whatever kernel the device takes for attention, it runs once a block: what is costly is not computed again."""

    def counted(how: str) -> Counter[str]:
        model = model_of().to(device.torch_device, format)
        blocks.recompute(model.get_submodule(model.plan.blocks).children(), how, device)
        with Counted() as seen:
            gradients(model)
        return seen.calls

    plain, kept, again = (counted(how) for how in ("none", "selective", "full"))
    costly = [
        name
        for name in plain
        if ".mm." in name or ("scaled_dot_product" in name and "backward" not in name)
    ]
    assert any("scaled_dot_product" in name for name in costly), plain
    assert {name: kept[name] for name in costly} == {name: plain[name] for name in costly}
    assert all(again[name] > plain[name] for name in costly)


def test_recomputation_takes_less_memory(device: Device) -> None:
    if device.kind != "cuda":
        pytest.skip("what a CPU has taken is only known at its largest")

    def most(how: str) -> int:
        model = model_of(layers=8).to(device.torch_device, torch.bfloat16)
        blocks.recompute(model.get_submodule(model.plan.blocks).children(), how, device)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        tokens = tokens_on(device.torch_device).repeat(64, 1)
        model(tokens[:, :-1], targets=tokens[:, 1:]).backward()
        return torch.cuda.max_memory_allocated() - held

    none, selective, full = most("none"), most("selective"), most("full")
    assert full < selective < none


def updated(
    device: Device, kind: str, compiled: bool = False, out: int | None = None
) -> dict[str, Tensor]:
    """A model's weights after three steps on gradients that are the same on every device; step `out` is left out."""
    weights = "bf16" if kind == "rounded" else "fp32"
    train = replace(
        TRAIN,
        optimizer="adamw" if kind == "rounded" else kind,
        param_dtype=weights,
        compile=compiled,
    )
    model = model_of().to(
        device.torch_device, torch.bfloat16 if weights == "bf16" else torch.float32
    )
    update = optimizer.build(model, train, device)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)
        optimizer.leave_out(update, torch.tensor(float(step == out), device=device.torch_device))
        update.step()
    return {name: parameter.detach().float().cpu() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ["adamw", "lamb", "muon"])
def test_an_optimizer_steps_as_on_the_cpu(device: Device, exact: None, kind: str) -> None:
    theirs, ours = updated(Cpu(), kind, out=1), updated(device, kind, out=1)
    assert {
        name: change for name in theirs if (change := off(ours[name], theirs[name])) > 1e-5
    } == {}


@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_weights_are_rounded_as_on_the_cpu(device: Device, compiled: bool) -> None:
    """Chance is the same numbers everywhere; a last bit of fp32 may be another, which rarely shows after rounding."""
    theirs, ours = updated(Cpu(), "rounded", out=1), updated(device, "rounded", compiled, out=1)
    assert max(float((ours[name] != theirs[name]).float().mean()) for name in theirs) < 0.02


def test_chance_is_the_same_numbers_on_every_device(device: Device) -> None:
    def drawn(place: torch.device) -> Tensor:
        rows, columns = optimizers.extent_of(torch.empty(300, 500, device=place))
        key, draw = (torch.tensor(number, dtype=torch.int32, device=place) for number in (-5, 12))
        return optimizers.chance(key, draw, rows, columns).cpu()

    assert torch.equal(drawn(torch.device("cpu")), drawn(device.torch_device))


@pytest.fixture(scope="module")
def world(device: Device) -> Iterator[World]:
    with join(device) as world:
        yield world


def test_the_guard_leaves_out_what_is_not_finite(world: World) -> None:
    guard, place = StepGuard(TRAIN, world), world.device.torch_device
    model = model_of().to(place)
    losses = [3.0, float("nan"), 2.9, float("inf")]
    answers = [
        guard.skips(step, torch.tensor(loss, device=place), torch.tensor(1.0, device=place))
        for step, loss in enumerate(losses, 1)
    ]
    assert [answer.item() for answer in answers] == [0.0, 1.0, 0.0, 1.0] and guard.check(
        TorchParts(model, optimizer.build(model, TRAIN, world.device)), "run"
    ) == 2


def test_ranks_agree_on_the_host_and_on_the_device(world: World) -> None:
    assert world.sum(torch.ones(3, device=world.device.torch_device)).tolist() == [world.size] * 3
    assert world.as_first_says(7) == 7


if __name__ == "__main__":
    torch.set_num_threads(1)
    STORED.write_text(
        json.dumps({family: ten_losses(family, Cpu()) for family in ("llama", "gpt2", "bert")})
        + "\n"
    )
