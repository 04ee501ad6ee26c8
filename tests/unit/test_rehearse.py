"""make rehearse without the runs that it breaks: what it refuses, how a rank plays its fault, and that nothing is left, whatever ends it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from report_runs import make_run

import rehearsals
import verbs
from trainfleet.backends import backend_of
from trainfleet.cli import jobs
from trainfleet.cli.jobs import row
from trainfleet.config import Config, Settings, load
from trainfleet.health.faults import (
    BREAK_AT,
    FAULTS,
    MAJORITY,
    SMALL,
    VARIABLE,
    Fault,
    environment,
    ordered,
)
from trainfleet.launch import faults as playing
from trainfleet.launch import rehearsal
from trainfleet.launch.faults import chosen, lacking, rehearse, stage_for
from trainfleet.launch.rehearsal import END, LOOK, RehearsalStage, config_of_run, fleet_of
from trainfleet.report import html
from trainfleet.report.rehearsal_table import FaultOutcome, write
from trainfleet.run.run_folder import Run, take_lock
from trainfleet.trust.errors import BackendError, ConfigError, InputError, RunError
from trainfleet.watch.causes import CAUSES


@pytest.fixture(autouse=True)
def _program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of these tests find the program."""
    monkeypatch.setenv("PYTHONPATH", verbs.PACKAGES)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the folder of rehearsals will be; the unbroken run costs nothing."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(
        RehearsalStage, "end", lambda self, process: process.kill() or (process.communicate() and 0)
    )
    monkeypatch.setattr(RehearsalStage, "losses", lambda self, name: {1: 2.0})
    monkeypatch.setattr(rehearsal, "LEFT_WITHIN", 0.1)
    yield tmp_path / f"trainfleet-rehearsal-{os.getuid()}"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text("name: a\nfleet: {backend: local, nodes: 2}\n")
    return load(Settings(path))[0]


def test_faults_are_chosen_by_name_and_a_typo_is_told() -> None:
    assert [fault.name for fault in chosen("nan, rank-killed")] == ["nan", "rank-killed"] and len(
        chosen("")
    ) == len(FAULTS)
    with pytest.raises(ConfigError, match="rank-kiled is not a fault; did you mean rank-killed"):
        chosen("rank-kiled")
    assert all({*fault.verdicts} <= {*CAUSES, "none"} for fault in FAULTS.values())
    assert playing.PLAYS.keys() <= FAULTS.keys()
    assert all(fault.play or fault.name in playing.PLAYS for fault in FAULTS.values())
    assert BREAK_AT % rehearsal.EVERY, "a fault must cost at least one step"


IN_S3 = "data: {tokenized_path: 's3://bucket/data'}\ncheckpoint: {path: 's3://bucket/checkpoints'}"


@pytest.mark.parametrize(
    ("fleet", "expected"),
    [
        ("{backend: ssh, hosts: [a, b], shared_folder: /shared}", "needs your consent"),
        ("{backend: slurm}", "needs your consent"),
        (
            "{backend: slurm, hosts: [login], shared_folder: /shared}",
            "on the machine that has sbatch",
        ),
        (
            f"{{backend: batch, shared_folder: 's3://bucket/runs', container: build, instance_type: c7i.8xlarge}}\n{IN_S3}",
            "needs your consent",
        ),
    ],
)
def test_nodes_are_harmed_only_by_consent(tmp_path: Path, fleet: str, expected: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"name: a\nfleet: {fleet}\n")
    with pytest.raises((RunError, ConfigError), match=expected):
        jobs.rehearse({"CONFIG": str(config)}, 0.0)


def test_one_host_is_too_few(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "name: a\nfleet: {backend: ssh, nodes: 1, hosts: [a], shared_folder: /shared}\n"
    )
    with pytest.raises(ConfigError, match=r"a rehearsal needs two hosts, .*; the fleet has 1"):
        jobs.rehearse({"CONFIG": str(config), "YES": "1"}, 0.0)


def test_the_fleet_of_a_rehearsal_has_the_user_s_hosts_and_a_folder_of_its_own(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "name: a\ntrain: {steps: 5}\nfleet: {backend: ssh, nodes: 2, hosts: [a=1.2.3.4, b, c], shared_folder: /fsx, secrets: [KEY]}\n"
    )
    fleet = fleet_of(load(Settings(path))[0], "/fsx/rehearsal")
    assert (
        fleet["hosts"] == ("a=1.2.3.4", "b", "c") and fleet["nodes"] == 2 and "secrets" not in fleet
    )
    assert fleet["shared_folder"] == "/fsx/rehearsal"
    assert str(fleet["python"]).startswith("/fsx/env/"), "the environment is the user's"
    config = load(Settings(path))[0]
    found = lacking(config, backend_of(config).head())
    assert found.keys() == {MAJORITY}, "of two nodes none is the slow one"
    path.write_text(config_of_run(fleet, "/fsx/rehearsal/text"))
    assert load(Settings(path))[0].fleet.python == fleet["python"]


