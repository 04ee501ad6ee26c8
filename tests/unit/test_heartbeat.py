"""The hearts of a node's ranks: one file for all of them, whichever of them dies or stands still, and what they obey."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainfleet.health import heartbeat, heartbeat_format, lease
from trainfleet.health.heartbeat import Heart
from trainfleet.health.heartbeat_format import Beat, Beats, read_beats, write_beats
from trainfleet.health.lease import Holder, Vacancy

RANK = """import sys, time; from pathlib import Path; from trainfleet.health import heartbeat
heartbeat.EVERY = 0.1
heart = heartbeat.Heart(Path(sys.argv[1]), rank=int(sys.argv[2]), node=3, order=1)
heart.at("step", 7); time.sleep(60)"""


def until(what: Callable[[], Any], seconds: float = 20) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert found
    return found


@pytest.fixture
def node(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three ranks of one node, each a process."""
    words = [sys.executable, "-c", RANK, str(tmp_path)]
    ranks = [
        subprocess.Popen([*words, str(rank)], env={"PYTHONPATH": "python"}) for rank in range(3)
    ]
    until(
        lambda: (
            {beat.phase for beat in read_beats(tmp_path, 1).values()} == {"step"}
            and len(read_beats(tmp_path, 1)) == 3
        )
    )
    yield ranks
    for rank in ranks:
        rank.kill()
        rank.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_whichever_rank_goes_the_others_beat_on_and_its_own_beat_stays_as_it_was(
    tmp_path: Path, node: list[subprocess.Popen[bytes]], first: int, number: signal.Signals
) -> None:
    found = {path.name for path in (tmp_path / "heartbeats").iterdir()}
    assert found - {"links-3"} == {"node-3"}, (
        "one file for all ranks of the node, and its links if the machine has any"
    )
    node[first].send_signal(number)
    time.sleep(0.3)  # the rank that does the node's round may have been the one
    then = read_beats(tmp_path, 1)
    others = [rank for rank in range(3) if rank != first]
    until(
        lambda: all(read_beats(tmp_path, 1)[rank].time > then[rank].time + 0.3 for rank in others)
    )
    assert read_beats(tmp_path, 1)[first].time == then[first].time


def test_a_file_that_did_not_change_is_not_opened_again(tmp_path: Path) -> None:
    for number in range(5):
        write_beats(tmp_path, number, 1, [Beat(number, number, 1, 1, "step", 1, 0.0, 1.0)])
    reader, opened = Beats(tmp_path, 1), list[object]()
    sys.addaudithook(
        lambda event, words: (
            opened.append(words[0]) if event == "open" and "node-" in str(words[0]) else None
        )
    )
    assert len(reader.new()) == 5 and len(opened) == 5
    assert reader.new() == {} and len(opened) == 5
    write_beats(tmp_path, 2, 1, [Beat(2, 2, 1, 1, "step", 2, 0.0, 2.0)])
    assert {beat.step for beat in reader.new().values()} == {2}


GOOD = heartbeat_format.pack(0, 1, [Beat(0, 0, 1, 1, "step", 1, 0.0, 1.0)])


@pytest.mark.parametrize(
    "text", [b"", GOOD[:5], GOOD[:-1], GOOD + b"x", b"TFB1" + GOOD[4:], b"\xff" * len(GOOD), b'{"attempt": 1, "beats": []}' * 9,
             GOOD[:20] + b"\x63" + GOOD[21:]],
)  # fmt: skip
def test_what_is_no_beat_is_left_out(text: bytes) -> None:
    assert (
        heartbeat_format.parse(text, 1) == []
        and len(heartbeat_format.parse(GOOD, 1)) == 1
        and heartbeat_format.parse(GOOD, 2) == []
    )


def test_a_beat_comes_back_as_it_was() -> None:
    told = [
        Beat(9999, 3, 2**22, 7, phase, 2**40, 0.5, 1.8e9, 1.25, 0.1)
        for phase in heartbeat_format.PHASES
    ]
    assert heartbeat_format.parse(heartbeat_format.pack(3, 7, told), 7) == told


def test_a_disk_that_is_full_ends_no_heart_and_beats_come_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(heartbeat, "EVERY", 0.02)
    monkeypatch.setattr(heartbeat, "write_beats", full)
    heart = Heart(tmp_path, 0, 0, 0)
    time.sleep(0.2)
    assert not read_beats(tmp_path, 0)
    monkeypatch.setattr(heartbeat, "write_beats", write_beats)
    until(lambda: read_beats(tmp_path, 0))
    heart.stop()
    assert (
        capfd.readouterr().err.count(
            "no heartbeat could be written: [Errno 28] No space left on device"
        )
        == 1
    )


