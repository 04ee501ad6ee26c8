"""Ahead-of-time compilation on Trn1: `python -m trainfleet.node.precompile TORCHRUN...` runs once
on each node of a fleet.

neuron_parallel_compile starts the ranks with NEURON_EXTRACT_GRAPHS_ONLY set, so that they only
record their computation. It then compiles all recorded programs in parallel into the cache at
NEURON_COMPILE_CACHE_URL. All nodes compile, and a node locks each program while compiling it. Stale
locks left by a killed job are cleared first. Because this is safe only while no run is compiling,
locks are kept if another run's ranks send heartbeats here.

Source: https://awsdocs-neuron.readthedocs-hosted.com/en/v2.31.0, pytorch-neuron-parallel-compile.
Uses only the standard library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..health import heartbeat_format
from ..run import run_folder
from ..trust.errors import BackendError, telling

TOOL = "neuron_parallel_compile"
ALIVE = 60.0  # seconds without a heartbeat after which a run is assumed to have ended


def ahead(python: str, line: Sequence[str]) -> list[str]:
    """Wraps a node's torchrun command line so that it runs through this module."""
    return [python, "-m", "trainfleet.node.precompile", *line]


@telling
def main(line: list[str]) -> int:
    tool = find()
    # The other nodes' ranks can't rendezvous until node 0's torchrun starts, so they have not
    # recorded any programs yet.
    if "--node-rank=0" in line:
        clear_locks(tool, Path(line[-1]).name)
    os.execv(tool, [tool, *line])


def find() -> str:
    """Returns the path of neuron_parallel_compile, either next to this Python or on the PATH.

    Raises:
        BackendError: torch-neuronx, which includes it, is not installed.
    """
    beside = Path(sys.executable).with_name(TOOL)
    if found := str(beside) if beside.exists() else shutil.which(TOOL):
        return found
    raise BackendError(
        f"{TOOL} is missing",
        where=sys.executable,
        why="torch-neuronx, which includes it, is not installed",
        next="run make setup, or make build for an image",
    )


def clear_locks(tool: str, own: str) -> None:
    """Clears stale locks in the cache, or prints why it keeps them. `own` is the name of this run,
    which has not started yet.
    """
    busy = [name for name in at_work(run_folder.RUNS, time.time()) if name != own]
    if busy or os.environ.get("NEURON_COMPILE_CACHE_URL", "").startswith("s3://"):
        why = f"{', '.join(busy)} may own some" if busy else "some may belong to other machines"
        print(
            f"keeping the locks in the cache, because {why}; once no run is compiling, run {TOOL} "
            "--command clear-locks",
            flush=True,
        )
        return
    print("clearing stale locks in the cache", flush=True)
    subprocess.run([tool, "--command", "clear-locks"], check=False)


def at_work(folder: Path, now: float) -> list[str]:
    """Returns the runs in a folder whose ranks sent a heartbeat within the last ALIVE seconds."""
    found = (
        path for run in folder.glob("*") for path in (run / heartbeat_format.FOLDER).glob("node-*")
    )
    return sorted({path.parents[1].name for path in found if now - path.stat().st_mtime < ALIVE})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
