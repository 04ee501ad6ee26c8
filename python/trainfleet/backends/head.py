"""A fleet's SSH hosts, and its head: the first host, which runs commands typed on other machines.

This module runs in two places. On a user's machine, launch/remote_launch.py forwards commands to
the head. On the head, where TRAINFLEET_HEAD is set, it connects to the other hosts, and the working
directory is the shared folder.

`Hosts` is the Place of a run for machines that can't access the fleet's disk.
"""

from __future__ import annotations

import functools
import os
import secrets
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from shlex import quote

from ..config import Config, platforms
from ..health.lease import (
    FILE,
    GLANCE,
    Holder,
    Launching,
    Standby,
    is_held,
    launching_text,
    newest_holder,
    newest_standby,
    parse_launching,
)
from ..hosts import facts as reading
from ..hosts import head, host_commands
from ..hosts.facts import Facts
from ..hosts.fleet import Quarantine, open_fleet, wanted_of
from ..hosts.head import FleetHead
from ..hosts.host_results import (
    Host,
    HostFailure,
    Implausible,
    by_host,
    implausible,
    reason,
    settled,
)
from ..hosts.mirror import Mirror, fetch
from ..hosts.node_checks import others_folder
from ..hosts.preflight import send_code
from ..hosts.tar import Sink, code_files, content_hash, printer
from ..hosts.transport import Transport
from ..plan.estimate import Bill, list_price
from ..process.install_paths import ROOT
from ..run.claims import ROOM
from ..run.run_folder import Run
from ..trust.errors import BackendError
from .run_storage import Place

# timeout in seconds for launch queries, and number of hosts to try
NOTICE = 20.0
FEW = 4
REMOVAL = 600.0  # timeout in seconds; long, because checkpoints consist of many large files
LARGEST = 1 << 20  # maximum config size in bytes
# shell scripts that read and write the launch record in head.json (health/lease.py)
LOOK = f"""cd -- {{folder}} 2> /dev/null || exit 0
[ -e stop ] && ! grep -qs ^engine: stop && echo asked || echo -
cat {FILE} 2> /dev/null || true"""
SHOW = f"""mkdir -p -- {{folder}} && cd -- {{folder}} && {{obey}} || exit
[ -s {FILE} ] || printf '%{ROOM}s' '' > {FILE}
dd of={FILE} bs={ROOM} seek=1 conv=notrunc 2> /dev/null || exit
grep -q '{{{{' {FILE} || rm -f {FILE}
rmdir -- {{folder}} 2> /dev/null || true"""
HANDED = ".handed-"  # name prefix of temporary export folders


def _sweep(made: str) -> str:
    """Returns a command that removes an export after its download.

    Also removes exports older than a day, which interrupted downloads left behind.
    """
    parent = quote(made.rpartition("/")[0])
    old = f"find {parent} -mindepth 1 -maxdepth 1 -name '{HANDED}*' -mmin +1440 -exec rm -rf {{}} +"
    return f"rm -rf -- {quote(made)}; {old}"


