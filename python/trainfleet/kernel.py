"""What the kernel of a node says of a failure that the program itself could not: killed for memory, a device off the bus, a disk.

It is read where it happened, as the node may be gone a minute later. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

KMSG = Path("/dev/kmsg")
TELLING = re.compile(
    r"NVRM:|Out of memory|oom-kill|Killed process|Lustre(Error)?:|infiniband|\befa_\d|EXT4-fs error|XFS .*(Corruption|shut)"
    r"|Remounting filesystem|nfs: server|neuron|nvme.*(timeout|I/O)|segfault at|mce: .*Hardware Error"
)
LINES = 40


class Kernel:
    """The kernel's words from the making of this on."""

    def __init__(self) -> None:
        self.began = time.clock_gettime(time.CLOCK_MONOTONIC)  # the clock of the kernel's stamps
        self.kills = oom_kills()

    def words(self) -> list[str]:
        """Telling lines since then, oldest first; none where this user may not read them."""
        lines = [line for when, line in _messages() if when >= self.began and TELLING.search(line)][-LINES:]
        killed = oom_kills() - self.kills
        return lines + ([f"memory.events: oom_kill {killed} in this control group"] if killed > 0 else [])


def oom_kills() -> int:
    """How many processes of this control group were killed for its memory limit."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        group = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))[3:]
        for line in Path(f"/sys/fs/cgroup{group}/memory.events").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _messages() -> list[tuple[float, str]]:
    """Seconds since boot and text of each record of the kernel's log (Documentation/ABI/testing/dev-kmsg)."""
    try:
        descriptor = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    found = []
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while True:
            try:
                record = file.read(8192)
            except BrokenPipeError:  # this record was overwritten meanwhile; the next one follows
                continue
            except OSError:
                break
            if not record:
                break
            head, _, text = record.decode(errors="replace").partition(";")
            parts = head.split(",")
            if len(parts) > 2 and parts[2].isdigit():
                found.append((int(parts[2]) / 1e6, text.splitlines()[0] if text else ""))
    return found