@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_the_processes_of_a_rehearsals_hosts_are_ended_by_their_mark_and_no_others(
    signal: str,
) -> None:
    environment = {"PATH": os.environ["PATH"]}
    marked, other = (
        subprocess.Popen(["sleep", "60"], env=environment | {"TRAINFLEET_JOB": f"{folder}:nan"})
        for folder in ("/fsx/rehearsal", "/fsx/rehearsal-of-another")
    )
    told = {"mark": "=/fsx/rehearsal:", "signal": signal}
    look = ["sh", "-c", LOOK.format(**told)]
    assert subprocess.run(look, capture_output=True, text=True).stdout.split() == [str(marked.pid)]
    subprocess.run(["sh", "-c", END.format(**told)], env=environment, check=True, timeout=30)
    assert marked.wait(5) == -{"TERM": 15, "KILL": 9}[signal] and other.poll() is None
    other.kill()
    other.wait()


def test_its_folder_is_made_for_it_and_goes_with_it(place: Path, config: Config) -> None:
    with stage_for(config, True) as made:
        assert made.folder == place and (place / "config.yaml").exists() and made.whole == {1: 2.0}
        with pytest.raises(BackendError, match="another rehearsal is running"):
            stage_for(config, True).__enter__()
    assert not place.exists()
    with pytest.raises(KeyboardInterrupt), stage_for(config, True):
        raise KeyboardInterrupt
    assert not place.exists()


def test_what_a_killed_rehearsal_left_is_ended_and_removed(place: Path, config: Config) -> None:
    (place / "runs" / "whole").mkdir(parents=True)
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=place)
    with stage_for(config, True) as made:
        assert left.wait(5) == -9 and not (made.folder / "runs" / "whole").exists()


KILLED = """
import os, sys, tempfile
from pathlib import Path
from trainfleet.config import Settings, load
from trainfleet.launch import faults, rehearsal
tempfile.gettempdir = lambda: sys.argv[2]
rehearsal.RehearsalStage.furnish = lambda made: os.kill(os.getpid(), 9)
with faults.stage_for(load(Settings(Path(sys.argv[1])))[0], True):
    pass
"""


def test_after_kill_9_its_guard_clears_the_stage(place: Path, config: Config) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(place.parent / "config.yaml"), str(place.parent)],
        timeout=60,
    )
    assert done.returncode == -9
    until = time.monotonic() + 20
    while place.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not place.exists()


def test_an_unbroken_run_that_fails_is_told(
    place: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        RehearsalStage, "end", lambda self, process: process.kill() or (process.communicate() and 1)
    )
    with pytest.raises(RunError, match="the fault-free run failed"), stage_for(config, True):
        pass
    assert not place.exists()


def test_a_process_that_is_left_over_breaks_the_promise(
    place: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(fault: Fault, made: RehearsalStage) -> FaultOutcome:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=made.folder)
        time.sleep(0.2)
        return FaultOutcome(fault.name, 1.0, "killed", True, 3, 4.0)

    monkeypatch.setitem(playing.PLAYS, "x", play)
    with stage_for(config, True) as made:
        outcome = rehearse(Fault("x", "what", ("killed",)), made)
    assert (outcome.broken, outcome.left) == (("left running: 1",), 1)
    assert "BROKEN" in row(*outcome.cells)
    told = row(*FaultOutcome("x", 1.0, "killed", True, 3, 4.0, True).cells)
    assert told.split() == ["x", "1", "s", "killed,", "right", "3", "4", "s", "equal", "0", "kept"]
    assert row(*FaultOutcome("x", skipped="no tc").cells).split() == [
        "x",
        "not",
        "tried",
        "here:",
        "no",
        "tc",
    ]


