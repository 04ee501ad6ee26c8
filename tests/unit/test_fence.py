"""Which attempt may run: numbers that are given once, by whoever asks, and ranks that leave when theirs is over."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainfleet.engine.__main__ import record_fault
from trainfleet.health import fence
from trainfleet.health.fence import Attempt, Fenced
from trainfleet.health.heartbeat import FENCED
from trainfleet.health.heartbeat_format import Beat, read_beats, write_beats
from trainfleet.run import records
from trainfleet.run.run_folder import Run


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "TO_LEAVE", 0.0)


HEART = """import sys, time; from pathlib import Path; from trainfleet.health import heartbeat
heartbeat.EVERY = 0.05
heart = heartbeat.Heart(Path(sys.argv[1]), rank=0, node=0, order=int(sys.argv[2]))
if len(sys.argv) > 3: heart.meet(int(sys.argv[3]))
print("beats", flush=True); time.sleep(20)"""


def start(folder: Path, *numbers: int) -> subprocess.Popen[str]:
    """A rank of a process of its own, whose heart beats by now."""
    words = [sys.executable, "-c", HEART, str(folder), *map(str, numbers)]
    process = subprocess.Popen(
        words,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"PYTHONPATH": "python"},
    )
    assert process.stdout and process.stdout.readline() == "beats\n"
    return process


def test_a_launcher_s_attempts_are_numbered_on_and_older_beats_are_cleared(tmp_path: Path) -> None:
    assert fence.current(tmp_path) == Attempt(0, 0)
    assert [fence.begin(tmp_path) for _ in range(3)] == [1, 2, 3]
    write_beats(tmp_path, 0, 3, [Beat(0, 0, 1, 3, "step", 1, 0.0, 0.0)])
    assert fence.begin(tmp_path) == 4 and not read_beats(tmp_path, 3)
    assert fence.current(tmp_path) == Attempt(4, 4)


def test_an_engine_that_starts_the_same_order_again_gets_another_number(tmp_path: Path) -> None:
    order = fence.begin(tmp_path)
    assert [fence.enter(tmp_path, order) for _ in range(3)] == [1, 2, 3]
    assert fence.current(tmp_path) == Attempt(1, 3)
    assert fence.begin(tmp_path) == 4 and fence.enter(tmp_path, 4) == 4
    with pytest.raises(Fenced, match="a newer attempt replaced this one before it started"):
        fence.enter(tmp_path, order)


def test_where_every_start_finds_an_empty_folder_the_engine_s_count_tells_them_apart(
    tmp_path: Path,
) -> None:
    assert fence.enter(tmp_path / "first", 5) == 5
    assert (
        fence.enter(tmp_path / "second", 5, least=1) == 6
        and fence.enter(tmp_path / "third", 5, least=2) == 7
    )
    assert fence.current(tmp_path / "third") == Attempt(5, 7)


def test_of_starts_at_the_same_time_each_gets_a_number_of_its_own(tmp_path: Path) -> None:
    order = fence.begin(tmp_path)
    with ThreadPoolExecutor(12) as pool:
        numbers = list(pool.map(lambda _: fence.enter(tmp_path, order), range(12)))
    assert len(set(numbers)) == 12 and fence.current(tmp_path) == Attempt(order, max(numbers))


def test_a_late_start_of_an_old_order_is_no_newer_than_a_new_one(tmp_path: Path) -> None:
    order = fence.begin(tmp_path)
    newest = fence.begin(tmp_path)
    assert fence._claim(tmp_path, newest + 1, order) == 3, "it had looked before the new order came"
    assert fence.current(tmp_path) == Attempt(newest, newest)
    assert fence.begin(tmp_path) == 4


def test_ranks_of_an_earlier_start_of_the_same_order_leave(tmp_path: Path) -> None:
    """As a Slurm requeue or the next attempt of a Batch job starts them: TRAINFLEET_ATTEMPT stays what it was."""
    order = fence.begin(tmp_path)
    before = start(tmp_path, order, fence.enter(tmp_path, order))
    newer = start(tmp_path, order, fence.enter(tmp_path, order))
    assert before.wait(20) == FENCED and "attempt 1 ended while" in before.communicate()[0]
    assert newer.poll() is None
    newer.kill()
    newer.communicate()


def test_a_rank_that_has_not_met_the_others_leaves_for_a_new_order_alone(tmp_path: Path) -> None:
    order = fence.begin(tmp_path)
    fence.enter(tmp_path, order)
    waits = start(tmp_path, order)  # a rank of the second start, which does not know its number yet
    assert fence.enter(tmp_path, order) == 2
    with pytest.raises(subprocess.TimeoutExpired):
        waits.wait(0.5)
    fence.begin(tmp_path)
    assert waits.wait(20) == FENCED
    waits.communicate()


def test_what_fails_in_an_attempt_that_is_over_is_no_fault(tmp_path: Path) -> None:
    run, order = Run(tmp_path, records.node(1, 1)), fence.begin(tmp_path)
    number = fence.enter(tmp_path, order)
    record_fault(run, ValueError("its own"), Attempt(order, number))
    later = fence.enter(tmp_path, order)
    record_fault(run, RuntimeError("Connection closed by peer"), Attempt(order, number))
    record_fault(run, RuntimeError("before it met the others"), Attempt(order, 0))
    record_fault(run, ValueError("its own again"), Attempt(order, later))
    assert [event["message"] for event in run.read_events()] == [
        "its own",
        "before it met the others",
        "its own again",
    ]


def test_a_host_that_remembers_a_listing_sees_a_new_attempt_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a client of NFS does, for up to a minute; a file that it opens it asks for."""
    fence.begin(tmp_path)
    names = [path.name for path in (tmp_path / "heartbeats/attempts").iterdir()]
    monkeypatch.setattr(os, "listdir", lambda path: names)
    assert fence.begin(tmp_path) == 2 and fence.current(tmp_path) == fence.Attempt(2, 2)
    (tmp_path / "heartbeats/newest").write_text("rubbish")
    assert fence.current(tmp_path) == fence.Attempt(1, 1)
