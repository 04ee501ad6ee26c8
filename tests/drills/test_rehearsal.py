"""make rehearse on hosts: every promise is kept, all is put back whatever ends it, and with the fence taken out it fails."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cockpit import ROOT, SHARED, Cockpit

import verbs
from fleet.lab import Lab

FOLDER = "trainfleet/rehearsal-*"  # of rehearsals, in the shared folder


@pytest.fixture
def cockpit(nodes: Lab, whole: dict[int, float], tmp_path: Path) -> Iterator[Cockpit]:
    yield Cockpit(nodes, tmp_path, "mine")
    assert not list(nodes.shared.glob(FOLDER))


def left(cockpit: Cockpit) -> list[str]:
    """What is still there of a rehearsal: its folder, and processes of any node."""
    return [*map(str, cockpit.nodes.shared.glob(FOLDER)), *cockpit.leftovers()]


def begin(cockpit: Cockpit) -> subprocess.Popen[str]:
    """A rehearsal whose run trains that a fault is about to meet."""
    process = cockpit.start("rehearse", "FAULTS=rank-stopped", "YES=1")
    metrics = f"{FOLDER}/runs/rehearsal-rank-stopped/metrics.jsonl"
    found = lambda: list(cockpit.nodes.shared.glob(metrics))  # noqa: E731
    cockpit.until("the fault", lambda: found() or process.poll() is not None, 200)
    assert process.poll() is None, process.communicate()[0]
    return process


@pytest.mark.timeout(400)
def test_after_kill_9_its_guard_puts_all_back(cockpit: Cockpit) -> None:
    process = begin(cockpit)
    process.kill()
    process.communicate()
    cockpit.until("all is put back", lambda: not left(cockpit), 120)


@pytest.mark.timeout(400)
def test_after_ctrl_c_all_is_put_back_before_it_ends(cockpit: Cockpit) -> None:
    process = begin(cockpit)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all that it runs
    said = process.communicate(timeout=150)[0]
    assert process.returncode != 0 and "Traceback" not in said, said
    assert not (found := left(cockpit)), "\n".join([said, *found])


@pytest.mark.timeout(400)
def test_with_the_fence_taken_out_it_fails(cockpit: Cockpit, tmp_path: Path) -> None:
    """The fence is what ends a rank that was stopped, before another attempt begins: here it does nothing."""
    copy = tmp_path / "copy"
    shutil.copytree(
        ROOT,
        copy,
        ignore=shutil.ignore_patterns(".git", ".venv", "runs", "tests", "__pycache__", ".*_cache"),
    )
    jobs = copy / "python" / "trainfleet" / "hosts" / "host_commands.py"
    text = jobs.read_text()
    jobs.write_text(text.replace("kill -KILL $pids 2> /dev/null\n", "exit 0\n"))
    assert jobs.read_text() != text
    process = verbs.begin(
        cockpit.folder,
        "rehearse",
        "FAULTS=rank-stopped",
        "YES=1",
        variables={"PYTHONPATH": str(copy / "python")},
    )
    said = process.communicate(timeout=380)[0]
    assert process.returncode == 1 and "BROKEN" in said, said
    for node in range(cockpit.nodes.count):
        cockpit.nodes.signal_all(node, 9)
    cockpit.nodes.run(0, "sh", "-c", f"rm -rf {SHARED}/rehearsal-*")
    time.sleep(1)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "faults",
    [
        "rank-killed agent-killed rank-stopped link-cut",
        "launcher-killed notice checkpoint-damaged out-of-memory rank-raised",
        "head-lost link-slowed rank-slow",
        "disk-full read-only nan no-environment",
    ],
    ids=["hard", "soft", "head", "surroundings"],
)
def test_every_promise_is_kept_on_four_hosts(cockpit: Cockpit, faults: str, tell) -> None:  # type: ignore[no-untyped-def]
    said = cockpit.type("rehearse", f"FAULTS={faults}", "YES=1", timeout=1160)
    tell(said)
    kept = {line.split()[0] for line in said.splitlines() if line.endswith(" kept")}
    assert kept == set(faults.split()), said
    cockpit.until("all is put back", lambda: not left(cockpit), 30)
    assert "refused" not in cockpit.type("doctor")
