"""The folder that all nodes share is full: nothing ends for want of a log, a sign of life or a record."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cockpit import TABLE, Cockpit, pin

import verbs
from fleet.lab import Lab, lab

FULL = 15.0  # seconds, longer than a launcher's lease and a rank's silence may last


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
def test_a_shared_folder_that_is_full_for_a_while_ends_nothing(whole: dict[int, float], tmp_path: Path) -> None:
    with lab(2, room="192m") as nodes:
        verbs.write_text(nodes.shared / "text")
        pin(nodes)
        cockpit = Cockpit(nodes, tmp_path, "full", nodes=2)
        cockpit.type("setup")
        looker = cockpit.start("train", "SET=train.steps=1500 checkpoint.every=100")
        cockpit.until("training", lambda: cockpit.step() >= 60)
        filler, struck = fill(nodes), time.time()
        time.sleep(FULL)
        filler.unlink()
        output = looker.communicate(timeout=200)[0]
        assert looker.returncode == 0, output + cockpit.words()
        assert not cockpit.events("restarted") and cockpit.results()["status"] == "finished", output
        losses = cockpit.losses()
        assert {step: losses[step] for step in (1, 5, 50)} == pytest.approx({step: whole[step] for step in (1, 5, 50)}, rel=1e-3)
        assert set(losses) == {1, *range(5, 1501, 5)}, "every line of the record came once there was room"
        unsaved = cockpit.events("unsaved")
        noticed = f"{unsaved[0]['time'] - struck:6.1f} s" if unsaved else f"{'':8}"
        TABLE.append(f"{'shared folder full, 15 s':24} {noticed} {0.0:12.1f} s {0:11}  not saved, and goes on")
        cockpit.until("nothing is left", lambda: not cockpit.leftovers(), 30)
