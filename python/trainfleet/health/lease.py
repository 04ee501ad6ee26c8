"""Lease of a run's launcher: a file in the run folder that shows every machine which launcher is in
charge.

head.json              host, process, term and time of the launcher in charge, which rewrites the
                       file every second. From byte ROOM on: a launch that has no launcher
                       yet (launch/launching.py), blanked when a launcher takes the lease
heartbeats/terms/<n>   the launcher that claimed term n. If several claim it at once, only one
                       succeeds (run/claims.py)
standby.json           the same fields for the standby host, which can take over
                       (watch/standby.py)

A launcher that has not renewed its lease for PATIENCE seconds has lost it, and its successor claims
the next term. If the old launcher is still alive, it detects this and exits before it starts, ends
or records anything else (`confirm`). A launcher that can neither read nor write the file for that
long also exits if there is a standby.

The successor fences the old launcher's processes (backends), and these processes also fence
themselves (health/fence.py). Without a successor, ranks save and exit (health/heartbeat.py).

Locks are not used, because on NFS and Lustre, a dead host's lock persists for minutes.

A process that checks another host's lease waits for a change instead of comparing clocks. Both
files are rewritten in place (run/claims.py), so no host sees a stale version.
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
from typing import Annotated, TypeVar

from ..run.claims import ROOM, claim, rewrite
from ..run.records import require_object
from ..run.run_folder import Run, damaged, make_folder, unwritable
from ..trust import untrusted_input
from ..trust.errors import BackendError, InputError, JobFailed
from ..trust.validation import Count, Moment, Name, Range, fit

FILE, STANDBY = "head.json", "standby.json"
TERMS = "heartbeats/terms"
MOST = 4 * untrusted_input.KIBIBYTE  # maximum bytes to read from these files
EVERY = 1.0  # seconds between renewals
PATIENCE = 9.0  # seconds without a renewal after which the lease expires
# Seconds for a launcher to take its lease. Imports are slow on a busy head or from a remote file
# system.
TO_BEGIN = 60.0
# Seconds within which a live launcher renews its lease, as seen by processes that only read it.
GLANCE = 3.0
# Seconds without a launcher after which ranks save and exit. A standby takes over long before that.
ORPHANED_AFTER = 120.0
# Environment variable that sets this limit for ranks that must not continue without a launcher.
VARIABLE = "TRAINFLEET_ORPHANED_AFTER"
# Environment variable of a launcher that a standby started: the previous launcher's last renewal.
SUCCEEDS = "TRAINFLEET_SUCCEEDS"
# Environment variable of a standby: its appointment number, and the term before its launcher's.
APPOINTED = "TRAINFLEET_APPOINTED"
LEFT = 76  # exit code of a launcher that lost its lease
VACATED = 0.0  # renewal time recorded in a lease that was given up
T = TypeVar("T")


@dataclass(frozen=True)
class Holder:
    """Launcher that holds the lease.

    `standby` is its standby host, or "" if it has none. `code` is its exit code, or None until it
    exits. `tries` is the number of failed takeovers before it.
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
        """Returns a unique identifier of this renewal."""
        return f"{self.term} {self.time}"


@dataclass(frozen=True)
class Standby:
    """Host on standby, and its appointment number.

    Only the highest number is valid.
    """

    host: Name
    pid: Count
    number: Count
    time: Moment


@dataclass(frozen=True)
class Launching:
    """First phase of a lease: a launch that has no launcher yet.

    `words` contains the command, its user and its host. `process` identifies the launch's process,
    and `beat` counts the renewals. `asked` is whether the run has been asked to stop since the
    launch.
    """

    words: Name
    pid: Count
    process: Name
    beat: Count = 0
    asked: bool = False

    def __str__(self) -> str:
        return self.words


def parse_launching(text: str) -> Launching | None:
    """Parses the launch from the text of head.json.

    Returns None if the file describes no launch.
    """
    with suppress(InputError):
        return fit(Launching, untrusted_input.parse_line(text[ROOM:].strip().encode(), ""))
    return None


def launching_text(launching: Launching | None) -> str:
    """Returns the text of head.json from byte ROOM on, which is blank without a launch."""
    return (json.dumps(asdict(launching)) if launching else "").ljust(ROOM)


