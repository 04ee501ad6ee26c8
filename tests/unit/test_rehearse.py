"""make rehearse without the runs that it breaks: what it refuses, what it says, and that it leaves nothing, whatever ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from report_runs import make_run

from requirement import missing
from trainfleet.backends.slurm.resources import Beside
from trainfleet.cli import jobs
from trainfleet.cli.jobs import chosen, row
from trainfleet.config import Settings, load
from trainfleet.launch import rehearsal
from trainfleet.launch.faults import BROKEN_NODE, FAULTS, FULL, READ_ONLY, SMALL, Fault, rehearse
from trainfleet.launch.rehearsal import (
    MAJORITY,
    REMOVE,
    STRUCK,
    RehearsalStage,
    config_of_run,
    stage,
)
from trainfleet.launch.rehearsal_hosts import GUARD, UNMOUNT, HostStage, fleet_of, lacking
from trainfleet.launch.rehearsal_steps import _end, _guard
from trainfleet.report import html
from trainfleet.report.rehearsal_table import FaultOutcome, write
from trainfleet.run.run_folder import Run, take_lock
from trainfleet.trust.errors import BackendError, ConfigError, InputError, RunError
from trainfleet.watch.causes import CAUSES


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the folder of rehearsals will be; the unbroken run costs nothing."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(
        RehearsalStage, "end", lambda self, process: process.kill() or (process.communicate() and 0)
    )
    monkeypatch.setattr(RehearsalStage, "losses", lambda self, name: {1: 2.0})
    monkeypatch.setattr(RehearsalStage, "left_within", 0.1)
    yield tmp_path / f"trainfleet-rehearsal-{os.getuid()}"


def beats_of(monkeypatch: pytest.MonkeyPatch, pid: int) -> None:
    """Has rank 1 of every run be that process."""
    monkeypatch.setattr(
        rehearsal, "read_beats", lambda folder, attempt: {1: SimpleNamespace(pid=pid)}
    )


def test_faults_are_chosen_by_name_and_a_typo_is_told() -> None:
    assert [fault.name for fault in chosen("nan, rank-killed")] == ["nan", "rank-killed"] and len(
        chosen("")
    ) == len(FAULTS)
    with pytest.raises(ConfigError, match="rank-kiled is not a fault; did you mean rank-killed"):
        chosen("rank-kiled")
    assert all({*fault.verdicts} <= {*CAUSES, "none"} for fault in FAULTS.values())


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
            "allow no login",
        ),
    ],
)
def test_nodes_are_harmed_only_by_consent_and_those_of_an_engine_in_the_cloud_not_at_all(
    tmp_path: Path, fleet: str, expected: str
) -> None:
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
        fleet["hosts"] == ["a=1.2.3.4", "b", "c"] and fleet["nodes"] == 2 and "secrets" not in fleet
    )
    assert fleet["shared_folder"] == "/fsx/rehearsal" and fleet["python"] == "/fsx/rehearsal/python"
    assert lacking(load(Settings(path))[0]).keys() == {MAJORITY}, (
        "of two nodes none is the slow one"
    )
    path.write_text(config_of_run(fleet, "/fsx/rehearsal/text", 8))
    assert load(Settings(path))[0].fleet.python == fleet["python"]


def test_the_guard_of_a_host_ends_marked_processes_and_removes_the_folder_when_no_sign_of_life_comes(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "rehearsal"
    folder.mkdir()
    made = HostStage(tmp_path, transport=None, shared=str(folder), names=("nan",), lacking={})  # type: ignore[arg-type]
    (folder / "sign").touch()
    (folder / "guard.sh").write_text(
        GUARD.format(
            folder=folder, silent=2, end=made.end_all(), remove=REMOVE.format(folder=folder)
        )
    )
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
        with pytest.raises(BackendError, match="another rehearsal is running"), stage():
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
    monkeypatch.setattr(
        RehearsalStage, "end", lambda self, process: process.kill() or (process.communicate() and 1)
    )
    with pytest.raises(RunError, match="the unbroken run failed"), stage():
        pass
    assert not place.exists()


def test_a_process_that_is_left_over_breaks_the_promise(place: Path) -> None:
    def play(fault: Fault, made: RehearsalStage) -> FaultOutcome:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=made.folder)
        time.sleep(0.2)
        return FaultOutcome(fault.name, 1.0, "killed", True, 3, 4.0)

    with stage() as made:
        outcome = rehearse(Fault("x", "what", ("killed",), play), made)
    assert (outcome.broken, outcome.left) == (
        ("leftover processes: 1",),
        1,
    ) and "BROKEN" in row(*outcome.cells)
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


@pytest.mark.parametrize("whom", ["rank", "agent"])
def test_a_signal_reaches_the_rank_or_its_parent_and_what_fails_is_told(
    place: Path, monkeypatch: pytest.MonkeyPatch, whom: str
) -> None:
    agent = subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait $!"], stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    rank = int(agent.stdout.readline())
    beats_of(monkeypatch, rank)
    with stage() as made:
        made.strike("x", whom, signal.SIGKILL)
        assert agent.wait(5) == (-9 if whom == "agent" else 137)
        beats_of(monkeypatch, 2**30)  # of nobody
        with pytest.raises(RunError, match="the fault x could not be caused"):
            made.strike("x", "rank", signal.SIGKILL)


def test_a_rank_for_which_the_disk_is_full_writes_no_checkpoint(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"import sys, signal; sys.stdin.read(1); open('big', 'wb').write(bytes({2 * SMALL}))"
    rank = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=place.parent,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    beats_of(monkeypatch, rank.pid)
    with stage() as made:
        assert made.at_rank("x", FULL) == STRUCK
        assert b"File too large" in rank.communicate(b"x")[1]


def test_root_s_rank_sees_a_folder_as_read_only_and_nobody_else(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stage() as made:
        folder = made.run("x").checkpoints
        folder.mkdir(parents=True)
        if not made.alone:
            missing(
                "this machine lets nobody have mounts of their own; that needs root (unshare --mount)"
            )
        program = f"import sys; sys.stdin.read(1); open({str(folder / 'file')!r}, 'w')"
        rank = subprocess.Popen(
            [*made.alone, sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
        )
        beats_of(monkeypatch, rank.pid)
        while b"python" not in Path(f"/proc/{rank.pid}/cmdline").read_bytes().split(b"\0")[0]:
            time.sleep(0.01)
        assert made.at_rank("x", READ_ONLY) == STRUCK
        assert b"Read-only file system" in rank.communicate(b"x")[1]
        (folder / "file").write_text("here all may write")


def test_the_package_is_missing_on_the_host_that_was_node_1_first_and_on_no_other(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN_NODE)

    def imports(node: str) -> bool:
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "GROUP_RANK": node}
        done = subprocess.run(
            [sys.executable, "-c", "import safetensors"],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert (
            done.returncode == 0
            or "ModuleNotFoundError: No module named 'safetensors'" in done.stderr
        ), done.stderr
        return done.returncode == 0

    assert imports("0") and not imports("1") and not imports("1")
    (tmp_path / "host").write_text("another")
    assert imports("1"), "it stands in for that one"


def test_what_was_mounted_in_the_folder_of_hosts_is_taken_off_and_nothing_else(
    tmp_path: Path,
) -> None:
    """With mounts that are told, and a umount that tells what it was asked to take off."""
    told, bin = tmp_path / "told", tmp_path / "bin"
    bin.mkdir()
    (bin / "umount").write_text(f'#!/bin/sh\necho "$2" >> {told}\n')
    (bin / "cut").write_text("#!/bin/sh\nprintf '%s\\n' / /a/b/c /a/b/c/d /a/bc/d /x/a/b/c /a/b\n")
    for program in bin.iterdir():
        program.chmod(0o755)
    subprocess.run(
        ["sh", "-c", UNMOUNT.format(folder="/a/b")],
        env={"PATH": f"{bin}:{os.environ['PATH']}"},
        check=True,
    )
    assert told.read_text().split() == ["/a/b/c/d", "/a/b/c"]


SQUEUE = """#!/bin/sh
[ -e {at}/asked ] || {{ touch {at}/asked; echo "slurmctld is away" >&2; exit 1; }}
printf '7 %s\\n8 {at}/other\\n9 %s\\n' '{at}/a b' '{at}/a b' | while read -r job folder
do grep -qsx $job {at}/told || echo "$job $folder"; done
"""


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "ends"])
def test_the_guard_of_jobs_cancels_those_of_its_folder_alone_and_removes_it_for_the_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    folder, bin = tmp_path / "a b", tmp_path / "bin"
    bin.mkdir()
    folder.mkdir()
    (bin / "squeue").write_text(SQUEUE.format(at=tmp_path))
    (bin / "scancel").write_text(f'#!/bin/sh\nprintf "%s\\n" $* >> {tmp_path}/told\n')
    for program in bin.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    guard = _guard(object.__new__(Beside), folder)
    if dies:
        assert guard.stdin is not None
        guard.stdin.close()
        assert guard.wait(30) == 0
    else:
        _end(guard)
    assert (tmp_path / "told").read_text().split() == ["7", "9"] and folder.exists() is not dies


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


def test_the_folder_s_lock_is_free_afterwards(place: Path) -> None:
    with stage():
        pass
    place.mkdir()
    lock = take_lock(place)
    assert lock is not None
    lock.close()
