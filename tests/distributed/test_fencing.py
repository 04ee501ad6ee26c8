"""Ranks that must not go on: an engine has started the run again by itself, or no launcher is left to look after it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import ranks
from ranks import Bench

from trainfleet.health import fence, lease
from trainfleet.health.heartbeat import FENCED
from trainfleet.health.heartbeat_format import read_beats
from trainfleet.run.run_folder import Run

LONG = {"train.steps": 100_000, "checkpoint.every": 5, "train.validate_every": 0}


def test_ranks_that_an_engine_starts_again_take_over_and_those_before_leave(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Slurm requeue or another attempt of a Batch job, of which no launcher knows: TRAINFLEET_ATTEMPT stays what it was."""
    run = bench.prepare("again", 2, **LONG)
    order = fence.begin(run)
    monkeypatch.setenv(fence.VARIABLE, str(order))
    first = bench.start(run, 2)
    ranks.await_step(run, 6, first)
    assert {beat.attempt for beat in read_beats(run, order).values()} == {order}

    second = bench.start(run, 2)
    said = first.communicate(timeout=60)[0]
    assert first.returncode == FENCED and f"attempt {order} has ended" in said, said
    ranks.await_that(lambda: bool(ranks.events(run, "resumed")), second)
    ranks.await_that(lambda: len(read_beats(run, order + 1)) == 2, second)
    (run / "stop").touch()
    said = second.communicate(timeout=60)[0]
    assert second.returncode == 0 and ranks.results(run)["status"] == "stopped", said
    assert fence.current(run) == fence.Attempt(order, order + 1)
    assert {path.name for path in Run(run).events.iterdir()} == {
        f"node-0-{order}.jsonl",
        f"node-0-{order + 1}.jsonl",
    }


QUICK = """import sys; sys.path.insert(0, {folder!r})
import trainfleet.engine.__main__, ranks; from trainfleet.health import heartbeat
heartbeat.LEASE_EVERY = 0.2
ranks.run_all(sys.argv[1:])"""


def test_ranks_whose_launcher_is_gone_save_a_step_and_leave(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bench.prepare("orphans", 2, **LONG)
    monkeypatch.setenv(lease.VARIABLE, "2")
    with lease.Lease(run):
        process = bench.start(run, 2, "-c", QUICK.format(folder=str(Path(__file__).parent)))
        ranks.await_step(run, 3, process)
        time.sleep(4)
        assert process.poll() is None, "its launcher is there"
    said = process.communicate(timeout=60)[0]
    told = ranks.results(run)
    assert process.returncode == 0 and told["status"] == "stopped", said
    assert "no standby took over; all ranks save and exit" in said
    assert (run / "checkpoints" / f"step-{told['steps']:08d}").is_dir()
    assert ranks.events(run, "orphaned")[0]["seconds"] >= 2
