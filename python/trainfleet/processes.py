"""What keeps a process tree whole: children that die with their parent, and groups that are stopped to the last member."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """From now on this process is killed when its parent dies, however that happens.

    A torchrun agent that is killed leaves its worker training on alone (seen with torch 2.13); nothing but the kernel
    can be relied on to end it. Elsewhere than on Linux a thread looks twice a second for a change of parent.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died between the two calls
            os._exit(1)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def run_module(module: str, *words: str, **environment: str) -> int:
    """The exit code of `python -m module words`, in a process of its own that dies with this one.

    So a verb has work done that needs torch: the control plane itself never loads it.
    """
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, env=os.environ | environment, preexec_fn=die_with_parent, check=False).returncode


def identity(pid: int) -> str:
    """What tells this process from any other that will ever have its number: `pid start boot`; "" when it has ended."""
    if sys.platform != "linux":
        said = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
        return f"{pid} {'-'.join(said.split())} -" if said.strip() else ""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return ""
    if fields[0] in "ZX":  # it has ended, and its parent has not looked yet
        return ""
    return f"{pid} {fields[19]} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"  # field 22, in ticks since boot


def signal_group(group: int, number: signal.Signals) -> bool:
    """Sends a signal to every process of a group; False when the group has none left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True
