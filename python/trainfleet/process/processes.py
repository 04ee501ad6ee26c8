"""Runs process trees without orphans: children die with their parent, and process groups are
signalled together.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

from ..trust.errors import RunError

try:  # imported here, because code between fork and exec must import nothing
    import ctypes
except ImportError:  # this Python was built without libffi, so it has no torch either
    ctypes = None  # type: ignore[assignment]

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Variable with the supervisor's pid, in the environment of all of its processes.
SUPERVISOR = "TRAINFLEET_SUPERVISOR"


def die_with_parent(ancestor: str | None = None) -> None:
    """Makes the kernel kill this process when its parent dies for any reason.

    The worker of a killed torchrun agent keeps training (seen with torch 2.13), and only the kernel
    reliably ends it. `ancestor` is the pid of a process that is above this one as long as its
    parent lives. A process that loads torch before this call must pass `ancestor`, because its
    parent may be dead by then. On systems other than Linux, and without ctypes, a thread checks
    twice per second whether the parent has changed.
    """
    parent = os.getppid()
    if sys.platform == "linux" and ctypes:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The parent died before the prctl call.
        if os.getppid() != parent or not (ancestor is None or _is_below(int(ancestor))):
            os._exit(1)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _is_below(ancestor: int) -> bool:
    """Tells whether `ancestor` is this process's parent, or above it; True if /proc does not show
    it.
    """
    above = os.getppid()
    try:
        while above not in (0, ancestor):
            above = int(Path(f"/proc/{above}/stat").read_text().rpartition(")")[2].split()[1])
    # /proc is missing, or hides other users' processes (hidepid). Training must not end by mistake.
    except OSError:
        return True
    return above == ancestor


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def limit_memory(size: int) -> None:
    """Limits this process, and each process that it starts, to `size` bytes of private memory.
    Files that are only mapped do not count.
    """
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def run_module(module: str, *words: str, **environment: str) -> int:
    """Runs `python -m module words` in a process that dies with this one. Returns its exit code.

    Verbs run code that needs torch this way, because the control plane itself never loads torch.

    Raises:
        RunError: torch is not installed.
    """
    if find_spec("torch") is None:
        raise RunError(
            "torch is not installed in this Python", where=sys.executable, next="make setup"
        )
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(
        command, env=os.environ | environment, preexec_fn=die_with_parent, check=False
    ).returncode


def identity(pid: int) -> str:
    """Returns an identity of a process that stays unique if its pid is reused: `pid start boot`; ""
    if the process has ended.
    """
    if sys.platform != "linux":
        said = subprocess.run(
            ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout
        return f"{pid} {'-'.join(said.split())} -" if said.strip() else ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return ""
    if fields[0] in "ZX":  # the process has ended, and its parent has not waited for it yet
        return ""
    # Field 22 is the start time in ticks since boot.
    return f"{pid} {fields[19]} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def signal_group(group: int, number: signal.Signals) -> bool:
    """Sends a signal to every process of a group. Returns False if the group has ended."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
