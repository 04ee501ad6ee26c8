"""Keeps a successor for the launcher of a fleet's run: one other host stands by, and this one
checks that it still leads.

A launcher on the head of a fleet checks once a second whether the standby has beaten
(health/lease.py: standby.json). If that host is silent, or has taken over and leads itself, the
launcher appoints another: any host may lead, any number of times.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from ..backends.base import Backend
from ..backends.head import Head as Fleet
from ..backends.node_script import values_of
from ..health.lease import EVERY, PATIENCE, SUCCEEDS, TO_BEGIN, Lease, Standby, newest_standby
from ..hosts.fleet import is_here
from ..hosts.head import FleetHead, Launcher
from ..hosts.host_results import Host
from ..plan.estimate import PAID
from ..trust.errors import TrainfleetError
from ..watch.monitor import ENDS

STARTED = "TRAINFLEET_STARTED"  # when the command began, unix time (cli/)
CLOSES = 10.0  # seconds for a command on a host to end, before the interpreter exits
AGAIN = 30.0  # seconds until all hosts are tried again, if none could be appointed
# seconds between two tries at hosts that were down and have not admitted the appointed one
KNOCK_EVERY = 5.0


def kept(backend: Backend, lease: Lease) -> AbstractContextManager[object]:
    """Keeps another host on standby while this launcher leads on a fleet's head; does nothing
    elsewhere.
    """
    head = backend.head()
    return (
        Succession(head, lease)
        if head and head.leads and len(head.transport.hosts) > 1
        else nullcontext()
    )


class Succession:
    """Keeps one host standing by, in a separate thread, as long as the lease is held."""

    def __init__(self, fleet: Fleet, lease: Lease) -> None:
        self.fleet, self.lease = fleet, lease
        self.head = FleetHead(fleet.transport, fleet.config, fleet.interpreter, fleet.code)
        environment = {
            name: os.environ[name] for name in (STARTED, ENDS, PAID) if name in os.environ
        }
        words = (fleet.interpreter, "-m", "trainfleet", *sys.argv[1:])
        self.launcher = Launcher(words, environment, values_of(fleet.config.fleet.secrets))
        self.seen, self.silent = newest_standby(lease.folder), 0.0
        self.number = self.seen.number if self.seen else 0
        # The terminal that started this launcher has appointed a host; a launcher that a standby
        # started has that standby's host.
        self.until = time.monotonic() if SUCCEEDS in os.environ else time.monotonic() + TO_BEGIN
        self.shut: list[Host] = []  # the appointed host, and those that have not admitted it yet
        self.knocked = 0.0
        self.tried: Host | None = None
        self.said = ""  # why no host stands by
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._keep, name="succession", daemon=True)

    def __enter__(self) -> Succession:
        self.thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended.set()
        self.thread.join(CLOSES)

    def _keep(self) -> None:
        while not self.ended.wait(EVERY):
            self.look(newest_standby(self.lease.folder))
            try:
                if not self.lease.standby and time.monotonic() >= self.until:
                    self._appoint()
                elif self.shut and time.monotonic() >= self.knocked + KNOCK_EVERY:
                    self._open_doors()
            except (TrainfleetError, OSError) as error:
                self.until = time.monotonic() + AGAIN
                if str(error) != self.said and not self.ended.is_set():
                    print(f"no other host stands by yet: {error}", flush=True)
                self.said = str(error)

    def look(self, newest: Standby | None) -> None:
        """Finds the host that stands by, from its file's current content. Counts looks and compares
        no clocks, like lease.Vacancy.
        """
        if newest and newest != self.seen:
            self.seen, self.silent = newest, 0.0
            alive = newest.host != platform.node() and newest.number >= self.number
            if alive and not self.lease.standby:
                print(f"{newest.host} stands by", flush=True)
            self.lease.standby, self.until = (newest.host, 0.0) if alive else ("", self.until)
            return
        self.silent += EVERY
        if self.lease.standby and self.silent >= PATIENCE:
            print(
                f"{self.lease.standby}, which stood by, has been silent for {self.silent:.0f} s",
                flush=True,
            )
            self.lease.standby = ""

    def _appoint(self) -> None:
        """Makes the next able host stand by. Raises TrainfleetError if no host can, with the reason
        of the last one.
        """
        refused = TrainfleetError("the fleet has no other host")
        for host in self._candidates():
            if self.ended.is_set():
                return
            self.tried = host
            try:
                self.shut = [host, *self.fleet.transport.hosts]
                self._open_doors()
                self.number = max(self.number, self.seen.number if self.seen else 0) + 1
                self.head.appoint(host, self.launcher, self.number, self.lease.term - 1)
                self.until = time.monotonic() + TO_BEGIN
                return
            except TrainfleetError as error:
                refused = error
        raise refused

    def _candidates(self) -> list[Host]:
        """Returns the hosts that may lead, beginning after the last one tried; last comes the host
        with the silent launcher.
        """
        hosts = list(self.fleet.transport.hosts)
        first = hosts.index(self.tried) + 1 if self.tried in hosts else 0
        held = self.fleet.quarantine.held(hosts)
        before = self.lease.predecessor.host if self.lease.predecessor else ""
        fit = [
            host for host in hosts[first:] + hosts[:first] if host not in held and not is_here(host)
        ]
        return sorted(fit, key=lambda host: before in (host.name, self.fleet.name_of(host)))

    def _open_doors(self) -> None:
        """Makes every host admit the appointed one; hosts that do not answer now do so later."""
        appointed, *hosts = self.shut
        left = self.head.open_doors([appointed], hosts)
        self.shut, self.knocked = [appointed, *left] if left else [], time.monotonic()
