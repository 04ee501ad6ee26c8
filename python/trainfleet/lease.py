"""The office of a run's launcher, held by a file in the run folder: who is at work on it, seen from any machine.

head.json says host, process, term and time, and is renewed each second. A launcher that does not renew it for PATIENCE seconds
has lost it: whoever takes over writes a higher term, and the one before, should it still be there, sees that and leaves at once.
What it had started is fenced by its successor (backends) and fences itself (fence.py); where nobody succeeds it, ranks save and
leave by themselves (heartbeat.py).
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
PATIENCE = 9.0  # seconds without a renewal until the office is vacant
ORPHANED_AFTER = 120.0  # seconds without a launcher after which ranks save and leave: a standby has taken over long before
VARIABLE = "TRAINFLEET_ORPHANED_AFTER"  # tells it to the ranks that must not go on without a launcher
LEFT = 76  # the exit code of a launcher whose office another one has


@dataclass(frozen=True)
class Tenure:
    """What the file says. `code`: the exit code once the work has ended, None while it lasts."""

    host: Name
    pid: Count
    term: Count
    time: Moment
    code: Annotated[int, Range(0, 255)] | None = None


def read_tenure(folder: Path) -> Tenure | None:
    """The newest tenure of a run; None when it has never had a launcher that keeps one."""
    record = read_json(folder / FILE)
    return fit(Tenure, record, str(folder / FILE), remedy(folder / FILE)) if record else None


def newest_tenure(folder: Path) -> Tenure | None:
    """As `read_tenure`; None too for a file that is none: a launcher that is at work replaces it within a second."""
    try:
        return read_tenure(folder)
    except InputError:
        return None


def is_held(tenure: Tenure | None, now: float) -> bool:
    """Whether a launcher is at work: `now` is a clock of the fleet's, whose clocks agree to a second (make doctor)."""
    return tenure is not None and tenure.code is None and now - tenure.time < PATIENCE


@dataclass(frozen=True)
class Vigil:
    """How long a run has been without a launcher, as who looks at its tenure again and again can tell.

    Clocks are not compared, and looks are counted: a file system that pauses for a minute is one look, and no death. Only a
    tenure that was seen to be renewed can fall vacant: what a launcher of another day left says nothing.
    """

    last: float | None = None  # the time in the tenure at the last look
    renewed: bool = False
    silent: float = 0.0  # seconds

    @property
    def vacant(self) -> float:
        """Seconds without a launcher."""
        return self.silent if self.renewed else 0.0

    def look(self, tenure: Tenure | None, since: float) -> Vigil:
        """After another look, `since` seconds after the one before."""
        now = tenure.time if tenure else None
        if now == self.last:
            return replace(self, silent=self.silent + since)
        return Vigil(now, self.last is not None, 0.0)


class Office:
    """Held from `with` to its end, by a thread that renews it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ended = threading.Event()
        self.code = 1
        self.left = False
        self.predecessor: Tenure | None = None  # a launcher that died at its work

    def __enter__(self) -> Office:
        before = read_tenure(self.folder)
        self.predecessor = before if before and before.code is None else None
        self.term = before.term + 1 if before else 1
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write(None)
        self.thread = threading.Thread(target=self._renew, name="office", daemon=True)
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
        """Has the office be vacant from the end of `with` on, as of a launcher that is gone while its job goes on."""
        self.left = True

    def _renew(self) -> None:
        while not self.ended.wait(EVERY):
            newest = newest_tenure(self.folder)
            if newest and newest.term > self.term:
                print(f"{newest.host} has taken over; this launcher leaves", file=sys.stderr, flush=True)
                os._exit(LEFT)
            with suppress(OSError):  # a disk that is away for a moment: the next time
                self._write(None)

    def _write(self, code: int | None, since: float | None = None) -> None:
        tenure = Tenure(platform.node(), os.getpid(), self.term, time.time() if since is None else since, code)
        renew_file(self.folder / FILE, json.dumps(asdict(tenure)).encode())