def test_nothing_is_left_in_memory_by_ranks_that_ended(tmp_path: Path) -> None:
    hearts = [Heart(tmp_path, rank, 0, 1) for rank in range(2)]
    memory = hearts[0].node.shared
    assert (
        memory == hearts[1].node.shared
        and memory.stat().st_uid == os.getuid()
        and not memory.is_relative_to(tmp_path)
    )
    hearts[0].stop()
    assert memory.exists()
    hearts[1].stop()
    assert not memory.exists() and {beat.phase for beat in read_beats(tmp_path, 1).values()} == {
        "end"
    }


def test_a_rank_that_ends_at_once_leaves_the_memory_to_those_whose_hearts_have_yet_to_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Heart, "_run", lambda heart: None)
    first, second = (Heart(tmp_path, rank, 0, 1) for rank in range(2))
    first.stop()
    assert first.node.shared.exists()
    second.stop()
    assert not first.node.shared.exists()


def test_where_memory_is_another_user_s_the_run_folder_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory" / f"trainfleet-{os.getuid()}").parent.mkdir()
    (tmp_path / "memory" / f"trainfleet-{os.getuid()}").symlink_to(tmp_path)  # planted by somebody
    monkeypatch.setattr(heartbeat, "MEMORY", tmp_path / "memory")
    heart = Heart(tmp_path / "run", 0, 0, 1)
    heart.stop()
    assert heart.node.shared.is_relative_to(tmp_path / "run") and read_beats(tmp_path / "run", 1)


def holder(time: float, code: int | None = None) -> Holder:
    return Holder("node0", 1, 1, time, code)


def test_a_lease_falls_vacant_when_it_was_renewed_and_is_no_more() -> None:
    vigil = Vacancy()
    for moment in (1.0, 2.0, 3.0):
        vigil = vigil.look(holder(moment), 5.0)
        assert vigil.vacant == 0.0
    for looks in (1, 2, 3):
        vigil = vigil.look(holder(3.0), 5.0)
        assert vigil.vacant == 5.0 * looks
    assert vigil.look(holder(4.0), 5.0).vacant == 0.0, "a standby has taken over"
    assert vigil.look(None, 5.0).vacant == 20.0, "a lease that can't be read is no renewal"
    assert vigil.look(None, 5.0).look(holder(3.0), 5.0).vacant == 25.0, (
        "nor is one that can be read again"
    )


def test_what_a_launcher_of_another_day_left_is_not_waited_for() -> None:
    vigil = Vacancy()
    for _ in range(100):
        vigil = vigil.look(holder(1.0), 5.0)
    assert vigil.vacant == 0.0


class Alone:
    """A heart that must not go on without a launcher, with one that renews its lease until it does not."""

    def __init__(self, folder: Path, patience: float) -> None:
        self.said = list[float]()
        self.heart = Heart(folder, 0, 0, 1, patience)
        self.heart.alone = self.said.append
        self.lease = lease.Lease(folder)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "EVERY", 0.02)
    monkeypatch.setattr(heartbeat, "LEASE_EVERY", 0.1)
    monkeypatch.setattr(lease, "EVERY", 0.02)


def test_a_rank_without_a_launcher_is_told_once(tmp_path: Path, quick: None) -> None:
    alone = Alone(tmp_path, patience=0.5)
    with alone.lease:
        time.sleep(1.0)
        assert not alone.said
    until(lambda: alone.said)
    time.sleep(0.3)
    assert len(alone.said) == 1 and alone.said[0] >= 0.5
    alone.heart.stop()


def test_a_rank_that_may_be_without_a_launcher_is_not(tmp_path: Path, quick: None) -> None:
    alone = Alone(tmp_path, patience=0.0)
    with alone.lease:
        time.sleep(0.3)
    time.sleep(1.0)
    assert not alone.said
    alone.heart.stop()


STUCK = """import sys, time; from pathlib import Path; from trainfleet.health import heartbeat, lease
heartbeat.EVERY, heartbeat.LEASE_EVERY, heartbeat.TO_LEAVE = 0.02, 0.1, 0.5
heart = heartbeat.Heart(Path(sys.argv[1]), 0, 0, 1, 0.5)
lease.EVERY = 0.02
with lease.Lease(Path(sys.argv[1])): time.sleep(0.5)
time.sleep(60)"""


def test_a_rank_that_could_not_leave_at_a_step_ends(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK, str(tmp_path)],
        env={"PYTHONPATH": "python"},
        timeout=30,
        text=True,
        capture_output=True,
    )
    assert (
        done.returncode == heartbeat.FENCED
        and "this rank did not reach the end of a step" in done.stderr
    )
