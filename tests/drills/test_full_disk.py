"""The folder that all nodes share is full: nothing ends for want of a log, a sign of life or a record; what can't be saved is said."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cockpit import Cockpit, pin, told

import verbs
from fleet.lab import Lab, lab

FULL = 15.0  # seconds, longer than a launcher's lease and a rank's silence may last


@pytest.fixture
def small() -> Iterator[Lab]:
    """Two hosts whose shared folder has room for little more than a run."""
    with lab(2, room="192m") as nodes:
        verbs.write_text(nodes.shared / "text")
        pin(nodes)
        yield nodes


def fill(nodes: Lab) -> Path:
    """The file that has taken all the room."""
    path = nodes.shared / "all-of-it"
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 65536)
        except OSError:
            return path


@pytest.mark.timeout(300)
def test_a_shared_folder_that_is_full_for_a_while_ends_nothing(small: Lab, tmp_path: Path) -> None:
    cockpit = Cockpit(small, tmp_path, "full", nodes=2)
    cockpit.type("setup")
    looker = cockpit.start("train", "SET=train.steps=1000000 checkpoint.every=50")
    cockpit.until("training", lambda: cockpit.step() >= 60)
    filler, step = fill(small), cockpit.step()
    time.sleep(FULL)
    assert cockpit.step() > step + 10, "it trains on, and says so"
    filler.unlink()
    freed = time.time()
    cockpit.until("a checkpoint", lambda: cockpit.events("checkpointed")[-1]["time"] > freed)
    cockpit.type("stop")
    assert looker.wait(60) == 130
    assert (
        not cockpit.events("restarted")
        and cockpit.events("unsaved")
        and cockpit.results()["status"] == "stopped"
    )
    logged = sorted(cockpit.losses())
    assert logged == [1, *range(5, logged[-1] + 1, 5)], (
        "every line of the record came once there was room"
    )
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 30)
    told(
        "the shared folder full for 15 s",
        None,
        0,
        0,
        "",
        "checkpoints of that time are not saved, the rest comes later",
    )


@pytest.mark.timeout(300)
def test_a_run_that_ends_while_the_folder_is_full_says_that_it_is(
    small: Lab, tmp_path: Path
) -> None:
    cockpit = Cockpit(small, tmp_path, "full", nodes=2)
    cockpit.type("setup")
    looker = cockpit.start("train", "SET=train.steps=400 checkpoint.every=50")
    cockpit.until("training", lambda: cockpit.step() >= 60)
    filler = fill(small)
    output = looker.communicate(timeout=200)[0]
    assert (
        looker.returncode == 1 and "the disk is full, or a file can't be written (disk)" in output
    ), output
    filler.unlink()
    output = cockpit.type("train", "SET=train.steps=400 checkpoint.every=50")
    assert "finished" in output and cockpit.results()["steps"] == 400
    cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 30)
    told(
        "the shared folder full at the end of a run",
        None,
        None,
        None,
        "",
        "disk; once there is room, the same command ends it",
    )
