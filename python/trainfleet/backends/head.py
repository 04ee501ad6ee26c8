"""Hosts that are reached by SSH, and the head of a fleet: the first host, which launches commands
that were typed elsewhere.

This runs in two places. On the machine where a command is typed, the head is another machine, to
which launch/remote_launch.py hands the command. On the head itself (TRAINFLEET_HEAD is set, the
current folder is the shared one) it reaches the other hosts.
"""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Iterable

from ..config import Config
from ..hosts import facts as reading
from ..hosts import host_commands
from ..hosts.facts import Facts
from ..hosts.fleet import open_fleet, wanted_of
from ..hosts.host_results import Host, HostFailure, by_host
from ..hosts.node_checks import others_folder
from ..hosts.quarantine import Quarantine
from ..hosts.tar import code_files, content_hash
from ..hosts.transport import Transport
from ..plan.estimate import Bill, list_price
from ..process.install_paths import ROOT
from ..run.run_folder import Run
from ..trust.errors import BackendError
from .host_fleet import Hosts

HEAD = "TRAINFLEET_HEAD"  # set for processes on the head
PLAIN = "ssh"  # backend that uses such hosts as they are
FENCE_TIMEOUT = 20.0


class Head:
    """The hosts of fleet.hosts: the way to them, their facts, and which of them can take a job."""

    def __init__(self, config: Config) -> None:
        self.config, self.fleet = config, config.fleet
        self.hands_over = HEAD not in os.environ
        self.folder = config.fleet.shared_folder or ""
        self.quarantine = Quarantine()
        self.facts: dict[Host, Facts] = {}

    @property
    def located(self) -> Config:
        """Returns the config with the hosts that exist: here those that it names."""
        return self.config

    @property
    def by_agent(self) -> bool:
        """Tells whether SSH goes through an agent, as no port of the hosts is open."""
        return False

    @property
    def ends(self) -> float | None:
        """Returns the unix time at which all machines are reclaimed; None if they are not."""
        return None

    @property
    def leads(self) -> bool:
        """Tells whether this machine is a head that can be lost, with another host that stands
        by.
        """
        return not self.hands_over

    @functools.cached_property
    def transport(self) -> Transport:
        """Returns the transport to all hosts; it connects at its first use."""
        return open_fleet(self.located)

    def look_again(self) -> None:
        """Forgets the hosts and the way to them, which make setup has changed."""
        for name in ("located", "transport"):
            self.__dict__.pop(name, None)

    @property
    def code(self) -> str:
        """Returns the folder on the nodes with this exact code."""
        return (
            f"{self.folder}/code/{content_hash(code_files(self.fleet.backend))}"
            if self.hands_over
            else str(ROOT)
        )

    @property
    def interpreter(self) -> str:
        """Returns the nodes' Python."""
        return wanted_of(self.config).interpreter

    @property
    def mark(self) -> str:
        """Returns the mark of this run's processes on any node."""
        return host_commands.mark_of(self.folder, self.config.name)

    def place(self, run: Run) -> Hosts:
        """Returns a mirror of the run's folder, for a machine that does not share the hosts'
        disk.
        """
        return Hosts(self.transport, self.located, self.interpreter, self.code, run)

    def survey(
        self, hosts: Iterable[Host], again: bool = False
    ) -> tuple[list[Host], dict[Host, str]]:
        """Returns the hosts that can take a job, in their order, and why the others can't.

        Facts are read once. With `again`, known hosts are only asked whether they still answer and
        have the shared folder.
        """
        hosts = tuple(hosts)
        unsound = {
            host: f"in quarantine: {entry.evidence}"
            for host, entry in self.quarantine.held(hosts).items()
        }
        asked = (
            [host for host in hosts if host not in unsound and host in self.facts] if again else []
        )
        unread = [host for host in hosts if host not in unsound and host not in self.facts]
        answers = reading.read(self.transport, self.located, unread) if unread else {}
        self.facts |= {
            host: answer for host, answer in answers.items() if isinstance(answer, Facts)
        }
        unsound |= {
            host: str(answer) for host, answer in answers.items() if isinstance(answer, HostFailure)
        }
        file = f"{shlex.quote(self.folder)}/.token.$$"
        # a stale client cache may still show the folder, but can't write a file
        look = f": > {file} && rm -f {file}"
        unsound |= {
            host: str(why)
            for host, why in self.transport.run(look, timeout=8, hosts=asked).failed.items()
        }
        return [host for host in hosts if host not in unsound], unsound

    def known(self, name: str) -> Host | None:
        """Returns the host of this name, if the fleet has it."""
        return next((host for host in self.transport.hosts if host.name == name), None)

    def name_of(self, host: Host) -> str:
        """Returns a host's own name, if known."""
        return self.facts[host].hostname if host in self.facts else host.name

    def refuse_other_runs(self, hosts: Iterable[Host]) -> None:
        """Raises BackendError if another run has processes on one of these hosts, unless
        fleet.exclusive is false.
        """
        if not self.fleet.exclusive:
            return
        answers = self.transport.run(host_commands.marks(), timeout=FENCE_TIMEOUT, hosts=hosts)
        others = {
            host: ", ".join(sorted(host_commands.read_marks(answer.stdout, self.mark)))
            for host, answer in answers.ok.items()
        }
        if busy := {host: names for host, names in others.items() if names}:
            then = "wait for it; or make stop SET='name=...'; or set fleet.exclusive: false"
            raise BackendError(by_host("another run is running on these hosts", busy), next=then)

    def require_own_folder(self, hosts: Iterable[Host]) -> None:
        """Raises BackendError if fleet.shared_folder belongs to another user."""
        if found := others_folder(
            {host: self.facts[host] for host in hosts}, wanted_of(self.config)
        ):
            raise BackendError(found.message, where="fleet.shared_folder", next=found.next)


def hours_alone(config: Config) -> Bill | None:
    """Returns the bill for your own hosts: only their hours."""
    price = list_price(config)
    return None if price is None else Bill(price)
