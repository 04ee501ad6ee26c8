"""The guard: which steps it leaves out, and that another one goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from test_engine_parts import TRAIN
from torch import nn

from trainfleet.devices.cpu import Cpu
from trainfleet.engine.parallel.rank_model import TorchParts
from trainfleet.engine.step_guard import MEMORY, StepGuard
from trainfleet.engine.world import World, join
from trainfleet.trust.errors import RunError

NAN = float("nan")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join(Cpu()) as world:
        yield world


def held(model: nn.Module) -> TorchParts:
    return TorchParts(model, torch.optim.SGD(model.parameters()))


def judged(guard: StepGuard, values: list[tuple[float, float]], first: int = 1) -> list[int]:
    """The steps that are left out of a sequence of losses and norms."""
    answers = [
        guard.skips(step, *map(torch.tensor, pair)) for step, pair in enumerate(values, first)
    ]
    return [step for step, answer in enumerate(answers, first) if answer.item()]


def usual(steps: int) -> list[tuple[float, float]]:
    """A loss that falls and a norm that rises, both with noise, as runs begin."""
    noise = torch.randn(steps, 2, generator=torch.Generator().manual_seed(0))
    return [
        (7 - 0.02 * i + 0.1 * a, 1 + 0.01 * i + 0.2 * abs(b))
        for i, (a, b) in enumerate(noise.tolist())
    ]


@pytest.mark.parametrize("bad", [(NAN, 1.0), (3.0, NAN), (float("inf"), 1.0), (3.0, float("inf"))])
def test_what_is_not_finite_is_left_out_from_the_first_step_on(
    world: World, bad: tuple[float, float]
) -> None:
    assert judged(StepGuard(TRAIN, world), [bad, (3.0, 1.0), bad, bad]) == [1, 3, 4]


@pytest.mark.parametrize("bad", [(15.0, 2.0), (4.0, 40.0)])
def test_a_spike_of_either_is_left_out_once_the_usual_is_known(
    world: World, bad: tuple[float, float]
) -> None:
    early = [bad, *usual(40)]
    assert judged(StepGuard(TRAIN, world), early) == []
    assert judged(StepGuard(TRAIN, world), [*usual(MEMORY + 20), bad, (4.2, 2.0)]) == [MEMORY + 21]
    assert (
        judged(StepGuard(replace(TRAIN, spike_sigmas=0), world), [*usual(MEMORY + 20), bad]) == []
    )


def test_a_level_that_stays_becomes_the_usual_one(world: World) -> None:
    left_out = judged(
        StepGuard(TRAIN, world),
        [(3.0 + 0.01 * (i % 3), 1.0) for i in range(200)] + [(4.5, 1.0)] * 60,
    )
    assert left_out[0] == 201 and len(left_out) < 30


def test_another_guard_goes_on_where_one_was(world: World) -> None:
    values = usual(300)
    values[150] = values[151] = (9.0, 30.0)
    whole, first = StepGuard(TRAIN, world), StepGuard(TRAIN, world)
    judged(first, values[:151])
    second = StepGuard(TRAIN, world, first.state())
    judged(second, values[151:], 152)
    judged(whole, values)
    assert whole.state() == second.state() and whole.state()[-2:] == (2, 152)


def test_after_so_many_in_a_row_it_says_why(world: World) -> None:
    guard, parts = StepGuard(replace(TRAIN, max_consecutive_skips=3), world), held(nn.Linear(2, 2))
    judged(guard, [(3.0, 1.0), (3.0, NAN), (3.0, NAN)])
    assert guard.check(parts, "run") == 2
    judged(guard, [(3.0, NAN)], 4)
    with pytest.raises(RunError, match="not finite in steps 2 to 4") as error:
        guard.check(parts, "run")
    assert "samples 8 to 31" in error.value.why and "train.max_consecutive_skips" in error.value.why


def test_weights_past_saving_are_named_at_once(world: World) -> None:
    guard, parts = StepGuard(TRAIN, world), held(model := nn.Linear(2, 2))
    with torch.no_grad():
        model.bias[0] = NAN
    judged(guard, [(NAN, NAN)])
    with pytest.raises(RunError) as error:
        guard.check(parts, "run")
    assert error.value.why == "some weights are not finite: bias"


def test_what_is_read_back_of_a_recording_is_not_judged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where programs are only compiled ahead, counts and weights are whatever the memory held."""
    guard = StepGuard(TRAIN, world)
    guard.counts = torch.tensor([7_000_000, 9, 3])
    with pytest.raises(RunError):
        guard.check(held(nn.Linear(2, 2)), "run")
    monkeypatch.setattr(world.device, "executes", False, raising=False)
    assert guard.check(held(nn.Linear(2, 2)), "run") == 0