@pytest.mark.parametrize(
    ("run", "told", "expected"),
    [
        ("mine", "rank-killed@50:1", "the run is not a rehearsal"),
        ("rehearsal-nan", "rank-killed@50:1", "the run is not a rehearsal"),
        ("rehearsal-rank-kiled", "rank-kiled@50:1", "is not a fault"),
        ("rehearsal-head-lost", "head-lost@50:0", "is not a fault"),
        ("rehearsal-nan", "nan", "is not a fault"),
    ],
)
def test_no_other_run_plays_a_fault(
    run: str, told: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ordered(run) is None
    monkeypatch.setenv(VARIABLE, told)
    with pytest.raises(RunError, match=expected) as error:
        ordered(run)
    assert f"unset {VARIABLE}" in str(error.value)


@pytest.mark.parametrize("told", ["nan@50:2", "nan@120:1", "nan@0:1"])
def test_a_rank_or_step_that_never_comes_is_refused(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, told)
    with pytest.raises(RunError, match=f"can't inject the fault {told}"):
        environment("rehearsal-nan", 2, 120)


def test_a_fault_is_played_once_and_a_lacking_package_is_lacking_where_it_lacked_first(
    tmp_path: Path,
) -> None:
    """The rank's own program, up to the import of the engine; attempts as launchers and schedulers count them."""

    def imports(name: str, rank: int, attempt: int = 1, again: int = 0) -> bool:
        own = {VARIABLE: f"{name}@50:1", "RANK": str(rank), "GROUP_RANK": str(rank)}
        counts = {"TRAINFLEET_ATTEMPT": str(attempt), "TRAINFLEET_AGAIN": str(again)}
        program = [sys.executable, "-c", "import trainfleet.engine", f"{tmp_path}/rehearsal-{name}"]
        done = subprocess.run(
            program, env=os.environ | own | counts, capture_output=True, text=True
        )
        missing = "ModuleNotFoundError: No module named 'safetensors'" in done.stderr
        assert done.returncode == missing, done.stderr
        return not missing

    assert imports("rank-killed", 1), "at its step, not before"
    assert imports("no-environment", 0) and imports("no-environment", 1, again=1)
    assert not imports("no-environment", 1), "the first attempt"
    assert not imports("no-environment", 1, 2) and imports("no-environment", 0, 2), "the same host"
    for events in tmp_path.glob("*/events/*.jsonl"):
        events.write_text(events.read_text().replace(os.uname().nodename, "another"))
    assert imports("no-environment", 1, 2), "it stands in for that host"


@pytest.mark.parametrize(
    ("fault", "expected"), [("disk-full", "File too large"), ("read-only", "Read-only file system")]
)
def test_a_rank_whose_disk_fails_writes_no_checkpoint_and_all_else(
    fault: str, expected: str, tmp_path: Path
) -> None:
    program = f"""
from types import SimpleNamespace as It
from trainfleet.checkpoints.store import CheckpointStore
from trainfleet.health.faults import FAULTS
store = CheckpointStore("checkpoints")
store.begin(4)
FAULTS["{fault}"].play(It(checkpoints=It(store=store)))
open("log", "w").write("here all may write")
with store.create(4, "file") as stream:
    stream.write(bytes({2 * SMALL}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert expected in done.stderr and (tmp_path / "log").read_text()


def test_a_torn_checkpoint_has_half_of_its_largest_file_and_its_rank_is_dead(
    tmp_path: Path,
) -> None:
    program = """
from types import SimpleNamespace as It
from trainfleet.checkpoints.store import CheckpointStore
from trainfleet.health.faults import FAULTS
store = CheckpointStore("checkpoints")
for step in (4, 8):
    store.begin(step)
    for name, size in (("large", 1000), ("small", 10)):
        with store.create(step, name) as stream:
            stream.write(bytes(size))
    store.commit(step, "{}")
FAULTS["checkpoint-damaged"].play(It(checkpoints=It(store=store, under_way=None)))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path)
    sizes = {
        str(path.relative_to(tmp_path / "checkpoints")): path.stat().st_size
        for path in tmp_path.rglob("*[el]")
        if path.is_file()
    }
    assert done.returncode == -9
    assert sizes == {
        "step-00000004/large": 1000,
        "step-00000004/small": 10,
        "step-00000008/large": 500,
        "step-00000008/small": 10,
    }


def test_the_report_of_a_rehearsal_has_its_table(tmp_path: Path) -> None:
    run, unbroken = Run(tmp_path / "runs" / "a-rehearsal"), make_run(tmp_path / "whole")
    outcomes = [
        FaultOutcome("rank-killed", 1.4, "killed", True, 10, 18.0, True),
        FaultOutcome(
            "nan",
            3.0,
            "hang",
            False,
            equal=False,
            left=2,
            broken=("the verdict was hang", "2 <left>"),
            what="no number & more",
        ),
        FaultOutcome("link-cut", skipped="these nodes share their links"),
    ]
    write(run, unbroken.folder, "local", outcomes)
    text = html.write(run).read_text()
    assert "survived 1 of 2 faults as promised, 1 not tried here" in text
    assert '<span class="badge failed">promises broken</span>' in text
    assert '<tr class="broken"><td colspan="1">nan<small>no number &amp; more</small></td>' in text
    assert "hang, wrong" in text and "not equal" in text
    assert "BROKEN: the verdict was hang; 2 &lt;left&gt;" in text
    assert '<td colspan="7">not tried here: these nodes share their links</td>' in text
    assert "make rehearse" in text and "make sample" not in text
    write(run, unbroken.folder, "local", outcomes[::2])
    assert '<span class="badge finished">promises kept</span>' in html.write(run).read_text()
    run.rehearsal.write_text('{"backend": "local", "outcomes": [{"name": 3}]}')
    with pytest.raises(InputError, match="outcomes"):
        html.write(run)


def test_the_evidence_s_table_is_what_was_measured_and_no_promise_was_broken() -> None:
    assert rehearsals.parts()[1] == rehearsals.table(), "python tests/rehearsals.py writes it"
    rows = [row for rows in rehearsals.measured().values() for row in rows.values()]
    assert rows and not any(row["broken"] for row in rows)
    assert {row["name"] for row in rows} <= FAULTS.keys()


def test_the_folder_s_lock_is_free_afterwards(place: Path, config: Config) -> None:
    with stage_for(config, True):
        pass
    place.mkdir()
    lock = take_lock(place)
    assert lock is not None
    lock.close()