class Hosts(Place):
    """Place of a fleet's run, for machines without access to the fleet's disk.

    Mirrors the run's small files from any reachable host.
    """

    words, pace, lag = " on the fleet", 1.0, 0.0

    def __init__(
        self, transport: Transport, config: Config, python: str, code: str, run: Run
    ) -> None:
        self.transport, self.config, self.run = transport, config, run
        self.folder = config.fleet.shared_folder or ""
        self.head = FleetHead(transport, config, python, code)
        self.mirror = Mirror(transport, self.folder, run.folder)
        self.now = 0.0  # time of the last refresh, on the fleet's clock
        self.entry: Host | None = None  # host that responded last
        # stale heartbeats, which did not change while `is_running` waited
        self.silent: tuple[Holder | None, Standby | None] = (None, None)

    def __exit__(self, *error: object) -> None:
        self.transport.close()

    def refresh(self) -> None:
        failures: dict[Host, HostFailure] = {}
        for host in [*([self.entry] if self.entry else []), *self.transport.hosts]:
            answer = self.mirror.refresh(host)
            if isinstance(answer, float):
                self.now, self.entry = answer, host
                return
            failures[host] = answer
            if answer.kind == "exit":
                self.entry = host
                break  # the host responds but lacks the run folder, so the others lack it too
        if any(failure.kind == "exit" for failure in failures.values()):
            return
        raise BackendError(by_host("no host of the fleet answers", failures), next="make doctor")

    def read(self, name: str) -> str:
        """Returns the text of a file in the fleet's run folder, or "" if it does not exist."""
        path = quote(f"{self.folder}/runs/{self.run.name}/{name}")
        return self._at_the_door(f"[ ! -f {path} ] || head -c {LARGEST} {path}")

    def is_running(self) -> bool:
        """Returns whether a launcher leads the run, or a standby is about to.

        Returns immediately if the lease is fresh by the fleet's clock. Otherwise, waits up to
        GLANCE seconds for a renewal.
        """
        found = self._beats()
        if is_held(found[0], self.now):
            return True
        if found[0] is None or found[0].code is not None or found == self.silent:
            return False
        until = time.monotonic() + GLANCE
        while time.monotonic() < until:
            time.sleep(self.pace)
            self.refresh()
            if (newest := self._beats()) != found:
                return newest[0] is not None and newest[0].code is None
        self.silent = found
        return False

    def _beats(self) -> tuple[Holder | None, Standby | None]:
        return newest_holder(self.run.folder), newest_standby(self.run.folder)

    def launching(self) -> Launching | None:
        said = self._said(LOOK)
        asked, _, text = said.partition("\n")
        found = parse_launching(text)
        return replace(found, asked=asked == "asked") if found else None

    def show(self, launching: Launching | None, obeyed: bool = False) -> None:
        """Writes or clears the launch record on the fleet.

        Does nothing if no host responds or the shared folder is read-only, because the launch
        reports these errors for each host.
        """
        self._said(SHOW, launching_text(launching), "rm -f stop" if obeyed else ":")

    def _said(self, script: str, stdin: str = "", obey: str = "") -> str:
        """Runs a script that reads or writes the launch record, and returns its output.

        Returns "" if the host does not respond, so that the next call selects another host.
        """
        command = script.format(folder=quote(f"{self.folder}/runs/{self.run.name}"), obey=obey)
        answer = settled(self.transport.ask(self._first(), command, stdin=stdin, timeout=NOTICE))
        if isinstance(answer, HostFailure):
            self.entry = None
            return ""
        return answer.stdout

    def _first(self) -> Host:
        """Returns the last host that responded.

        If it is unknown, tries the first FEW hosts, and defaults to the first.
        """
        if self.entry is None:
            few = self.transport.hosts[:FEW]
            self.entry = next(iter(self.transport.run("true", timeout=NOTICE, hosts=few).ok), None)
        return self.entry or self.transport.hosts[0]

    def ask_to_stop(self) -> None:
        self.head.ask_to_stop(self.entry or self.transport.hosts[0])

    def folders(self) -> dict[str, int]:
        folders = [f"runs/{self.run.name}", f"data/{self.config.data.name}"]
        found = self._at_the_door(host_commands.measure(self.folder, folders))
        try:
            return {
                f"{self.folder}/{folder}": count
                for folder, count in host_commands.read_measures(found, folders).items()
            }
        except Implausible as error:
            where = (self.entry or self.transport.hosts[0]).name
            raise BackendError(str(implausible(error, "du output")), where=where) from error

    def remove(self, folders: Iterable[str]) -> list[str]:
        names = [folder.removeprefix(f"{self.folder}/") for folder in folders]
        left = self._at_the_door(host_commands.remove(self.folder, names)) if names else ""
        try:
            return [f"{self.folder}/{path}" for path in host_commands.read_left(left, names)]
        except Implausible as error:
            where = (self.entry or self.transport.hosts[0]).name
            raise BackendError(str(implausible(error, "find output")), where=where) from error

    def forward(self, verb: str, config: Config, variables: dict[str, str]) -> int | None:
        """Runs the verb in the shared folder on the first host that responds.

        After an export, downloads the model.
        """
        host = self._answering()
        if verb != "export":
            return self._send(host, verb, config, variables, printer(sys.stdout))
        out = Path(variables["OUT"])
        made = f"runs/{self.run.name}/huggingface/{HANDED}{secrets.token_hex(8)}"
        try:
            print(f"exporting on {host.name}")
            if code := self._send(host, verb, config, variables | {"OUT": made}, lambda said: None):
                return code
            files = fetch(self.transport, host, f"{self.folder}/{made}", out)
        finally:
            self.transport.ask(host, _sweep(f"{self.folder}/{made}"), timeout=REMOVAL)
        print(f"{out}: {', '.join(files)}, {sum(files.values()) / 1e6:,.1f} MB from {host.name}")
        print(f"next: {platforms.loading(variables.get('FORMAT') or platforms.HUGGINGFACE, out)}")
        return 0

    def _send(
        self, host: Host, verb: str, config: Config, variables: dict[str, str], out: Sink
    ) -> int:
        """Runs the verb on a host, forwards its stderr, and returns its exit code."""
        code = send_code(self.transport, self.config.fleet, [host])
        command = head.verb_command(self.head.python, code, self.folder)
        order = head.encode_verb(verb, config, variables)
        ended = self.transport.stream(host, command, stdin=order, out=out, err=printer(sys.stderr))
        if isinstance(ended, HostFailure):
            raise BackendError(str(ended), where=host.name, next=f"run make {verb} again")
        return ended

    def _answering(self) -> Host:
        """Returns the first host that responds. Raises BackendError if none respond."""
        failures: dict[Host, HostFailure] = {}
        for host in self.transport.hosts:
            if not (failure := reason(self.transport.ask(host, "true", timeout=20))):
                return host
            failures[host] = failure
        raise BackendError(by_host("no host of the fleet answers", failures), next="make doctor")

    def _at_the_door(self, command: str) -> str:
        """Runs a command on the host that responded last and returns its output."""
        host = self.entry or self.transport.hosts[0]
        answer = settled(self.transport.ask(host, command, timeout=REMOVAL))
        if isinstance(answer, HostFailure):
            raise BackendError(str(answer), where=host.name, next="run make clean again")
        return answer.stdout


