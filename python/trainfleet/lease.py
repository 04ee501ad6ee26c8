"""The lease of a run's launcher, a file in the run folder: it shows any machine which launcher is in charge.

head.json has host, process, term and time, and is renewed every second. A launcher that has not renewed it for PATIENCE seconds
has lost it: its successor writes a higher term, and the old launcher, if it is still there, sees that and exits at once. The
processes that it had started are fenced by its successor (backends) and fence themselves (fence.py); without a successor, ranks
save and exit (heartbeat.py).
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Annotated

from .beats import renew_file
from .errors import InputError
from .runs import read_json, remedy
from .shapes import Count, Moment, Name, Range, fit

FILE = "head.json"
EVERY = 1.0  # seconds
PATIENCE = 9.0  # seconds without a renewal until the lease expires
ORPHANED_AFTER = 120.0  # seconds without a launcher after which ranks save and exit: a standby takes over long before
VARIABLE = "TRAINFLEET_ORPHANED_AFTER"  # the same for ranks that must not go on without a launcher
LEFT = 76  # the exit code of a launcher that has lost its lease to another


@dataclass(frozen=True)
class Holder:
    """The launcher that holds the lease. `code`: its exit code once it has ended, None before."""

    host: Name
    pid: Count
    term: Count
    time: Moment
    code: Annotated[int, Range(0, 255)] | None = None


def read_holder(folder: Path) -> Holder | None:
    """The latest holder of a run's lease; None when there has been none."""
    record = read_json(folder / FILE)
    return fit(Holder, record, str(folder / FILE), remedy(folder / FILE)) if record else None


def newest_holder(folder: Path) -> Holder | None:
    """As `read_holder`, but None for a damaged file: a live launcher replaces it within a second."""
    try:
        return read_holder(folder)
    except InputError:
        return None


def is_held(holder: Holder | None, now: float) -> bool:
    """Whether a launcher holds the lease. `now`: by a clock of the fleet, whose clocks agree to a second (make doctor)."""
    return holder is not None and holder.code is None and now - holder.time < PATIENCE


@dataclass(frozen=True)
class Vacancy:
    """How long a run has been without a launcher, for a process that polls the lease.

    Clocks are not compared, and looks are counted: a file system that pauses for a minute is one look, and no death. Only a
    holder that was seen to be renewed can fall vacant: what a launcher of another day left says nothing.
    """

    last: float | None = None  # the holder's time at the last poll
    renewed: bool = False
    silent: float = 0.0  # seconds

    @property
    def vacant(self) -> float:
        """Seconds without a launcher."""
        return self.silent if self.renewed else 0.0

    def look(self, holder: Holder | None, since: float) -> Vacancy:
        """The vacancy after another poll, `since` seconds after the one before."""
        now = holder.time if holder else None
        if now == self.last:
            return replace(self, silent=self.silent + since)
        return Vacancy(now, self.last is not None, 0.0)


class Lease:
    """Holds the lease within `with`, by a thread that renews it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ended = threading.Event()
        self.code = 1
        self.left = False
        self.predecessor: Holder | None = None  # a launcher that died at its work

    def __enter__(self) -> Lease:
        before = read_holder(self.folder)
        self.predecessor = before if before and before.code is None else None
        self.term = before.term + 1 if before else 1
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write(None)
        self.thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.ended.set()
        self.thread.join()
        if self.left and kind is None:
            self._write(None, since=0.0)
        else:
            self._write(self.code if kind is None else 1)

    def leave(self) -> None:
        """Lets the lease expire at the end of `with`, as if the launcher were gone while its job goes on."""
        self.left = True

    def _renew(self) -> None:
        while not self.ended.wait(EVERY):
            newest = newest_holder(self.folder)
            if newest and newest.term > self.term:
                print(f"{newest.host} has taken over; this launcher leaves", file=sys.stderr, flush=True)
                os._exit(LEFT)
            with suppress(OSError):  # the disk may be away for a moment: the next renewal succeeds
                self._write(None)

    def _write(self, code: int | None, since: float | None = None) -> None:
        holder = Holder(platform.node(), os.getpid(), self.term, time.time() if since is None else since, code)
        renew_file(self.folder / FILE, json.dumps(asdict(holder)).encode())
