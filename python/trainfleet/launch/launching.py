"""Publishes a launch in the run folder before its launcher takes the lease, so that any machine can
see and cancel the launch.

A launch spends minutes on images, plans, the preflight, code and tokenizers before its launcher
takes the lease. This is the first phase of the run's lease (health/lease.py). During this phase,
the launching command renews its entry, and exits on a stop request as it does on Ctrl-C.
Afterwards, the launcher and its ranks check for stop requests. If two launches start
simultaneously, the one that finds the other's entry exits.
"""

from __future__ import annotations

import os
import platform
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from ..backends import backend_of
from ..backends.run_storage import Place
from ..config import Config
from ..health.lease import Launching
from ..process.processes import identity, user
from ..run.run_folder import Run, run_of
from ..trust.errors import BackendError, RunError
from .command import ORDER
from .run_location import is_nowhere

PACE = 2.0  # seconds between renewals
QUIET = 15.0  # seconds without a renewal after which a launch counts as dead
JOINS = 5.0  # timeout in seconds for joining the polling thread
PATIENCE = 120.0  # timeout in seconds for a launch to end after a stop request
_open: dict[str, FirstPhase] = {}  # this process's launches, by run name


class FirstPhase:
    """Thread that renews this process's launch, and interrupts the process on a stop request."""

    def __init__(self, place: Place, shown: Launching) -> None:
        self.place = place
        self.shown = shown
        self.over = threading.Event()
        self.cancelled = False
        self.thread = threading.Thread(target=self._look, name="launching", daemon=True)
        self.thread.start()

    def _look(self) -> None:
        while not self.over.wait(PACE):
            with suppress(BackendError, RunError):
                found = self.place.launching()
                if self.over.is_set() or found is None:
                    continue
                if found.asked or not self.is_mine(found):
                    self._cancel(found)
                    return
                self.place.show(replace(found, beat=found.beat + 1))

    def is_mine(self, found: Launching | None) -> bool:
        return found is not None and found.words == self.shown.words

    def _cancel(self, found: Launching) -> None:
        print(
            "this launch was asked to stop"
            if self.is_mine(found)
            else f"another launch has taken over: {found}"
        )
        self.cancelled = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def end(self, begun: bool) -> None:
        """Removes this launch's entry. `begun` is whether a launcher now leads the run and handles
        any stop request.
        """
        if not self.over.is_set():
            self.over.set()
            self.thread.join(JOINS)
            with suppress(BackendError, RunError):
                if self.is_mine(self.place.launching()):
                    self.place.show(None, obeyed=not begun)


@contextmanager
def launching(config: Config, verb: str) -> Iterator[None]:
    """Publishes the launch of a config's run until the block ends or `leads` is called. Does
    nothing inside another `launching` block.

    Raises:
        BackendError: another launch of the run is in progress.
    """
    # On a head, the command on the user's machine has already published the launch.
    if config.name in _open or ORDER in os.environ or is_nowhere(config):
        yield
        return
    with backend_of(config).place(run_of(config.name)) as place:
        if not _begin(place, config, shown := mine(f"make {verb}")):
            yield
            return
        before = signal.getsignal(signal.SIGINT)
        # Background jobs in scripts ignore SIGINT, but here it must end the launch.
        if before == signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _open[config.name] = phase = FirstPhase(place, shown)
        try:
            yield
        finally:
            phase.end(begun=False)
            del _open[config.name]
            if before == signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.SIG_IGN)


def leads(run: Run) -> None:
    """Removes this launch's entry, because its launcher now holds the lease."""
    if phase := _open.get(run.name):
        phase.end(begun=True)


def is_cancelled() -> bool:
    """Returns whether any of this process's launches was cancelled."""
    return any(phase.cancelled for phase in _open.values())


def mine(command: str) -> Launching:
    """Returns a launch entry that describes this process."""
    pid = os.getpid()
    terminal = f"in {os.ttyname(0).removeprefix('/dev/')} " if os.isatty(0) else ""
    words = f"{command}, typed by {user()} {terminal}on {platform.node()} (process {pid})"
    return Launching(words, pid, identity(pid))


def _begin(place: Place, config: Config, shown: Launching) -> bool:
    """Publishes this launch. Returns False if a launcher already leads the run, so that the command
    can join it or fail.
    """
    with suppress(BackendError):  # The launch reports this error later, with details per host.
        place.refresh()
    if place.is_running():
        return False
    if not (before := place.launching()) or (why := gone(place, before)):
        if before:
            print(f"this launch replaces {before}: {why}")
        place.show(shown, obeyed=True)
        return True
    if not backend_of(config).hands_over:
        what = f"the run {config.name} is already being launched"
        raise BackendError(what, where=str(before), next="run make stop to cancel it")
    print(f"{config.name} is already being launched: {before}; following it")
    while under_way(place):
        time.sleep(PACE / 2)
    place.refresh()
    if not place.is_running():
        raise BackendError(
            "the other launch ended before the run started", where=str(before), next="make train"
        )
    return False


def under_way(place: Place) -> Launching | None:
    """Returns the run's launch if it is still in progress, otherwise None."""
    found = place.launching()
    return found if found and not gone(place, found) else None


def gone(place: Place, found: Launching) -> str:
    """Returns why a launch is considered dead, or "" if it is alive. Waits for a renewal instead of
    comparing clocks.
    """
    if f" on {platform.node()} (process" in found.words:
        process = identity(found.pid)
        if process in ("", found.process):  # Otherwise the PID has been reused.
            return "" if process else "its process has ended"
    deadline = time.monotonic() + QUIET
    while time.monotonic() < deadline:
        time.sleep(PACE / 2)
        now = place.launching()
        if now is None or now.beat != found.beat:
            return "" if now else "it has ended"
    return f"it has been silent for {QUIET:.0f} s"


def cancel(place: Place, run: Run, found: Launching) -> bool:
    """Asks a launch to stop. Returns True once it has ended, or False if a launcher already leads
    the run. Raises RunError if the launch does not end in time.
    """
    place.ask_to_stop()
    print(f"asked the launch of {run.name} to end: {found}")
    deadline = time.monotonic() + PATIENCE
    while under_way(place):
        if time.monotonic() > deadline:
            raise RunError(
                "the launch has not ended",
                where=str(found),
                next=f"press Ctrl-C in its terminal, or run kill {found.pid} on that host",
            )
        time.sleep(PACE / 2)
        place.refresh()
    return not place.is_running()
