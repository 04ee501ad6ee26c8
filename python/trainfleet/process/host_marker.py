"""Announces a run to all users of a host through the name of an abstract socket, for as long as the
run's process lives.

Abstract socket names are unique, are readable by everyone in /proc/net/unix, and disappear with
their process. Without any privileges, every user can therefore see who is running what. If two
processes race for a name, only one gets it. On systems other than Linux, and in processes that are
not jobs on a fleet's host, this module has no effect.
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

JOB = "TRAINFLEET_JOB"  # variable that identifies a run's processes (hosts/host_commands.py)
# Environment variable that is set if the run does not share this host with other runs
# (fleet.exclusive)
ALONE = "TRAINFLEET_ALONE"
# Prefix of every run's socket name, and the socket name of a run with exclusive use of the host
ANNOUNCED, ONLY = ("trainfleet:", "trainfleet-alone")
NAME = 107  # maximum bytes of a socket name (unix(7))
PATIENCE = 5.0  # seconds to wait for a fenced run on this host to end
_held: list[socket.socket] = []  # sockets to keep open for the lifetime of this process


def announce() -> str:
    """Announces this process to all users of this host. Returns the run that prevents this one from
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
    """Returns the other runs announced on this host, with their users."""
    found = set()
    with suppress(OSError):
        for line in Path("/proc/net/unix").read_text(errors="replace").splitlines():
            _, begins, rest = line.partition(f" @{ANNOUNCED}")
            whose, _, what = rest.partition(":")[2].partition(":")
            if begins and what and not (whose == user() and mark.startswith(what)):
                found.add(visible(f"{what} (of {whose})"))
    return ", ".join(sorted(found))


def _hold(name: str) -> bool:
    """Binds a socket with this name for the lifetime of this process. Returns False if the name is
    taken.
    """
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        held.bind(b"\0" + name.encode()[:NAME])
    except OSError:
        held.close()
        return False
    _held.append(held)
    return True


def user() -> str:
    """Returns this process's user name, as printed by `id -un`."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())
