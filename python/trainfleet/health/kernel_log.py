"""Reads a node's kernel messages about failures that a program could not report: out of memory, a
lost device, a bad disk.

They are read on the node at once, as it may be gone a minute later. Not every user may read the
kernel's log (Amazon Linux 2023 and Ubuntu restrict it). So this tries /dev/kmsg, then dmesg by sudo
without a password, then the journal. If it may not read any of these, it reads the node's counters
(health/hw_counters.py). Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from ..trust.untrusted_input import whole
from .hw_counters import Counters

KMSG = Path("/dev/kmsg")
VMSTAT = Path("/proc/vmstat")
COMMANDS = (
    ("sudo", "-n", "dmesg"),
    ("journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-n", "2000"),
)
TIMEOUT = 5.0  # seconds for each command
TELLING = re.compile(
    r"NVRM:|Out of memory|oom-kill|Killed process|Lustre(Error)?:|infiniband|\befa[_ "
    r"]\d?|EXT4-fs error|Remounting filesystem"
    r"|XFS .*(Corruption|shut|I/O)|nfs: server|neuron|nvme.*(timeout|I/O|down|not ready)|I/O "
    r"error|segfault at|traps: "
    r"|mce: .*Hardware Error|Machine Check|EDAC .*UE|PCIe Bus Error|Memory failure|blocked for "
    r"more than"
)
LINES = 40
_STAMPED = re.compile(r"(?:<\d+>)?\[ *(\d+\.\d+)\] (?:\S+ kernel: )?(.*)")


@dataclass(frozen=True)
class Message:
    """A kernel message and its time (unix)."""

    time: float
    text: str


class Kernel:
    """The kernel's messages since construction."""

    def __init__(self) -> None:
        self.began = time.clock_gettime(time.CLOCK_MONOTONIC)  # the clock of the kernel's stamps
        self.kills, self.kills_of_all = oom_kills(), all_oom_kills()
        self.counters = Counters()

    def words(self) -> list[Message]:
        """Returns the relevant messages since construction, oldest first, and counts of
        out-of-memory kills.
        """
        apart = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
        messages = _messages()
        found = [
            Message(when + apart, line)
            for when, line in messages or ()
            if when >= self.began and TELLING.search(line)
        ][-LINES:]
        now, killed, of_all = (
            time.time(),
            oom_kills() - self.kills,
            all_oom_kills() - self.kills_of_all,
        )
        if killed > 0:
            found.append(Message(now, f"memory.events: oom_kill {killed} in this control group"))
        if messages is None:
            found.append(
                Message(
                    now,
                    "this user can't read the kernel's log; next: sysctl kernel.dmesg_restrict=0",
                )
            )
            if of_all > 0:
                found.append(Message(now, f"vmstat: oom_kill {of_all} on this node"))
            found += [Message(now, text) for text in self.counters.words()]
        return found


def oom_kills() -> int:
    """Counts the processes of this control group that were killed for its memory limit."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        group = next(
            line
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        )[3:]
        return _count(Path(f"/sys/fs/cgroup{group}/memory.events"))
    return 0


def all_oom_kills() -> int:
    """Counts the processes of this node that were killed for memory since boot; every user may read
    that.
    """
    return _count(VMSTAT)


def _count(counters: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in counters.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _messages() -> list[tuple[float, str]] | None:
    """Returns seconds since boot and text of each record of the kernel's log; None if this user
    can't read it.
    """
    with contextlib.suppress(OSError):
        return _kmsg()
    for command in COMMANDS:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=TIMEOUT,
                check=False,
            )
            found = _parse(done.stdout.decode(errors="replace"))
            if done.returncode == 0 and found:
                return found
    return None


def _parse(text: str) -> list[tuple[float, str]]:
    """Parses records as dmesg and journalctl print them: `[ 1234.567890] text`."""
    return [
        (float(match[1]), match[2])
        for line in text.splitlines()
        if (match := _STAMPED.fullmatch(line))
    ]


def _kmsg() -> list[tuple[float, str]]:
    """Reads the records of /dev/kmsg (Documentation/ABI/testing/dev-kmsg).

    Raises:
        OSError: this user may not read it.
    """
    descriptor = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK)
    found = []
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while True:
            try:
                record = file.read(8192)
            except BrokenPipeError:  # this record was overwritten; the next one follows
                continue
            except PermissionError:
                raise
            except OSError:
                break
            if not record:
                break
            head, _, text = record.decode(errors="replace").partition(";")
            parts = head.split(",")
            if len(parts) > 2 and (stamp := whole(parts[2])) is not None:
                found.append((stamp / 1e6, text.splitlines()[0] if text else ""))
    return found