HEAD = "TRAINFLEET_HEAD"  # environment variable that marks processes on the head
PLAIN = "ssh"  # name of the backend that uses existing hosts unchanged
FENCE_TIMEOUT = 20.0


class Head:
    """Hosts in fleet.hosts, with their connections and facts.

    Determines which hosts can run a job.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.fleet = config, config.fleet
        self.hands_over = HEAD not in os.environ
        self.folder = config.fleet.shared_folder or ""
        self.quarantine = Quarantine()
        self.facts: dict[Host, Facts] = {}

    @property
    def located(self) -> Config:
        """Config with the hosts that currently exist, by default the configured ones."""
        return self.config

    @property
    def by_agent(self) -> bool:
        """Returns whether SSH connections use the SSM agent, because the hosts open no ports."""
        return False

    @property
    def ends(self) -> float | None:
        """Unix time at which all machines are reclaimed, or None if they never are."""
        return None

    @property
    def leads(self) -> bool:
        """Returns whether this machine is a head that a standby can replace."""
        return not self.hands_over

    @functools.cached_property
    def transport(self) -> Transport:
        """Transport to all hosts, which connects on first use."""
        return open_fleet(self.located)

    def look_again(self) -> None:
        """Drops the cached hosts and connections.

        Must be called after `make setup` has changed the hosts.
        """
        for name in ("located", "transport"):
            self.__dict__.pop(name, None)

    @property
    def code(self) -> str:
        """Folder on the nodes that contains this exact version of the code."""
        if self.hands_over:
            return f"{self.folder}/code/{content_hash(code_files(self.fleet.backend))}"
        return str(ROOT)

    @property
    def interpreter(self) -> str:
        """Path of the nodes' Python interpreter."""
        return wanted_of(self.config).interpreter

    @property
    def mark(self) -> str:
        """Mark that identifies this run's processes on every node."""
        return host_commands.mark_of(self.folder, self.config.name)

    def place(self, run: Run) -> Hosts:
        """Returns the run's Place for a machine without access to the hosts' disk."""
        return Hosts(self.transport, self.located, self.interpreter, self.code, run)

    def survey(
        self, hosts: Iterable[Host], again: bool = False
    ) -> tuple[list[Host], dict[Host, str]]:
        """Returns the hosts that can run a job, in order, and why each other host can't.

        Facts are read once per host. With `again`, hosts with known facts are only checked for
        responsiveness and a writable shared folder.
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
        file = f"{quote(self.folder)}/.token.$$"
        # write a file, because a stale client cache can still list a deleted folder
        look = f": > {file} && rm -f {file}"
        unsound |= {
            host: str(why)
            for host, why in self.transport.run(look, timeout=8, hosts=asked).failed.items()
        }
        return [host for host in hosts if host not in unsound], unsound

    def known(self, name: str) -> Host | None:
        """Returns the fleet's host with this name, or None."""
        return next((host for host in self.transport.hosts if host.name == name), None)

    def name_of(self, host: Host) -> str:
        """Returns the hostname that the host reports, or its configured name if its facts are
        unknown.
        """
        return self.facts[host].hostname if host in self.facts else host.name

    def refuse_other_runs(self, hosts: Iterable[Host]) -> None:
        """Raises BackendError if another run has processes on these hosts.

        Does nothing if fleet.exclusive is false.
        """
        if not self.fleet.exclusive:
            return
        answers = self.transport.run(host_commands.marks(), timeout=FENCE_TIMEOUT, hosts=hosts)
        others = {
            host: ", ".join(sorted(host_commands.read_marks(answer.stdout, self.mark)))
            for host, answer in answers.ok.items()
        }
        if busy := {host: names for host, names in others.items() if names}:
            raise BackendError(
                by_host("another run is using these hosts", busy),
                next="wait for it, run make stop SET='name=...', or set fleet.exclusive: false",
            )

    def require_own_folder(self, hosts: Iterable[Host]) -> None:
        """Raises BackendError if fleet.shared_folder belongs to another user."""
        if found := others_folder(
            {host: self.facts[host] for host in hosts}, wanted_of(self.config)
        ):
            raise BackendError(found.message, where="fleet.shared_folder", next=found.next)


def hours_alone(config: Config) -> Bill | None:
    """Returns the bill for the user's own hosts, based only on their hourly price.

    Returns None if no price is configured.
    """
    price = list_price(config)
    return None if price is None else Bill(price)
