"""A machine that others keep busy is no machine that died: its launcher keeps its lease, and nobody takes over."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainfleet.health.lease import (
    EVERY,
    GLANCE,
    PATIENCE,
    is_held,
    is_renewed,
    newest_holder,
    newest_standby,
    read_holder,
)

ROOT = Path(__file__).parents[2]
HOLD = "import sys; from pathlib import Path; from trainfleet.health.lease import Lease\nwith Lease(Path(sys.argv[1])) as held: sys.stdin.read(); held.code = 0"
BUSY = "print('busy', flush=True)\nwhile True: pass"
PROCESSES = 8


@pytest.fixture
def busy() -> Iterator[int]:
    """A core on which eight processes of others compute all the time."""
    core = min(os.sched_getaffinity(0))
    processes = [begin(core, "-c", BUSY) for _ in range(PROCESSES)]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "busy\n"
    yield core
    for process in processes:
        process.kill()
        process.communicate()


def begin(core: int, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, *arguments], env=os.environ | {"PYTHONPATH": str(ROOT / "python")}, text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            preexec_fn=lambda: os.sched_setaffinity(0, {core}))  # fmt: skip


def test_beside_eight_busy_processes_the_lease_is_renewed_and_nobody_takes_over(
    busy: int, tmp_path: Path
) -> None:
    """Launcher and standby share that core; whoever looks on, at any moment, sees a run that is led."""
    launcher = begin(busy, "-c", HOLD, str(tmp_path))
    while not read_holder(tmp_path):
        time.sleep(0.05)
    standby = begin(
        busy,
        "-m",
        "trainfleet.watch.standby",
        str(tmp_path),
        sys.executable,
        "-c",
        "print('took over')",
    )
    while not newest_standby(tmp_path):
        time.sleep(0.05)
    until, seen, gap, changed = time.monotonic() + 2 * PATIENCE, None, 0.0, time.monotonic()
    while time.monotonic() < until:
        holder = read_holder(tmp_path)
        assert holder and holder.term == 1 and is_held(holder, time.time())
        if holder.renewal != seen:
            gap, changed = max(gap, time.monotonic() - changed), time.monotonic()
        seen = holder.renewal
        time.sleep(0.02)
    assert EVERY * 0.5 < gap < GLANCE and is_renewed(tmp_path), (
        f"once {gap:.1f} s passed between two renewals"
    )
    assert launcher.poll() is None and standby.poll() is None
    launcher.communicate()  # its work ends
    assert (
        launcher.returncode == 0
        and "took over" not in standby.communicate(timeout=60)[0]
        and standby.returncode == 0
    )
    assert (last := newest_holder(tmp_path)) and (last.term, last.code) == (1, 0)
