"""The speed model: what it must get right whatever its constants are, and how near it comes to published figures."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from trainfleet import hardware
from trainfleet.config import Settings, load
from trainfleet.config.pace import as_device, work_of
from trainfleet.config.speed import Device, Step, Work, step_of, tokens_per_second

sys.path.append(str(Path(__file__).parents[1] / "bench"))
import fit_planner

RECIPE = Path(hardware.__file__).parent / "recipes/llama-3-8b-p5.yaml"
H100 = Device("H100", {"fp8": 1979e12, "bf16": 989e12, "fp32": 494e12}, 3.35e12, 450e9, 50e9, 8, 0.7, 0.3)
LLAMA = Work(
    32, 4096, 14336, 32, 8, 128256, gated=True, causal=True, length=8192, micro_batch=1, passes=8, data=64, shard=64, zero=3,
    tensor=1, pipeline=1, context=1, interleave=1, format="bf16",
)  # fmt: skip


def test_the_parts_are_the_whole_and_none_is_negative() -> None:
    step = step_of(LLAMA, H100)
    parts = [getattr(step, field.name) for field in fields(Step)]
    assert step.total == pytest.approx(sum(parts)) and min(parts) >= 0
    assert step.limit() == "products"


@pytest.mark.parametrize(
    "slower",
    [
        {"tensor": 8, "data": 8, "shard": 8},  # an exchange in every block
        {"tensor": 16, "data": 4, "shard": 4},  # over nodes
        {"pipeline": 8, "data": 8, "shard": 8},  # idle at both ends of a step
        {"recompute": "full"},
        {"format": "fp32", "weight_bytes": 4},
    ],
)
def test_what_costs_something_is_slower(slower: dict[str, object]) -> None:
    assert tokens_per_second(replace(LLAMA, **slower), H100) < 0.95 * tokens_per_second(LLAMA, H100)  # type: ignore[arg-type]


def test_what_saves_something_is_faster() -> None:
    fp8, interleaved = replace(LLAMA, format="fp8"), replace(LLAMA, pipeline=8, data=8, shard=8, interleave=4)
    assert tokens_per_second(fp8, H100) > 1.1 * tokens_per_second(LLAMA, H100)
    assert tokens_per_second(interleaved, H100) > tokens_per_second(replace(interleaved, interleave=1), H100)
    assert tokens_per_second(LLAMA, replace(H100, outside=400e9)) > tokens_per_second(LLAMA, H100)


def test_a_rank_gets_slower_with_the_fleet_where_weights_are_gathered_over_it() -> None:
    speeds = [tokens_per_second(replace(LLAMA, data=ranks, shard=ranks), H100) for ranks in (8, 64, 1024, 32768)]
    assert speeds == sorted(speeds, reverse=True) and speeds[-1] < 0.95 * speeds[0]


def test_of_a_config_comes_the_work_that_it_says(tmp_path: Path) -> None:
    config, _ = load(Settings(RECIPE, "train.layout.tensor=2 train.layout.shard=32 train.recompute=full"))
    work, device = work_of(config), as_device(config, hardware.H100)
    assert (work.world, work.tensor, work.data, work.recompute) == (64, 2, 32, "full")
    assert work.step_tokens == config.train.global_batch * config.train.sequence_length
    assert (device.node, device.outside) == (8, 50e9)


def test_published_runs_are_foretold() -> None:
    """As near as tests/bench/LOG.md says; each row with its source stands in published.jsonl."""
    rows = fit_planner.usable([json.loads(line) for line in fit_planner.ROWS.read_text().splitlines()])
    model = fit_planner.Model()
    errors = sorted(abs(2.718281828**error - 1) for error in model.errors(model.given, rows))
    assert len(rows) > 400
    assert statistics.median(errors) < 0.07 and errors[int(0.8 * len(errors))] < 0.20 and errors[int(0.9 * len(errors))] < 0.25