def read_launching(run: Run) -> Launching | None:
    """Returns a run's launch, or None if there is no launch.

    The run folder must be visible to this machine.
    """
    with suppress(FileNotFoundError, InputError):
        found = parse_launching(untrusted_input.read_text(run.folder / FILE, MOST))
        return replace(found, asked=run.is_asked_to_stop()) if found else None
    return None


def show_launching(run: Run, launching: Launching | None, obeyed: bool) -> None:
    """Writes a launch to a run folder that is visible to this machine. With None, removes the
    launch.

    Also removes the folder if it is empty. `obeyed` deletes the stop request.
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
    """Returns the latest holder of a run's lease, or None before the first.

    Raises:
        InputError: the file is damaged.
    """
    for _ in range(3):
        with suppress(InputError):  # a writer may be replacing the file
            return _read(Holder, folder / FILE)
        time.sleep(0.02)
    return _read(Holder, folder / FILE)


def newest_holder(folder: Path) -> Holder | None:
    """Returns the latest holder, as `read_holder` does, or None if the file can't be read at the
    moment.

    A live launcher rewrites the file within a second.
    """
    try:
        return read_holder(folder)
    except (InputError, OSError):
        return None


def newest_standby(folder: Path) -> Standby | None:
    """Returns the standby that was appointed last.

    Returns None if no host was appointed, or if the file can't be read at the moment.
    """
    try:
        return _read(Standby, folder / STANDBY)
    except (InputError, OSError):
        return None


def write_standby(folder: Path, standby: Standby) -> None:
    """Writes standby.json."""
    rewrite(folder / STANDBY, json.dumps(asdict(standby)))


def _read(kind: type[T], path: Path) -> T | None:
    try:
        # Do not check the file size first, because a file system client may cache an old size.
        text = untrusted_input.read_text(path, MOST)[:ROOM]
        if text.strip():
            return fit(kind, require_object(untrusted_input.parse_json(text, str(path))))
        return None
    except FileNotFoundError:
        return None
    except InputError as error:
        raise damaged(path, error) from error


def is_held(holder: Holder | None, now: float) -> bool:
    """Returns whether a launcher holds the lease, by comparing clocks.

    `now` is the time on a clock in the fleet. If that clock may be wrong, use `is_renewed` instead.
    """
    return holder is not None and holder.code is None and abs(now - holder.time) < PATIENCE


def is_renewed(folder: Path, seconds: float = GLANCE) -> bool:
    """Returns whether a launcher renews the lease within `seconds`.

    Doesn't depend on other hosts' clocks.
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
    """Waits until it is certain that no launcher is renewing the lease.

    Doesn't wait if a standby started this launcher.

    Raises:
        BackendError: a launcher is renewing the lease.
    """
    before = newest_holder(folder)
    if before and before.renewal != os.environ.get(SUCCEEDS) and is_renewed(folder, PATIENCE):
        raise led_already(
            folder.name, f"{folder}, launched on {(newest_holder(folder) or before).host}"
        )


def led_already(name: str, where: str) -> BackendError:
    """Returns the error for a run that another launcher leads."""
    return BackendError(
        f"the run {name} is already running",
        where=where,
        next="run make logs FOLLOW=1 to see it, or make stop to end it",
    )


@dataclass(frozen=True)
class Vacancy:
    """Time that a run has been without a launcher, tracked by a process that polls the lease.

    Counts polls instead of comparing clocks, so a file system that stalls for a minute does not
    look like a dead launcher. A lease only becomes vacant if a renewal was observed, because an old
    launcher's file proves nothing.
    """

    last: float | None = None  # holder's renewal time at the last poll
    renewed: bool = False
    silent: float = 0.0  # seconds without a renewal

    @property
    def vacant(self) -> float:
        """Returns for how many seconds the run has been without a launcher."""
        return self.silent if self.renewed else 0.0

    def look(self, holder: Holder | Standby | None, since: float) -> Vacancy:
        """Returns the updated vacancy after another poll.

        `since` is the number of seconds since the previous poll. An unreadable lease does not count
        as renewed.
        """
        if holder is None or holder.time == self.last:
            return replace(self, silent=self.silent + since)
        return Vacancy(holder.time, self.last is not None, 0.0)


