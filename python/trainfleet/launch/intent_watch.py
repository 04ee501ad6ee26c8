"""Declares a launch in the run folder before its launcher leads, so that any machine sees it and
can cancel it (run/launch_intent.py).

A launch takes minutes until then: images, plans, the gate, code, tokenizers. Its command looks for
a request to stop meanwhile, and ends upon one as after Ctrl-C. Once the launcher has its lease, it
and its ranks look for the request.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..backends import backend_of
from ..backends.run_storage import Place
from ..config import Config
from ..run.launch_intent import PACE, QUIET, DeclaredIntent, Intent, mine
from ..run.run_folder import Run, run_of
from ..trust.errors import BackendError, RunError
from .command import ORDER
from .run_location import is_nowhere

JOINS = 5.0  # seconds for a look to end
PATIENCE = 120.0  # seconds for a launch that was asked to stop to be gone
_open: dict[str, Declared] = {}  # by run: the launches that this process has declared


class Declared:
    """Touches the intent of this process, and interrupts it when the run is asked to stop."""

    def __init__(self, place: Place, intent: Intent) -> None:
        self.place, self.intent = place, intent
        self.over, self.cancelled = threading.Event(), False
        self.thread = threading.Thread(target=self._look, name="intent", daemon=True)
        self.thread.start()

    def _look(self) -> None:
        while not self.over.wait(PACE):
            with suppress(BackendError, RunError):
                found = self.place.declared(touch=True)
                if (
                    found
                    and not self.over.is_set()
                    and (found.asked or found.intent.token != self.intent.token)
                ):
                    self._cancel(found)
                    return

    def _cancel(self, found: DeclaredIntent) -> None:
        mine = found.intent.token == self.intent.token
        print(
            "asked to stop" if mine else f"another launch has taken over: {found.intent}",
            flush=True,
        )
        self.cancelled = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def end(self, begun: bool) -> None:
        """Withdraws the intent. `begun`: the run has a launcher, which looks for requests to
        stop.
        """
        if not self.over.is_set():
            self.over.set()
            self.thread.join(JOINS)
            with suppress(BackendError, RunError):
                self.place.withdraw(self.intent, begun)


@contextmanager
def launching(config: Config, verb: str) -> Iterator[None]:
    """Declares the launch of a config's run until the block ends, or `leads` is called; within
    another such block nothing.

    Raises:
        BackendError: another launch of the run is under way.
    """
    # a head's launch was declared where it was typed
    if config.name in _open or ORDER in os.environ or is_nowhere(config):
        yield
        return
    with backend_of(config).place(run_of(config.name)) as place:
        if (intent := _declare(place, config, verb)) is None:
            yield
            return
        before = signal.getsignal(signal.SIGINT)
        # a job in the background of a script: by this signal the watch ends the launch
        if before == signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _open[config.name] = watch = Declared(place, intent)
        try:
            yield
        finally:
            watch.end(begun=False)
            del _open[config.name]
            if before == signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.SIG_IGN)


def leads(run: Run) -> None:
    """The launcher of a run has taken its lease: from now on that shows that the run is at work."""
    if watch := _open.get(run.name):
        watch.end(begun=True)


def is_cancelled() -> bool:
    """Whether a launch of this process was cancelled."""
    return any(watch.cancelled for watch in _open.values())


def _declare(place: Place, config: Config, verb: str) -> Intent | None:
    """This process's intent, once it is declared; None for a run that is at work: the command joins
    that, or refuses.
    """
    with suppress(BackendError):  # which the launch itself explains better, by host
        place.refresh()
    if place.is_running():
        return None
    intent, before = mine(f"make {verb}"), place.declared()
    why = gone(place, before) if before else ""
    if before and why:
        print(f"this launch takes the place of {before.intent}: {why}", flush=True)
    if other := place.declare(intent, before.intent.token if before and why else ""):
        if not backend_of(config).hands_over:
            what = f"the run {config.name} is being launched already"
            raise BackendError(what, where=str(other.intent), next="make stop cancels it")
        _await(place, config, other.intent)
        return None
    return intent


def _await(place: Place, config: Config, other: Intent) -> None:
    """Returns once another command has launched the run; BackendError where that ended before."""
    print(f"{config.name} is being launched: {other}; looking on", flush=True)
    while under_way(place):
        time.sleep(PACE / 2)
    place.refresh()
    if not place.is_running():
        raise BackendError(
            "that launch ended before the run began", where=str(other), next="make train"
        )


def under_way(place: Place) -> Intent | None:
    """The launch of a run that has no launcher yet; None where there is none."""
    found = place.declared()
    return found.intent if found and not gone(place, found) else None


def gone(place: Place, found: DeclaredIntent) -> str:
    """Why the command of a launch is no more; "" while it goes on. No clocks are compared: a touch
    is waited for.
    """
    if found.goes_on is not None:
        return "" if found.goes_on else "its process has ended"
    deadline = time.monotonic() + QUIET
    while time.monotonic() < deadline:
        time.sleep(PACE / 2)
        now = place.declared()
        if now != found:
            return "" if now else "it has ended"
    return f"nothing was heard of it for {QUIET:.0f} s"


def cancel(place: Place, run: Run, intent: Intent) -> bool:
    """Asks a launch to stop; True once it is gone, False where a launcher leads the run by then.

    Raises:
        RunError: it does not go.
    """
    place.ask_to_stop()
    print(f"asked the launch of {run.name} to end: {intent}", flush=True)
    deadline = time.monotonic() + PATIENCE
    while under_way(place):
        if time.monotonic() > deadline:
            raise RunError(
                "its launch does not end",
                where=str(intent),
                next=f"Ctrl-C there; or on it: kill {intent.pid}",
            )
        time.sleep(PACE / 2)
        place.refresh()
    return not place.is_running()
