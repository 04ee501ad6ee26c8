"""make rehearse in jobs of a real Slurm: promises are kept, and nothing is left, whatever ends it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import test_slurm
from test_slurm import until, write

from fleet.slurmlab import Slurm
from verbs import begin, enter

nodes, slurm, desk = test_slurm.nodes, test_slurm.slurm, test_slurm.desk  # fixtures


@pytest.mark.timeout(500)
def test_a_rehearsal_in_jobs_keeps_every_promise_and_leaves_nothing(
    desk: Path, slurm: Slurm, tell: Callable[[str], None]
) -> None:
    write(desk, "mine")
    faults = ["rank-killed", "no-environment", "link-cut"]
    said = enter(desk, "rehearse", f"FAULTS={' '.join(faults)}", "YES=1")
    tell(said)
    told = {line.split()[0]: line for line in said.splitlines() if line.startswith(tuple(faults))}
    assert (
        all(told[fault].endswith(" kept") for fault in faults[:2])
        and "not tried here: only the links of hosts reached by SSH can be cut" in told["link-cut"]
    ), said
    assert (
        not list(desk.glob("*rehearsal*")) and not slurm.run("squeue", "-h", "--me").stdout.strip()
    ), said
    (run,) = (desk / "runs").glob("mine-rehearsal-*")
    assert (
        "survived 2 of 2 faults as promised, 1 not tried here" in (run / "report.html").read_text()
    )


@pytest.mark.timeout(300)
def test_after_kill_9_of_a_rehearsal_its_jobs_are_cancelled_and_nothing_else(
    desk: Path, slurm: Slurm
) -> None:
    write(desk, "mine")
    other = slurm.run(
        "sbatch", "--parsable", "-N1", "-o", "/dev/null", "--wrap", "sleep 300"
    ).stdout.strip()
    process = begin(desk, "rehearse", "FAULTS=rank-stopped", "YES=1")
    until(
        lambda: list(desk.glob("trainfleet-rehearsal-*/runs/rehearsal-rank-stopped/metrics.jsonl")),
        "the fault",
        200,
    )
    process.kill()
    process.communicate()
    until(lambda: not list(desk.glob("*rehearsal*")), "the folder's end", 100)
    assert slurm.run("squeue", "-h", "--me", "-o", "%i").stdout.split() == [other]
    slurm.run("scancel", other)
    slurm.await_idle()
