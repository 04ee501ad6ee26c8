"""Announces a run to all users of a host by the name of an abstract socket, as long as its process
lives.

The names of abstract sockets are in /proc/net/unix for all to read, vanish with their process, and
are unique. So no privileges are needed to see whose run it is, and of two that start at once one is
first. On systems other than Linux, and for a process that is not a job on a host of a fleet, this
does nothing.
"""

from __future__ import annotations

import os
import pwd
import secrets
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from ..trust.safe_output import visible

JOB = "TRAINFLEET_JOB"  # the mark of a run's processes (hosts/host_commands.py)
ALONE = "TRAINFLEET_ALONE"  # no other run may use this host (fleet.exclusive)
# beginnings of a socket's name: of any run, and of the one that must be alone
ANNOUNCED, ONLY = ("trainfleet:", "trainfleet-alone")
NAME = 107  # bytes of a socket's name, by unix(7)
PATIENCE = 5.0  # seconds for a fenced run on this host to disappear
_held: list[socket.socket] = []  # held as long as this process lives


def announce() -> str:
    """Announces this process to all users of this host. Returns the run that keeps it from running
    here, or "".
    """
    mark = os.environ.get(JOB)
    if not mark or sys.platform != "linux":
        return ""
    _hold(f"{ANNOUNCED}{secrets.token_hex(4)}:{user()}:{mark}")
    deadline = time.monotonic() + PATIENCE
    while os.environ.get(ALONE) and not _hold(ONLY):
        if time.monotonic() > deadline:
            return others(mark) or "another run"
        time.sleep(0.1)
    return ""


def others(mark: str) -> str:
    """Returns the other runs that are announced on this host, with their users."""
    found = set()
    with suppress(OSError):
        for line in Path("/proc/net/unix").read_text(errors="replace").splitlines():
            _, begins, rest = line.partition(f" @{ANNOUNCED}")
            whose, _, what = rest.partition(":")[2].partition(":")
            if begins and what and not (whose == user() and mark.startswith(what)):
                found.add(visible(f"{what} (of {whose})"))
    return ", ".join(sorted(found))


def _hold(name: str) -> bool:
    """Takes the socket of this name for this process. Returns False if another one has it."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(b"\0" + name.encode()[:NAME])
    except OSError:
        held.close()
        return False
    _held.append(held)
    return True


def user() -> str:
    """Returns this process's user like `id -un`."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
