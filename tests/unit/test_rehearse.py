"""make rehearse without the runs that it breaks: what it refuses, what it says, and that it leaves nothing, whatever ends it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainfleet.cli.rehearse import chosen, describe, main
from trainfleet.errors import BackendError, ConfigError, RunError
from trainfleet.launch import rehearsal
from trainfleet.launch.faults import FAULTS, Fault, rehearse
from trainfleet.launch.rehearsal import Outcome, Stage, stage
from trainfleet.runs import take_lock
from trainfleet.watch.causes import CAUSES


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the folder of rehearsals will be; the unbroken run costs nothing."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(Stage, "end", lambda self, process: process.kill() or (process.communicate() and 0))
    monkeypatch.setattr(Stage, "losses", lambda self, name: {1: 2.0})
    monkeypatch.setattr(rehearsal, "LEFT_WITHIN", 0.1)
    yield tmp_path / f"trainfleet-rehearsal-{os.getuid()}"


def test_faults_are_chosen_by_name_and_a_typo_is_told() -> None:
    assert [fault.name for fault in chosen("nan, rank-killed")] == ["nan", "rank-killed"] and len(chosen("")) == len(FAULTS)
    with pytest.raises(ConfigError, match="rank-kiled is no fault; did you mean rank-killed"):
        chosen("rank-kiled")
    assert all({*fault.verdicts} <= CAUSES.keys() for fault in FAULTS.values())


def test_a_fleet_is_not_rehearsed_on_yet(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: a\nfleet: {backend: ssh, hosts: [a, b], shared_folder: /shared}\n")
    with pytest.raises(ConfigError, match="can't be rehearsed on yet"):
        main({"CONFIG": str(tmp_path / "config.yaml")}, 0.0)


def test_its_folder_is_made_for_it_and_goes_with_it(place: Path) -> None:
    with stage() as made:
        assert made.folder == place and (place / "config.yaml").exists() and made.whole == {1: 2.0}
        with pytest.raises(BackendError, match="another rehearsal is under way"), stage():
            pass
    assert not place.exists()
    with pytest.raises(KeyboardInterrupt), stage():
        raise KeyboardInterrupt
    assert not place.exists()


def test_what_a_killed_rehearsal_left_is_ended_and_removed(place: Path) -> None:
    (place / "runs" / "whole").mkdir(parents=True)
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=place)
    with stage() as made:
        assert left.wait(5) == -9 and not (made.folder / "runs" / "whole").exists()


def test_an_unbroken_run_that_fails_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stage, "end", lambda self, process: process.kill() or (process.communicate() and 1))
    with pytest.raises(RunError, match="even the run that nothing happens to"), stage():
        pass
    assert not place.exists()


def test_a_process_that_is_left_over_breaks_the_promise(place: Path) -> None:
    def play(fault: Fault, made: Stage) -> Outcome:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=made.folder)
        time.sleep(0.2)
        return Outcome(fault.name, 1.0, "killed", 3, 4.0)

    with stage() as made:
        (outcome,) = rehearse([Fault("x", "what", ("killed",), play)], made)
    assert outcome.broken == ("1 processes were left over",) and "BROKEN" in describe(outcome)
    assert describe(Outcome("x", 1.0, "killed", 3, 4.0)).split() == ["x", "1", "s", "killed", "3", "4", "s", "kept"]


def test_the_folder_s_lock_is_free_afterwards(place: Path) -> None:
    with stage():
        pass
    place.mkdir()
    lock = take_lock(place)
    assert lock is not None
    lock.close()
