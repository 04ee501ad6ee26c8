"""Announces a run to all users of a host by the name of an abstract socket, while the run's process
lives.

Names of abstract sockets are unique, are in /proc/net/unix for all to read, and vanish with their
process. So every user can see whose run it is, without privileges. If two runs start at once, only
one of them gets a name. This module does nothing on systems other than Linux, or in a process that
is not a job on a fleet's host.
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

JOB = "TRAINFLEET_JOB"  # variable with the mark of a run's processes (hosts/host_commands.py)
# variable that is set if no other run may use this host (fleet.exclusive)
ALONE = "TRAINFLEET_ALONE"
# Beginning of every run's socket name, and the socket name of a run that uses the host exclusively.
ANNOUNCED, ONLY = ("trainfleet:", "trainfleet-alone")
NAME = 107  # most bytes of a socket's name (unix(7))
PATIENCE = 5.0  # seconds for a fenced run on this host to end
_held: list[socket.socket] = []  # sockets that stay open as long as this process lives


def announce() -> str:
    """Announces this process to all users of this host. Returns the run that prevents it from
    running here, or "".
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
    """Binds the socket of this name to this process. Returns False if another process has it."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(b"\0" + name.encode()[:NAME])
    except OSError:
        held.close()
        return False
    _held.append(held)
    return True


def user() -> str:
    """Returns this process's user, as `id -un` prints it."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
