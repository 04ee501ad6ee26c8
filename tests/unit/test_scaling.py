"""The loss scale of fp16 against torch.amp.GradScaler, and the guard that tells an overflow from a bad step."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from test_engine_guard import NAN, held, judged
from test_engine_parts import TRAIN
from torch import nn

from allocations import CONFIG
from trainfleet.config import Config, Settings, load
from trainfleet.devices.cpu import Cpu
from trainfleet.engine import step_guard
from trainfleet.engine.batches import split
from trainfleet.engine.parallel import Replicas, arrange
from trainfleet.engine.step_guard import Scale, StepGuard
from trainfleet.engine.timing import Stopwatch
from trainfleet.engine.world import World, join
from trainfleet.trust.errors import RunError

CPU = torch.device("cpu")
OVER = float("inf")
SMALL = (
    "fleet.nodes=1 model.layers=2 model.hidden_size=32 model.heads=2 model.kv_heads=2 model.intermediate_size=64"
    " model.vocab_size=384 train.global_batch_size=8 train.sequence_length=16 train.precision=fp16"
)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join(Cpu()) as world:
        yield world


@pytest.fixture
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    (path := tmp_path_factory.mktemp("fp16") / "config.yaml").write_text(CONFIG)
    return load(Settings(path, SMALL))[0]


def test_it_rises_and_falls_as_torchs_own_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_guard, "INTERVAL", 3)
    judge = torch.amp.GradScaler("cpu", init_scale=step_guard.START, growth_interval=3)
    judge.scale(torch.ones(()))  # which makes its tensors
    parameter, dice, ours = nn.Parameter(torch.ones(2)), random.Random(0), Scale(CPU)
    update = torch.optim.SGD([parameter])
    seen = set()
    for step in range(1, 200):
        bad = dice.random() < 0.3
        parameter.grad = torch.full((2,), OVER if bad else 1.0)
        judge.unscale_(update)
        judge.step(update)
        judge.update()
        ours.judge(step, torch.tensor(bad))
        assert ours.state()[:2] == (judge.get_scale(), judge.state_dict()["_growth_tracker"]), step
        seen.add(ours.state()[0])
    assert len(seen) > 5


def test_another_one_goes_on_where_one_was() -> None:
    first = Scale(CPU)
    for step, bad in enumerate((False, True, False, False), 1):
        first.judge(step, torch.tensor(bad))
    assert first.state() == Scale(CPU, first.state()).state() == (32768.0, 2, 1, 2)
    assert first.meters() == {"loss_scale": 32768.0, "overflowed": 1}
    assert Scale(CPU, (1.0, 10**14, 0, 0)).state()[1] == step_guard.INTERVAL, (
        "a checkpoint may say anything"
    )


def test_it_trains_as_torchs_own_scaler_does(
    world: World, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a scale that is far too large: the first steps overflow by themselves, and are left out by both."""
    monkeypatch.setattr(step_guard, "START", 2.0**34)
    monkeypatch.setattr(step_guard, "INTERVAL", 4)
    ours = arrange(config, world)
    assert isinstance(ours, Replicas)
    model, train, scale = copy.deepcopy(ours.model), config.train, Scale(CPU)
    ours.scale = scale.factor
    theirs = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": train.weight_decay},
         {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}],
        lr=1e-3, betas=(train.beta1, train.beta2), eps=train.epsilon, fused=True,
    )  # fmt: skip
    judge = torch.amp.GradScaler("cpu", init_scale=2.0**34, growth_interval=4)
    guard, watch = StepGuard(train, world, scale=scale), Stopwatch(time.time())
    for step in range(1, 25):
        batch = split(torch.randint(0, 384, (4, 17), generator=torch.Generator().manual_seed(step)))
        loss = ours.train(iter([(0, batch)]), watch)
        ours.update(1e-3, lambda norm, step=step, loss=loss: guard.skips(step, loss, norm))  # type: ignore[misc]
        with torch.autocast("cpu", torch.float16):
            other = model(batch.inputs, **batch.named) / ours.micro_batches
        judge.scale(other).backward()
        judge.unscale_(theirs)
        nn.utils.clip_grad_norm_(model.parameters(), train.gradient_clip)
        judge.step(theirs)
        judge.update()
        theirs.zero_grad()
        assert scale.state()[0] == judge.get_scale(), step
        assert all(
            torch.equal(a, b)
            for a, b in zip(ours.model.parameters(), model.parameters(), strict=True)
        ), step
    overflowed = scale.state()[2]
    assert 5 < overflowed < 20 and guard.check(ours, "run") == 0


def test_an_overflow_is_left_out_and_is_no_bad_step(world: World) -> None:
    scale = Scale(CPU)
    guard, parts = (
        StepGuard(replace(TRAIN, max_consecutive_skips=2), world, scale=scale),
        held(nn.Linear(2, 2)),
    )
    values = [(3.0, 1.0), (3.0, OVER), (3.0, NAN), (3.0, OVER), (3.0, 1.0)]
    assert judged(guard, values) == [2, 3, 4]
    assert guard.check(parts, "run") == 0 and scale.state() == (8192.0, 1, 3, 4)


def test_a_loss_that_is_not_finite_is_a_bad_step_whatever_the_scale(world: World) -> None:
    """Overflows between two of them break no row."""
    guard, parts = (
        StepGuard(replace(TRAIN, max_consecutive_skips=2), world, scale=Scale(CPU)),
        held(nn.Linear(2, 2)),
    )
    judged(guard, [(3.0, 1.0), (NAN, NAN), (3.0, OVER)])
    assert guard.check(parts, "run") == 1
    judged(guard, [(NAN, NAN)], 4)
    with pytest.raises(RunError, match="not finite in steps"):
        guard.check(parts, "run")


def test_a_scale_below_one_ends_the_run(world: World) -> None:
    guard, parts = (
        StepGuard(TRAIN, world, scale=Scale(CPU, (2.0, 0, 7, 90))),
        held(model := nn.Linear(2, 2)),
    )
    judged(guard, [(3.0, OVER)], 100)
    assert guard.check(parts, "run") == 0
    judged(guard, [(3.0, OVER)], 101)
    with pytest.raises(RunError, match="at step 101: they overflow fp16") as error:
        guard.check(parts, "run")
    assert "9 steps overflowed" in error.value.why and "the weights are finite" in error.value.why
    with torch.no_grad():
        model.bias[0] = NAN
    with pytest.raises(RunError) as error:
        guard.check(parts, "run")
    assert "some weights are not finite: bias" in error.value.why


@pytest.mark.parametrize(
    ("bf16", "fp16", "auto"),
    [
        (True, True, torch.bfloat16),
        (True, False, torch.bfloat16),
        (False, True, torch.float16),
        (False, False, torch.float32),
    ],
)
def test_auto_is_what_all_devices_are_fast_in(bf16: bool, fp16: bool, auto: torch.dtype) -> None:
    world = World(0, 1, 0, Cpu(), bf16, native_fp16=fp16)
    assert world.precision("auto") == auto and world.precision("fp16") == torch.float16
