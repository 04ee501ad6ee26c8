"""What rank 0 records while it trains: a disk that is full ends no training, and what it had no room for follows."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainfleet.config import Settings, load
from trainfleet.engine import record
from trainfleet.engine.checkpoint import Saved, TrainingProgress
from trainfleet.engine.record import Recorder
from trainfleet.engine.timing import Slowest, Stopwatch
from trainfleet.health.heartbeat_format import Beat, write_beats
from trainfleet.report.summary import SKIPPED, status
from trainfleet.run import run_folder
from trainfleet.run.run_folder import Run, read_lines
from trainfleet.trust.errors import RunError


class Disk:
    """Stands before the run folder's writers; full until `room`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = True
        for module, name in (
            (record, "append_line"),
            (run_folder, "append_line"),
            (run_folder, "write_atomic"),
        ):
            monkeypatch.setattr(module, name, self.before(getattr(module, name)))

    def before(self, write: Any) -> Any:
        def written(path: Path, content: Any) -> None:
            if not self.room:
                raise run_folder.unwritable(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            write(path, content)

        return written


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(record, "RESULTS_EVERY", 0.0)
    (tmp_path / "config.yaml").write_text("name: x\n")
    config = load(Settings(tmp_path / "config.yaml"))[0]
    (tmp_path / "run").mkdir()
    watch = Stopwatch(time.time())
    watch.start_training(0.0)
    return Recorder(Run(tmp_path / "run"), config.train, TrainingProgress(), watch, 1e-12)


def step(recorder: Recorder, number: int) -> None:
    recorder.progress.step = number
    recorder.step(loss=3.0 - number / 10, norm=1.0, valid_loss=None, skipped=0, memory=1)


def test_a_full_disk_ends_no_training_and_its_lines_follow(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = Disk(monkeypatch)
    step(recorder, 1)
    disk.room = False
    step(recorder, 2)
    recorder.saved(
        [
            Saved(2, "checkpoints/step-2", 0.1, None),
            Saved(2, "b", 0.1, RunError("not saved", why="full")),
        ]
    )
    step(recorder, 3)
    assert [line["step"] for line in read_lines(recorder.run.metrics)] == [1]
    disk.room = True
    step(recorder, 4)
    assert [line["step"] for line in read_lines(recorder.run.metrics)] == [1, 2, 3, 4]
    assert [event["event"] for event in recorder.run.read_events()] == [
        "began",
        "checkpointed",
        "unsaved",
    ]
    assert recorder.run.read_results()["steps"] == 4
    assert (
        capsys.readouterr().out.count(
            "training continues; its records are queued until the disk has space"
        )
        == 1
    )
    recorder.close()


def test_a_run_whose_record_never_found_room_does_not_end_well(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    disk.room = False
    step(recorder, 1)
    with pytest.raises(RunError, match="can't write") as failed:
        recorder.close()
    assert failed.value.why == "No space left on device"


def test_a_tensorboard_that_fails_is_begun_anew(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    step(recorder, 1)
    board = recorder._board()

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(board, "flush", full)
    step(recorder, 2)
    assert recorder.board is None
    step(recorder, 3)
    assert recorder.board is not None and recorder.board is not board
    assert [line["step"] for line in read_lines(recorder.run.metrics)] == [1, 2, 3]
    recorder.close()


def test_the_slowest_rank_is_named_once_the_beats_of_all_are_there(tmp_path: Path) -> None:
    heart: Any = SimpleNamespace(folder=tmp_path, attempt=SimpleNamespace(number=2))
    slowest = Slowest(heart, ranks=4)

    def beat(node: int, attempt: int, **busy: float) -> None:
        beats = [
            Beat(int(rank[1:]), node, 1, attempt, "step", 9, 0.0, time.time(), 1.0, seconds)
            for rank, seconds in busy.items()
        ]
        write_beats(tmp_path, node, attempt, beats)

    assert slowest.measure() == {}
    beat(0, 2, r0=0.1, r1=0.2)
    beat(1, 1, r2=9.0, r3=9.0)  # of an attempt before this one
    assert slowest.measure() == {}
    beat(1, 2, r2=0.5, r3=0.3)
    assert slowest.measure() == {"slowest_rank": 2, "slowest_own": 0.5, "median_own": 0.25}
    beat(0, 2, r0=0.1, r1=0.75)  # and the other node has written none since
    assert slowest.measure()["slowest_rank"] == 1
    assert (
        Slowest(heart, ranks=5).measure() == {}
    )  # the fifth's are on a node whose folder is another one


def test_what_overflowed_is_told_apart_from_what_was_skipped(
    recorder: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [
        (0, 0, 65536.0),
        (1, 2, 16384.0),
        (1, 2, 16384.0),
    ]  # steps skipped and overflowed so far, and the loss scale
    for number, (skipped, overflowed, scale) in enumerate(told, 1):
        recorder.progress.step = number
        more = {"loss_scale": scale, "overflowed": overflowed}
        recorder.step(loss=3.0, norm=1.0, valid_loss=None, skipped=skipped, memory=1, more=more)
    found = [
        (event["event"], event["step"], event["steps"])
        for event in recorder.run.read_events()
        if "steps" in event
    ]
    assert found == [("skipped", 2, 1), ("overflowed", 2, 2)]
    assert (
        "2 steps skipped: gradients overflowed fp16; the loss scale is now 16384"
        in capsys.readouterr().out
    )
    recorder.update(status="running", name="run", total_steps=9)
    lines = [line for line in status(recorder.run).splitlines() if line.startswith("skipped")]
    assert [line.split(maxsplit=1)[1] for line in lines] == [
        f"1 step: {SKIPPED}; 2 steps overflowed fp16; the loss scale is 16,384"
    ]
