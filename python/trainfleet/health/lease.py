"""The lease of a run's launcher, a file in the run folder: it shows any machine which launcher is
in charge.

head.json              host, process, term and time of the launcher in charge, which rewrites it
                       every second. From byte ROOM on: the launch that has no launcher yet
                       (launch/launching.py), until a launcher's lease blanks it
heartbeats/terms/<n>   the claimer of term n: of several simultaneous claimers, one gets it
                       (run/claims.py)
standby.json           the same for the host that stands by to take over (watch/standby.py)

A launcher that has not renewed its lease for PATIENCE seconds has lost it: its successor claims the
next term, and the old launcher, if it is still there, sees that and exits at once, before it
starts, ends or records anything else (`confirm`). A launcher that can neither read nor write the
file for that long exits too, if a host stands by. The processes that a launcher had started are
fenced by its successor (backends) and fence themselves (health/fence.py); without a successor,
ranks save and exit (health/heartbeat.py). Locks are not used: on NFS and Lustre the lock of a dead
host stays for minutes.

A process that checks a lease from another host compares no clocks: it waits for a change. Both
files are rewritten in place (run/claims.py), so that no host sees an old version.
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
from typing import Annotated, TypeVar

from ..run.claims import ROOM, claim, rewrite
from ..run.records import require_object
from ..run.run_folder import Run, make_folder, remedy, unwritable
from ..trust import untrusted_input
from ..trust.errors import BackendError, InputError, JobFailed
from ..trust.validation import Count, Moment, Name, Range, fit

FILE, STANDBY = "head.json", "standby.json"
TERMS = "heartbeats/terms"
MOST = 4 * untrusted_input.KIBIBYTE  # bytes of such a file
EVERY = 1.0  # seconds
PATIENCE = 9.0  # seconds without a renewal until the lease expires
# seconds for a launcher to take its lease: a busy head, or one whose packages are far, imports for
# long
TO_BEGIN = 60.0
# seconds in which a running launcher has renewed its lease, for a process that only reads
GLANCE = 3.0
# seconds without a launcher after which ranks save and exit: a standby takes over long before
ORPHANED_AFTER = 120.0
# the same for ranks that must not continue without a launcher
VARIABLE = "TRAINFLEET_ORPHANED_AFTER"
# for a launcher that a standby started: the renewal after which the one before fell silent
SUCCEEDS = "TRAINFLEET_SUCCEEDS"
# for a standby: the number of its appointment, and the term before its launcher's
APPOINTED = "TRAINFLEET_APPOINTED"
LEFT = 76  # the exit code of a launcher that has lost its lease to another
VACATED = 0.0  # the time of a lease that was given up
T = TypeVar("T")


@dataclass(frozen=True)
class Holder:
    """The launcher that holds the lease, and the host that it sees standing by ("": none).

    `code`: its exit code once it has ended, None before. `tries`: how often hosts have failed to
    take over before it.
    """

    host: Name
    pid: Count
    term: Count
    time: Moment
    code: Annotated[int, Range(0, 255)] | None = None
    standby: Name = ""
    tries: Count = 0

    @property
    def renewal(self) -> str:
        """Names this renewal among all renewals."""
        return f"{self.term} {self.time}"


@dataclass(frozen=True)
class Standby:
    """The host that stands by, and the number of its appointment: the higher one counts."""

    host: Name
    pid: Count
    number: Count
    time: Moment


@dataclass(frozen=True)
class Launching:
    """The first phase of a lease: a launch that has no launcher yet, and how often it was renewed.

    `words`: the command, its user and its host. `process`: the identity of its process. `asked`:
    the run has since been asked to stop.
    """

    words: Name
    pid: Count
    process: Name
    beat: Count = 0
    asked: bool = False

    def __str__(self) -> str:
        return self.words


def parse_launching(text: str) -> Launching | None:
    """Returns the launch that the text of head.json has; None if it has no launch."""
    with suppress(InputError):
        return fit(Launching, untrusted_input.parse_line(text[ROOM:].strip().encode(), ""))
    return None


def launching_text(launching: Launching | None) -> str:
    """Returns the text of head.json from byte ROOM on, with a launch or without one."""
    return (json.dumps(asdict(launching)) if launching else "").ljust(ROOM)


def read_launching(run: Run) -> Launching | None:
    """Returns the launch of a run whose folder this machine sees; None if it shows no launch."""
    with suppress(FileNotFoundError, InputError):
        found = parse_launching(untrusted_input.read_text(run.folder / FILE, MOST))
        return replace(found, asked=run.is_asked_to_stop()) if found else None
    return None


def show_launching(run: Run, launching: Launching | None, obeyed: bool) -> None:
    """Shows a launch in a folder that this machine sees, or removes it, with the folder if that is
    empty.

    `obeyed`: requests to stop are withdrawn.
    """
    path = run.folder / FILE
    try:
        if obeyed:
            run.stop.unlink(missing_ok=True)
        if launching:
            make_folder(run.folder)
            if not path.exists():
                rewrite(path, "")
        if path.exists():
            rewrite(path, launching_text(launching), start=ROOM)
            if not untrusted_input.read_text(path, MOST).strip():
                path.unlink()
    except OSError as error:
        raise unwritable(path, error) from error
    with suppress(OSError):
        run.folder.rmdir()


def read_holder(folder: Path) -> Holder | None:
    """Returns the latest holder of a run's lease; None before the first. InputError for a damaged
    file.
    """
    for _ in range(3):
        with suppress(InputError):  # a writer may be replacing it
            return _read(Holder, folder / FILE)
        time.sleep(0.02)
    return _read(Holder, folder / FILE)


def newest_holder(folder: Path) -> Holder | None:
    """Returns the same as `read_holder`, but None for a file that can't be read now: a live
    launcher writes it again within a second.
    """
    try:
        return read_holder(folder)
    except (InputError, OSError):
        return None


def newest_standby(folder: Path) -> Standby | None:
    """Returns the host that was appointed last to stand by; None if no host was, or if the file
    can't be read now.
    """
    try:
        return _read(Standby, folder / STANDBY)
    except (InputError, OSError):
        return None


def write_standby(folder: Path, standby: Standby) -> None:
    """Records the host that stands by."""
    rewrite(folder / STANDBY, json.dumps(asdict(standby)))


def _read(kind: type[T], path: Path) -> T | None:
    try:
        # and does not check its size before: a client may remember an old one
        text = untrusted_input.read_text(path, MOST)[:ROOM]
        return (
            fit(kind, require_object(untrusted_input.parse_json(text, str(path))))
            if text.strip()
            else None
        )
    except FileNotFoundError:
        return None
    except InputError as error:
        where = error.where or str(path)
        raise InputError(
            error.what, where=where, key=error.key, why=error.why, next=remedy(path)
        ) from error


def is_held(holder: Holder | None, now: float) -> bool:
    """Tells whether a launcher holds the lease, by clocks. `now`: by a clock of the fleet; if that
    differs from the launcher's, only polling the lease for a while decides (`is_renewed`).
    """
    return holder is not None and holder.code is None and abs(now - holder.time) < PATIENCE


def is_renewed(folder: Path, seconds: float = GLANCE) -> bool:
    """Tells whether a launcher renews the lease within that many seconds. Uses no clock of another
    host.
    """
    before, waited = newest_holder(folder), 0.0
    if before is None or before.code is not None or before.time == VACATED:
        return False
    while waited < seconds:
        time.sleep(EVERY / 2)
        waited += EVERY / 2
        newest = newest_holder(folder)
        if newest and newest.renewal != before.renewal:
            return newest.code is None and newest.time != VACATED
    return False


def require_vacant(folder: Path) -> None:
    """Returns once it is certain that no launcher renews the lease: at once for a launcher that a
    standby started.

    Raises:
        BackendError: a launcher renews it.
    """
    before = newest_holder(folder)
    if before and before.renewal != os.environ.get(SUCCEEDS) and is_renewed(folder, PATIENCE):
        raise led_already(
            folder.name, f"{folder}, launched on {(newest_holder(folder) or before).host}"
        )


def led_already(name: str, where: str) -> BackendError:
    """Returns the error for a run that another launcher leads."""
    what, then = (
        f"the run {name} is already running",
        "run make logs FOLLOW=1 to see it, or make stop to end it",
    )
    return BackendError(what, where=where, next=then)


@dataclass(frozen=True)
class Vacancy:
    """Measures how long a run has been without a launcher, for a process that polls the lease.

    It counts polls and compares no clocks: a file system that pauses for a minute is one poll, not
    a death. Only a lease that was seen to be renewed can fall vacant: an old launcher's file proves
    nothing.
    """

    last: float | None = None  # the holder's time at the last poll
    renewed: bool = False
    silent: float = 0.0  # seconds

    @property
    def vacant(self) -> float:
        """Returns the seconds without a launcher."""
        return self.silent if self.renewed else 0.0

    def look(self, holder: Holder | Standby | None, since: float) -> Vacancy:
        """Returns the vacancy after another poll, `since` seconds after the one before. A lease
        that can't be read does not count as renewed.
        """
        if holder is None or holder.time == self.last:
            return replace(self, silent=self.silent + since)
        return Vacancy(holder.time, self.last is not None, 0.0)


class Lease:
    """Holds the lease within `with`, by a thread that renews it. The constructor reads the previous
    holder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.term = folder, 0  # 0: it is not held, like for a run of only this machine
        self.ended = threading.Event()
        self.code = 1
        self.left = False
        self.standby = ""  # the host that stands by, which launch/failover.py sets
        self.reached = time.monotonic()  # when the file was last read or written
        self.before = read_holder(folder)

    def __enter__(self) -> Lease:
        """Takes the lease; BackendError if another launcher was faster."""
        make_folder(self.folder)
        self.term = self._claim()
        try:
            self._write(None, durable=True)
        except OSError as error:
            raise unwritable(self.folder / FILE, error) from error
        self.thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended.set()
        self.thread.join()
        self.confirm()
        if self.left if kind is None else _is_tried_again(kind):
            self._write(None, since=VACATED, durable=True)
        else:
            self._write(self.code if kind is None else 1, durable=True)

    @property
    def predecessor(self) -> Holder | None:
        """Returns the previous launcher if it died before it ended."""
        return self.before if self.before and self.before.code is None else None

    def leave(self) -> None:
        """Lets the lease expire at the end of `with`, as if the launcher were gone while its job
        continues.
        """
        self.left = True

    def confirm(self) -> None:
        """Ends this process if another launcher has taken over, or must have: the file is out of
        reach, and a host stands by. Called before every act that would harm that launcher's run:
        this process may just have been frozen for an hour.
        """
        newest = newest_holder(self.folder) if self.term else None
        if newest and newest.term > self.term:
            _go(f"{newest.host} has taken over")
        if newest:
            self.reached = time.monotonic()
        elif self.term and self.standby and time.monotonic() - self.reached > PATIENCE:
            _go(f"{self.folder / FILE} can't be read or written, so {self.standby} takes over")

    def _claim(self) -> int:
        """Returns the term that this launcher gets. Respects another's claim until it is clear that
        it had no effect.
        """
        term = self.before.term + 1 if self.before else max(1, newest_term(self.folder))
        while not claim(self.folder / TERMS / str(term), f"{platform.node()} {os.getpid()}\n"):
            newest = self._await(term)
            if newest and newest.code is None and newest.time != VACATED:
                raise led_already(self.folder.name, f"{self.folder}, launched on {newest.host}")
            self.before, term = newest or self.before, max(term, newest.term if newest else 0) + 1
        return term

    def _await(self, term: int) -> Holder | None:
        """Returns the holder with this term, or a later one; None if no holder appears."""
        waited = 0.0
        while (
            not ((newest := newest_holder(self.folder)) and newest.term >= term)
            and waited < PATIENCE
        ):
            time.sleep(EVERY / 2)
            waited += EVERY / 2
        return newest if newest and newest.term >= term else None

    def _renew(self) -> None:
        while not self.ended.wait(EVERY):
            self.confirm()
            with suppress(OSError):  # the disk may be away for a moment: the next renewal succeeds
                self._write(None)
                self.reached = time.monotonic()

    def _write(self, code: int | None, since: float | None = None, durable: bool = False) -> None:
        now = time.time() if since is None else since
        failed = self.before.tries + 1 if self.before and self.before.time == VACATED else 0
        holder = Holder(platform.node(), os.getpid(), self.term, now, code, self.standby, failed)
        rewrite(self.folder / FILE, json.dumps(asdict(holder)), durable)


def _go(why: str) -> None:
    with suppress(OSError):  # the log may be on the disk that fails
        print(f"{why}; this launcher exits", file=sys.stderr, flush=True)
    os._exit(LEFT)


def newest_term(folder: Path) -> int:
    """Returns the highest claimed term; 0 before the first."""
    with suppress(OSError):
        names = os.listdir(folder / TERMS)  # noqa: PTH208
        return max((untrusted_input.whole(name) or 0 for name in names), default=0)
    return 0


def _is_tried_again(kind: type[BaseException]) -> bool:
    """Tells whether a launcher ended without a verdict on its job, so that the standby that started
    it will start another.
    """
    return (
        SUCCEEDS in os.environ and issubclass(kind, Exception) and not issubclass(kind, JobFailed)
    )