class Lease:
    """Context manager that holds the lease and renews it from a thread.

    The constructor reads the previous holder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.term = folder, 0  # term 0 means that no lease is held, as in local runs
        self.ended = threading.Event()
        self.code = 1
        self.left = False
        self.standby = ""  # host on standby; set by launch/failover.py
        self.reached = time.monotonic()  # monotonic time of the last successful read or write
        self.before = read_holder(folder)

    def __enter__(self) -> Lease:
        """Takes the lease.

        Raises:
            BackendError: another launcher took it first.
        """
        make_folder(self.folder)
        self.term = self._claim()
        try:
            self._write(None, durable=True)
        except OSError as error:
            raise unwritable(self.folder / FILE, error) from error
        self.thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        self.confirm()
        if self.left if kind is None else _is_tried_again(kind):
            self._write(None, since=VACATED, durable=True)
        else:
            self._write(self.code if kind is None else 1, durable=True)

    @property
    def predecessor(self) -> Holder | None:
        """Returns the previous launcher if it died without recording an exit code,
        otherwise None.
        """
        return self.before if self.before and self.before.code is None else None

    def leave(self) -> None:
        """Lets the lease expire at the end of the block although the job continues, as if the
        launcher had died.
        """
        self.left = True

    def confirm(self) -> None:
        """Exits this process if another launcher has taken over or probably has.

        A takeover is assumed if the file is unreachable and a host is on standby. Call this before
        every action that would disturb another launcher's run, because this process may have been
        frozen for an hour.
        """
        newest = newest_holder(self.folder) if self.term else None
        if newest and newest.term > self.term:
            _go(f"{newest.host} has taken over")
        if newest:
            self.reached = time.monotonic()
        elif self.term and self.standby and time.monotonic() - self.reached > PATIENCE:
            _go(f"{self.folder / FILE} can't be read or written, so {self.standby} takes over")

    def _claim(self) -> int:
        """Claims a term and returns it.

        Another launcher's claim is respected until it is clear that the launcher never took the
        lease.
        """
        term = self.before.term + 1 if self.before else max(1, newest_term(self.folder))
        while not claim(self.folder / TERMS / str(term), f"{platform.node()} {os.getpid()}\n"):
            newest = self._await(term)
            if newest and newest.code is None and newest.time != VACATED:
                raise led_already(self.folder.name, f"{self.folder}, launched on {newest.host}")
            self.before = newest or self.before
            term = max(term, newest.term if newest else 0) + 1
        return term

    def _await(self, term: int) -> Holder | None:
        """Waits for a holder with this or a later term.

        Returns None if there is still none after PATIENCE seconds.
        """
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
            # The disk may be briefly unavailable; a later renewal will succeed.
            with suppress(OSError):
                self._write(None)
                self.reached = time.monotonic()

    def _write(self, code: int | None, since: float | None = None, durable: bool = False) -> None:
        now = time.time() if since is None else since
        failed = self.before.tries + 1 if self.before and self.before.time == VACATED else 0
        holder = Holder(platform.node(), os.getpid(), self.term, now, code, self.standby, failed)
        rewrite(self.folder / FILE, json.dumps(asdict(holder)), durable)


def _go(why: str) -> None:
    with suppress(OSError):  # the log may be on the failing disk
        print(f"{why}; this launcher exits", file=sys.stderr)
    os._exit(LEFT)


def newest_term(folder: Path) -> int:
    """Returns the highest claimed term, or 0 before the first."""
    with suppress(OSError):
        names = os.listdir(folder / TERMS)  # noqa: PTH208
        return max((untrusted_input.whole(name) or 0 for name in names), default=0)
    return 0


def _is_tried_again(kind: type[BaseException]) -> bool:
    """Returns whether this launcher was started by a standby and failed without a verdict on its
    job.

    If so, the standby starts another launcher.
    """
    return (
        SUCCEEDS in os.environ and issubclass(kind, Exception) and not issubclass(kind, JobFailed)
    )
