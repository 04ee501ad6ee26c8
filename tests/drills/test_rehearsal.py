"""make rehearse on hosts: every promise is kept, all is put back whatever ends it, and with the fence taken out it fails."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cockpit import ROOT, SHARED, Cockpit

import verbs
from fleet.lab import Lab


@pytest.fixture
def cockpit(nodes: Lab, whole: dict[int, float], tmp_path: Path) -> Iterator[Cockpit]:
    yield Cockpit(nodes, tmp_path, "mine")
    assert not (nodes.shared / "trainfleet" / "rehearsal").exists()


def is_gone(cockpit: Cockpit) -> bool:
    return not (cockpit.nodes.shared / "trainfleet" / "rehearsal").exists() and not cockpit.leftovers()


@pytest.mark.timeout(300)
def test_after_kill_9_the_hosts_put_all_back_themselves(cockpit: Cockpit) -> None:
    process = cockpit.start("rehearse", "FAULTS=rank-stopped", "YES=1")
    shared = cockpit.nodes.shared / "trainfleet" / "rehearsal" / "runs"
    cockpit.until("the fault", lambda: (shared / "rehearsal-rank-stopped" / "metrics.jsonl").exists(), 120)
    process.kill()
    process.communicate()
    cockpit.until("all is put back", lambda: is_gone(cockpit), 120)


@pytest.mark.timeout(400)
def test_after_ctrl_c_all_is_put_back_before_it_ends(cockpit: Cockpit) -> None:
    process = cockpit.start("rehearse", "FAULTS=rank-stopped", "YES=1")
    shared = cockpit.nodes.shared / "trainfleet" / "rehearsal" / "runs"
    cockpit.until("the fault", lambda: (shared / "rehearsal-rank-stopped" / "metrics.jsonl").exists(), 200)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all that it runs
    said = process.communicate(timeout=150)[0]
    assert process.returncode != 0 and "Traceback" not in said, said
    assert is_gone(cockpit), said


@pytest.mark.timeout(400)
def test_with_the_fence_taken_out_it_fails(cockpit: Cockpit, tmp_path: Path) -> None:
    """The fence is what ends a rank that was stopped, before another attempt begins: here it does nothing."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "tests", "__pycache__", ".*_cache"))
    jobs = copy / "python" / "trainfleet" / "nodes" / "jobs.py"
    text = jobs.read_text()
    jobs.write_text(text.replace("kill -KILL $pids 2> /dev/null\n", "exit 0\n"))
    assert jobs.read_text() != text
    process = verbs.begin(
        cockpit.folder, "rehearse", "FAULTS=rank-stopped", "YES=1", variables={"PYTHONPATH": str(copy / "python")}
    )
    said = process.communicate(timeout=380)[0]
    assert process.returncode == 1 and "BROKEN" in said, said
    for node in range(cockpit.nodes.count):
        cockpit.nodes.signal_all(node, 9)
    cockpit.nodes.run(0, "rm", "-rf", f"{SHARED}/rehearsal")
    time.sleep(1)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "faults",
    [
        "rank-killed agent-killed rank-stopped link-cut",
        "launcher-killed notice checkpoint-damaged",
        "head-lost link-slowed",
        "disk-full read-only nan no-environment",
    ],
    ids=["hard", "soft", "head", "surroundings"],
)
def test_every_promise_is_kept_on_four_hosts(cockpit: Cockpit, faults: str, tell) -> None:  # type: ignore[no-untyped-def]
    said = cockpit.type("rehearse", f"FAULTS={faults}", "YES=1", timeout=1160)
    tell(said)
    kept = {line.split()[0] for line in said.splitlines() if line.endswith(" kept")}
    assert kept == set(faults.split()), said
    cockpit.until("all is put back", lambda: is_gone(cockpit), 30)
    assert "refused" not in cockpit.type("doctor")
