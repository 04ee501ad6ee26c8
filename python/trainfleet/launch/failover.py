"""Keeps a standby host that can take over from the launcher on a fleet's head.

The launcher checks the standby's heartbeat every second (standby.json in health/lease.py). If the
standby falls silent, or has taken over and now leads, the launcher appoints another host. Every
host may lead any number of times.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext

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

# Environment variable with the command's start time in unix seconds (cli/).
STARTED = "TRAINFLEET_STARTED"
CLOSES = 10.0  # maximum seconds to wait for a command on a host before the interpreter exits
AGAIN = 30.0  # seconds between rounds over all hosts if no host could be appointed
# Seconds between attempts to authorize the standby's key on hosts that were down.
KNOCK_EVERY = 5.0


def kept(backend: Backend, lease: Lease) -> AbstractContextManager[object]:
    """Keeps another host on standby while this launcher leads on a fleet's head. Does nothing
    elsewhere.
    """
    head = backend.head()
    return (
        Succession(head, lease)
        if head and head.leads and len(head.transport.hosts) > 1
        else nullcontext()
    )


class Succession:
    """Thread that keeps one host on standby while the lease is held."""

    def __init__(self, fleet: Fleet, lease: Lease) -> None:
        self.fleet = fleet
        self.lease = lease
        self.head = FleetHead(fleet.transport, fleet.config, fleet.interpreter, fleet.code)
        environment = {
            name: os.environ[name] for name in (STARTED, ENDS, PAID) if name in os.environ
        }
        words = (fleet.interpreter, "-m", "trainfleet", *sys.argv[1:])
        self.launcher = Launcher(words, environment, values_of(fleet.config.fleet.secrets))
        self.seen = newest_standby(lease.folder)
        self.silent = 0.0
        self.number = self.seen.number if self.seen else 0
        # The terminal that started this launcher has already appointed a standby, which needs time
        # to start. A launcher that was itself a standby appoints a new one at once.
        self.until = time.monotonic() if SUCCEEDS in os.environ else time.monotonic() + TO_BEGIN
        # appointed host, followed by the hosts that have not authorized its key yet
        self.shut: list[Host] = []
        self.knocked = 0.0
        self.tried: Host | None = None
        self.said = ""  # last printed reason why there is no standby
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._keep, name="succession", daemon=True)

    def __enter__(self) -> Succession:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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
                    print(f"no standby host yet: {error}")
                self.said = str(error)

    def look(self, newest: Standby | None) -> None:
        """Updates the standby's state from its heartbeat file. Counts polls instead of comparing
        clocks, as in lease.Vacancy.
        """
        if newest and newest != self.seen:
            self.seen = newest
            self.silent = 0.0
            alive = newest.host != platform.node() and newest.number >= self.number
            if alive and not self.lease.standby:
                print(f"{newest.host} is now the standby")
            self.lease.standby, self.until = (newest.host, 0.0) if alive else ("", self.until)
            return
        self.silent += EVERY
        if self.lease.standby and self.silent >= PATIENCE:
            print(f"the standby {self.lease.standby} has been silent for {self.silent:.0f} s")
            self.lease.standby = ""

    def _appoint(self) -> None:
        """Appoints the next suitable host as standby. Raises TrainfleetError with the last host's
        reason if every host fails.
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
        """Returns the hosts that may lead, starting after the last one tried. The previous
        launcher's host comes last.
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
        """Authorizes the appointed host's key on every host. Unresponsive hosts are retried
        later.
        """
        appointed, *hosts = self.shut
        left = self.head.open_doors([appointed], hosts)
        self.shut = [appointed, *left] if left else []
        self.knocked = time.monotonic()
