"""What the watchdog does on this machine: a rank is killed or stopped, and the run goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from test_line import Desk

from trainfleet.health import fence
from trainfleet.health.heartbeat_format import read_beats
from trainfleet.run.run_folder import Run, read_json

STEPS = "train.steps=240 checkpoint.every=20 train.log_every=20"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of a run that nothing happens to."""
    desk = Desk(tmp_path_factory.mktemp("whole"))
    desk.type("train", f"SET={STEPS}")
    return desk.losses()


def pid_of(run: Path, rank: int) -> int:
    return read_beats(run, fence.current(run).number)[rank].pid


@pytest.mark.parametrize("number, cause", [(signal.SIGKILL, "killed"), (signal.SIGSTOP, "hang")])
def test_a_rank_is_lost_and_the_run_goes_on(
    tmp_path: Path, whole: dict[int, float], number: signal.Signals, cause: str
) -> None:
    desk = Desk(tmp_path)
    launcher = desk.start("train", f"SET={STEPS}")
    desk.await_step(40)
    began = time.time()
    os.kill(pid_of(desk.run, 1), number)
    output = launcher.communicate(timeout=120)[0]
    assert launcher.returncode == 0, output
    verdict, restarted = [next(event for event in Run(desk.run).read_events() if event["event"] == kind)
                          for kind in ("verdict", "restarted")]  # fmt: skip
    assert (verdict["cause"], verdict["rank"], verdict["node"]) == (cause, 1, 1), verdict
    # Some 10 s in a step; a rank that is stopped while it writes a checkpoint has a minute (health/watchdog.py).
    assert verdict["time"] - began < 75 and restarted["time"] - began < 85
    assert desk.results()["restarts"] == 1 and desk.results()["status"] == "finished"
    assert desk.losses() == whole
    assert f"({cause})" in output and "attempt 2 of" in output
    desk.assert_nothing_runs()


def test_every_second_of_a_run_with_three_faults_is_counted_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    launcher = desk.start("train", "SET=train.steps=240 checkpoint.every=40 train.log_every=10")
    for attempt, step in enumerate((50, 110, 170), 1):
        desk.await_step(step)
        os.kill(pid_of(desk.run, attempt % 2), signal.SIGKILL)
    output = launcher.communicate(timeout=200)[0]
    assert launcher.returncode == 0, output
    results, events = desk.results(), Run(desk.run).read_events()
    began = next(event["started"] for event in events if event["event"] == "launched")
    ledger = results["ledger"]
    assert (
        results["restarts"] == 3 and abs(sum(ledger.values()) - (events[-1]["time"] - began)) < 1
    ), ledger
    assert {
        "useful",
        "repeated",
        "start",
        "down",
        "checkpoint",
        "compile",
    } <= ledger.keys() and min(ledger.values()) > 0
    assert results["goodput"] == pytest.approx(ledger["useful"] / sum(ledger.values()), abs=1e-3)
    assert sum(event["steps"] for event in events if event["event"] == "lost") >= 20


def test_what_would_only_happen_again_is_not_tried_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.type("tokenize")
    for shard in (tmp_path / "data" / "text").rglob("*.bin"):
        shard.write_bytes(b"")
    output = desk.type("train", code=1)
    results = read_json(desk.run / "results.json") or {}
    assert (results["status"], results["restarts"], results["verdict"]["cause"]) == (
        "failed",
        0,
        "data",
    ), output
    assert "(data)" in output and "attempt 2" not in output
