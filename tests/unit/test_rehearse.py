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
from trainfleet.config import Settings, load
from trainfleet.errors import BackendError, ConfigError, RunError
from trainfleet.launch import rehearsal
from trainfleet.launch.faults import FAULTS, Fault, rehearse
from trainfleet.launch.rehearsal import Outcome, Stage, config_of_run, stage
from trainfleet.launch.rehearsal_hosts import GUARD, HostStage, fleet_of
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


def test_hosts_are_harmed_only_by_consent_and_engines_not_at_all(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("name: a\nfleet: {backend: ssh, hosts: [a, b], shared_folder: /shared}\n")
    with pytest.raises(RunError, match="nobody has agreed"):
        main({"CONFIG": str(config)}, 0.0)
    config.write_text("name: a\nfleet: {backend: ssh, nodes: 1, hosts: [a], shared_folder: /shared}\n")
    with pytest.raises(ConfigError, match="needs two hosts"):
        main({"CONFIG": str(config), "YES": "1"}, 0.0)


def test_the_fleet_of_a_rehearsal_has_the_user_s_hosts_and_a_folder_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "name: a\ntrain: {steps: 5}\nfleet: {backend: ssh, nodes: 2, hosts: [a=1.2.3.4, b, c], shared_folder: /fsx, secrets: [KEY]}\n"
    )
    fleet = fleet_of(load(Settings(path))[0], "/fsx/rehearsal")
    assert fleet["hosts"] == ["a=1.2.3.4", "b", "c"] and fleet["nodes"] == 2 and "secrets" not in fleet
    assert fleet["shared_folder"] == "/fsx/rehearsal" and str(fleet["python"]).startswith("/fsx/env/")
    path.write_text(config_of_run(fleet, "/fsx/rehearsal/text", 8))
    assert load(Settings(path))[0].fleet.python == fleet["python"]


def test_the_guard_of_a_host_ends_marked_processes_and_removes_the_folder_when_no_sign_of_life_comes(tmp_path: Path) -> None:
    folder = tmp_path / "rehearsal"
    folder.mkdir()
    made = HostStage(tmp_path, transport=None, shared=str(folder), names=("nan",))  # type: ignore[arg-type]
    (folder / "sign").touch()
    (folder / "guard.sh").write_text(GUARD.format(folder=folder, silent=2, end=made.end_all()))
    os.utime(folder / "sign", (0, 0))
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    marked, other = (
        subprocess.Popen(["sleep", "60"], env=environment | {"TRAINFLEET_JOB": f"{folder}:{run}"})
        for run in ("rehearsal-nan", "nan")
    )
    subprocess.run(["sh", folder / "guard.sh"], env=environment, check=True, timeout=30)
    assert marked.wait(5) == -9 and other.poll() is None and not folder.exists()
    other.kill()
    other.wait()


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
