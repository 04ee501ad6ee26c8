"""That a run is at work on a host, told to every user of it: by the name of a socket, for as long as its process lives.

The names of abstract sockets stand in /proc/net/unix for all to read, end with their process however that ends, and no two are
alike. So nobody needs rights to see whose run it is, and of two that begin at once one is the first. Linux only; elsewhere, and
for what is no job on a host of a fleet, nothing is told.
"""

from __future__ import annotations

import os
import pwd
import secrets
import socket
import sys
import time

JOB = "TRAINFLEET_JOB"  # the mark of a run's processes (nodes/jobs.py)
ALONE = "TRAINFLEET_ALONE"  # no other run may be at work on this host (fleet.exclusive)
ANNOUNCED, ONLY = "trainfleet:", "trainfleet-alone"  # begin a socket's name: of any run, and of the one that must be alone
NAME = 107  # bytes of a socket's name, by unix(7)
PATIENCE = 5.0  # seconds that what was fenced on this host gets to be gone
_held: list[socket.socket] = []  # as long as this process lives


def announce() -> bool:
    """Whether this process may run here; from now on all users of this host can see that it does."""
    mark = os.environ.get(JOB)
    if not mark or sys.platform != "linux":
        return True
    _hold(f"{ANNOUNCED}{secrets.token_hex(4)}:{user()}:{mark}")
    deadline = time.monotonic() + PATIENCE
    while os.environ.get(ALONE) and not _hold(ONLY):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _hold(name: str) -> bool:
    """Whether this process has the socket of this name from now on; False where another one has it."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(b"\0" + name.encode()[:NAME])
    except OSError:
        held.close()
        return False
    _held.append(held)
    return True


def user() -> str:
    """Who runs this, as `id -un` says it."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
