"""Hosts that you have: a torchrun agent on each, started over SSH and left alone there, meeting on the first.

Two places run this. On the machine where the command was typed it plans, and hands over to the head of the fleet (nodes/head.py).
On the head (TRAINFLEET_HEAD is set, the current folder is the shared one) it starts, watches and stops what runs on the nodes.

What is covered: the links, sshd, torchrun, kills and reboots are real in the tests (tests/drills). What is not: EFA and Lustre.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .. import lease, runs
from ..config import Config
from ..errors import BackendError
from ..nodes import facts as reading
from ..nodes import jobs, pace
from ..nodes.answers import Failure, Host, Result, Untrue, by_host, reason, untrue
from ..nodes.facts import Facts
from ..nodes.fleet import open_fleet, wanted_of
from ..nodes.quarantine import Quarantine
from ..nodes.tar import ROOT, code_files, content_hash
from ..plan.fabric import fabric_environment
from ..plan.job import Job
from ..plan.request import Command, Request
from ..seat import PORT, Seat, torchrun
from .base import Status

HEAD = "TRAINFLEET_HEAD"  # set for what runs on the head
PORTS = 200  # an attempt that follows another takes the next port: the one before may linger
START_TIMEOUT = 60.0
FENCE_TIMEOUT = 20.0


@dataclass
class Handle:
    """The nodes of a job that runs: host by node, what each said last and when, and the threads that ask."""

    hosts: tuple[Host, ...]
    name: str
    mark: str
    said: dict[Host, tuple[str, int]] = field(default_factory=dict)
    heard: dict[Host, float] = field(default_factory=dict)
    trouble: dict[Host, str] = field(default_factory=dict)
    closed: threading.Event = field(default_factory=threading.Event)


class Ssh:
    """The hosts of fleet.hosts, as a backend (base.py)."""

    name = "ssh"

    def __init__(self, config: Config) -> None:
        self.config, self.fleet = config, config.fleet
        self.shares_disk = HEAD in os.environ
        self.folder = config.fleet.shared_folder or ""
        self.transport = open_fleet(config)
        self.quarantine = Quarantine()
        self.facts: dict[Host, Facts] = {}
        self.port = config.fleet.port or PORT
        self.lost: set[Host] = set()

    @property
    def code(self) -> str:
        """The folder on the nodes with this very code."""
        return str(ROOT) if self.shares_disk else f"{self.folder}/code/{content_hash(code_files())}"

    def plan(self, job: Job) -> Request:
        """One command a host, on the first sound hosts; those in quarantine or out of reach are passed over.

        Raises:
            BackendError: fewer hosts are sound than there are to be nodes, with all that is wrong, by host; or a head can't carry
                so many.
        """
        pace.refuse(job.nodes)
        sound, unsound = self.survey(self.transport.hosts)
        if len(sound) < job.nodes:
            raise self._too_few(job.nodes, sound, unsound)
        return self._request(job, sound[: job.nodes])

    def survey(self, hosts: Iterable[Host]) -> tuple[list[Host], dict[Host, str]]:
        """The hosts that can take a job, in their order, and why the others can't. What is known of them is read once."""
        hosts = tuple(hosts)
        held = {host: f"in quarantine: {entry.evidence}" for host, entry in self.quarantine.held(hosts).items()}
        unread = [host for host in hosts if host not in held and host not in self.facts]
        answers = reading.read(self.transport, self.config, unread) if unread else {}
        self.facts |= {host: answer for host, answer in answers.items() if isinstance(answer, Facts)}
        unsound = held | {host: str(answer) for host, answer in answers.items() if isinstance(answer, Failure)}
        return [host for host in hosts if host not in unsound], unsound

    def secrets(self) -> dict[str, str]:
        """The values of fleet.secrets, from this process's environment, and their names for the supervisor, which masks them.

        Raises:
            BackendError: one is not set.
        """
        missing = [name for name in self.fleet.secrets if name not in os.environ]
        if missing:
            raise BackendError(f"{', '.join(missing)} is not set", where="fleet.secrets", next=f"export {missing[0]}=...")
        found = {name: os.environ[name] for name in self.fleet.secrets}
        return found | ({"TRAINFLEET_SECRETS": ",".join(found)} if found else {})

    def _request(self, job: Job, hosts: Sequence[Host]) -> Request:
        return Request(job, tuple(self._command(job, node, hosts) for node in range(job.nodes)))

    def _command(self, job: Job, node: int, hosts: Sequence[Host]) -> Command:
        host, facts, log = hosts[node], self.facts[hosts[node]], runs.node_log(job.folder, node)
        python = wanted_of(self.config).interpreter
        if job.torchrun:
            threads = str(max(1, facts.cores // job.ranks_per_node))
            environment = fabric_environment(self.fleet.instance_type, facts.card(host)) | {
                "OMP_NUM_THREADS": threads, lease.VARIABLE: str(lease.ORPHANED_AFTER)
            }  # fmt: skip
            seat = Seat(node, job.nodes, self.facts[hosts[0]].address(hosts[0]), self.port, address=facts.address(host))
            program = torchrun(seat, job.ranks_per_node, job.module, python, runs.scratch(log))
        else:
            environment = {"NODE_RANK": str(node), "NODES": str(job.nodes), "WORKERS": str(facts.cores)}
            program = (python, "-m", job.module)
        return Command(node, (*program, *job.arguments), environment | job.environment, log, host.name)

    def submit(self, request: Request) -> Handle:
        """Starts every node, after a fence: nothing of an earlier attempt is left on them. If one can't be started none runs."""
        handle = self._handle(request)
        refuse_other_runs(self, handle.hosts, handle.mark)
        self._fence(handle.mark, handle.hosts)
        orders = dict(zip(handle.hosts, request.commands, strict=True))
        starting = jobs.start(handle.name, handle.mark, wanted_of(self.config).interpreter, self.code, self.folder)

        def begin(host: Host) -> Result | Failure:
            command = orders[host]
            text = jobs.order(command.argv, command.environment | self.secrets(), str(command.log))
            return self.transport.ask(host, starting, stdin=text, timeout=START_TIMEOUT)

        answers = self.transport.each(begin, handle.hosts)
        failed = {host: why for host, answer in answers.items() if (why := reason(host, answer))}
        if failed:
            self._fence(handle.mark, [host for host in handle.hosts if host not in failed])
            raise BackendError(by_host("the job could not be started", failed), next="make doctor")
        for host in handle.hosts:
            handle.said[host], handle.heard[host] = ("running", 0), time.monotonic()
            threading.Thread(target=self._keep_looking, args=(handle, host), name=f"look-{host}", daemon=True).start()
        return handle

    def status(self, handle: Handle) -> Status:
        """What the nodes said last; one that has not answered for long is lost (nodes/pace.py)."""
        ended, lost, now = {}, {}, time.monotonic()
        for node, host in enumerate(handle.hosts):
            match handle.said[host]:
                case ("ended", code):
                    ended[node] = code
                case ("rebooted", _):
                    lost[node] = "it has rebooted"
                case ("absent", _):
                    ended[node] = 137
                case _ if now - handle.heard[host] > pace.lost_after(len(handle.hosts)):
                    lost[node] = f"no answer over SSH for {now - handle.heard[host]:.0f} s: {handle.trouble.get(host, 'silence')}"
        self.lost = {handle.hosts[node] for node in lost}
        return Status(len(ended) < len(handle.hosts), ended, lost)

    def ask_to_stop(self, handle: Handle) -> None:
        """SIGTERM to every node: its command finishes what must not be half done, then leaves."""
        self.transport.run(jobs.terminate(handle.name), timeout=FENCE_TIMEOUT, hosts=handle.hosts)

    def stop(self, handle: Handle) -> None:
        """Nothing of the job runs on any host that can be reached; ranks elsewhere end themselves when another attempt begins."""
        handle.closed.set()
        self._fence(handle.mark, [host for host in handle.hosts if host not in self.lost])

    def again(self, jobs_that_fit: Sequence[Job], broken: Mapping[str, str]) -> Request:
        """The first of the jobs for which there are sound hosts now; broken ones go to quarantine, lost ones are asked last.

        Raises:
            BackendError: too few hosts are there; all that is wrong, by host.
        """
        for host in self.transport.hosts:
            if host.name in broken and host not in self.quarantine.held([host]):
                self.quarantine.add(host, broken[host.name], "watchdog")
        self.port = self.fleet.port or PORT + (self.port - PORT + 1) % PORTS
        present = [host for host in self.transport.hosts if host not in self.lost]
        for candidates in (present, self.transport.hosts) if self.lost else (present,):
            sound, unsound = self._reachable(candidates)
            for job in jobs_that_fit:
                if job.nodes <= len(sound):
                    self.lost -= set(sound)
                    return self._request(job, sound[: job.nodes])
        raise self._too_few(min(job.nodes for job in jobs_that_fit), sound, unsound)

    def _reachable(self, hosts: Iterable[Host]) -> tuple[list[Host], dict[Host, str]]:
        """As `survey`, but every host is asked now."""
        sound, unsound = self.survey(hosts)
        failed = self.transport.run("true", timeout=8, hosts=sound).failed
        return [host for host in sound if host not in failed], unsound | {host: str(why) for host, why in failed.items()}

    def _handle(self, request: Request) -> Handle:
        hosts = {host.name: host for host in self.transport.hosts}
        name = f"{self.config.name}-{request.job.kind}"
        return Handle(
            tuple(hosts[command.host] for command in request.commands), name, jobs.mark_of(self.folder, self.config.name)
        )

    def _keep_looking(self, handle: Handle, host: Host) -> None:
        """Asks one host how its part is, until that has ended or nobody wants to know."""
        while not handle.closed.wait(pace.look_every(len(handle.hosts))):
            answer = self.transport.ask(host, jobs.look(handle.name), timeout=8)
            if failure := reason(host, answer):
                handle.trouble[host] = failure.message
                continue
            assert isinstance(answer, Result)
            try:
                said = jobs.read_look(answer.stdout)
            except Untrue as error:
                handle.trouble[host] = untrue(error, "how its part of the job is").message
                continue
            handle.said[host], handle.heard[host] = said, time.monotonic()
            if said[0] != "running":
                return

    def _fence(self, mark: str, hosts: Iterable[Host]) -> None:
        failed = self.transport.run(jobs.fence(mark), timeout=FENCE_TIMEOUT, hosts=tuple(hosts)).failed
        stuck = {host: failure for host, failure in failed.items() if failure.kind == "exit"}
        if stuck:
            what, remedy = "processes of this run can't be ended", "a process that waits for a dead disk ends with a reboot"
            raise BackendError(by_host(what, stuck), next=remedy)

    def _too_few(self, wanted: int, sound: Sequence[Host], unsound: Mapping[Host, str]) -> BackendError:
        what = f"{wanted} nodes are wanted, {len(sound)} of {len(sound) + len(unsound)} hosts can take a job"
        return BackendError(by_host(what, unsound), next=f"make doctor; or NODES={len(sound)}" if sound else "make doctor")


@functools.cache
def of(config: Config) -> Ssh:
    """The backend of a fleet, made once: it keeps its connections, and what it has read of the hosts."""
    return Ssh(config)


def refuse_other_runs(backend: Ssh, hosts: Iterable[Host], mark: str) -> None:
    """One run on a fleet at a time, unless fleet.exclusive is false.

    Raises:
        BackendError: another run has processes on one of these hosts.
    """
    if not backend.fleet.exclusive:
        return
    answers = backend.transport.run(jobs.marks(), timeout=FENCE_TIMEOUT, hosts=tuple(hosts))
    others = {host: ", ".join(sorted(set(answer.stdout.split()) - {mark})) for host, answer in answers.ok.items()}
    if busy := {host: names for host, names in others.items() if names}:
        raise BackendError(
            by_host("another run is at work on these hosts", busy),
            next="wait for it; or make stop SET='name=...'; or fleet.exclusive: false",
        )
