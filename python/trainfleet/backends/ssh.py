"""SSH backend: starts a detached torchrun agent on each of the user's hosts, with the rendezvous on
the first host.

This module runs in two places. A user's machine plans a job and sends it to the fleet's head
(launch/remote_launch.py). The head, where TRAINFLEET_HEAD is set, starts, monitors and stops the
nodes' processes. Its working directory is the shared folder. Any machine that can reach the hosts
can query and stop a job with its handle.

Tested with real network links, sshd, torchrun, kills and reboots (tests/drills). Not tested: EFA
and Lustre.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from zlib import crc32

from ..config import Config, Refusals
from ..config.host_list import parse_hosts
from ..health import lease
from ..hosts import host_commands
from ..hosts.fleet import LOOK_EVERY, MOST_NODES, is_here, look_every, lost_after, wanted_of
from ..hosts.host_commands import RUNNING, PartState
from ..hosts.host_results import (
    Answers,
    Host,
    HostFailure,
    Implausible,
    Result,
    by_host,
    implausible,
    settled,
)
from ..hosts.install_steps import lock_name
from ..hosts.platform import load_platform
from ..hosts.preflight import fabric_of
from ..hosts.transport import Transport
from ..images.ecr import pull
from ..node.placement import PORT, Placement
from ..node.placements import FLEET as PLACEMENT
from ..plan.estimate import Bill
from ..plan.job import Artifact, Job, Request
from ..process.install_paths import python_path
from ..process.processes import ALONE
from ..run.run_folder import Run
from ..trust.errors import BackendError
from . import supported_keys
from .base import Backend, Can, Handle, Machines, Phase, Status
from .head import FENCE_TIMEOUT, Head, hours_alone
from .node_script import node_script, values_of
from .own_machines import OwnHosts
from .run_storage import OnHead, Place

# Number of ports to cycle through. Each attempt uses the next one, because the previous port may
# still be in use.
PORTS = 200
START_TIMEOUT = 60.0


@dataclass
class Looks:
    """Last known state of a job's nodes, with each host's last response, its time, and the last
    error.
    """

    hosts: tuple[Host, ...]
    said: dict[Host, PartState] = field(default_factory=dict)
    heard: dict[Host, float] = field(default_factory=dict)
    trouble: dict[Host, str] = field(default_factory=dict)
    closed: threading.Event = field(default_factory=threading.Event)
    asked: bool = False  # whether the job was asked to stop


class Ssh(Backend):
    """Backend for the hosts in fleet.hosts (base.py)."""

    name = "ssh"
    can = frozenset({Can.SHARED, Can.LEAVE_OUT, Can.EXAMINE, Can.OUTLIVES, Can.IMAGE})
    is_here, owned, tried_on = False, True, "real sshd"
    pretended = MappingProxyType({Can.IMAGE: "fake Docker"})
    placement = PLACEMENT

    def __init__(self, config: Config, head: Head | None = None) -> None:
        self.config, self.fleet = config, config.fleet
        self._head = head or Head(config)
        self.hands_over = self._head.hands_over
        self._looks: dict[str, Looks] = {}  # token → last known state

    def head(self) -> Head:
        return self._head

    def harm(self) -> Head:
        return self._head

    @property
    def lingers(self) -> bool:
        return not self.hands_over or bool(self._head.located.fleet.hosts)

    @property
    def transport(self) -> Transport:
        return self._head.transport

    @staticmethod
    def refuse(config: Config) -> Refusals:
        fleet = config.fleet
        yield from supported_keys.refuse(config)
        if not (fleet.shared_folder or "").startswith("/"):
            yield (
                "fleet.shared_folder",
                f"the {fleet.backend} backend needs a folder that all nodes share, e.g. "
                "/fsx/trainfleet",
            )
        if fleet.nodes > MOST_NODES:
            most = (
                f"{MOST_NODES} is the limit (most_nodes); for more, use slurm, batch or sagemaker"
            )
            yield "fleet.nodes", f"one head can't watch {fleet.nodes} nodes over SSH: {most}"
        try:
            hosts = parse_hosts(fleet.hosts)
        except ValueError:  # config validation already reports malformed hosts
            return
        # a fleet without hosts can be planned, but not launched (hosts/fleet.py)
        if 0 < len(hosts) < fleet.nodes:
            works = f"set NODES={len(hosts)}, or add hosts"
            yield (
                "fleet.nodes",
                (
                    f"{fleet.nodes} nodes need more than the {len(hosts)} hosts in fleet.hosts; "
                    f"{works}"
                ),
            )

    def plan(self, job: Job, without: Mapping[str, str]) -> Request:
        """Returns one script per node, for the first healthy hosts.

        Skips quarantined and unreachable hosts.

        Raises:
            BackendError: too few hosts are healthy. The message lists the problems by host.
        """
        hosts = self.transport.hosts
        sound, unsound = self._head.survey(
            [host for host in hosts if host.name not in without], job.attempt > 1
        )
        if len(sound) < job.nodes:
            left_out = {host: without[host.name] for host in hosts if host.name in without}
            what = (
                f"the job needs {job.nodes} nodes, but only {len(sound)} of "
                f"{len(left_out) + len(sound) + len(unsound)} hosts can take a job"
            )
            raise BackendError(
                by_host(what, left_out | unsound),
                next=f"run make doctor, or set NODES={len(sound)}" if sound else "make doctor",
            )
        chosen = sound[: job.nodes]
        scripts = tuple(self._script(job, node, chosen) for node in range(job.nodes))
        return Request(job, scripts, tuple(host.name for host in chosen))

    def _script(self, job: Job, node: int, hosts: Sequence[Host]) -> Artifact:
        head, host = self._head, hosts[node]
        facts, first = head.facts[host], head.facts[hosts[0]]
        port = job.port or PORT + (self._first_port + job.attempt - 1) % PORTS
        placement = Placement(
            node, job.nodes, first.address(hosts[0]), port, address=facts.address(host)
        )
        if job.torchrun:
            own = fabric_of(wanted_of(self.config), facts, host, job.nodes) | {
                "OMP_NUM_THREADS": str(max(1, facts.cores // job.ranks_per_node)),
                lease.VARIABLE: str(lease.ORPHANED_AFTER),
            }
        else:
            own = {"WORKERS": str(facts.cores)}
        own |= {ALONE: "1"} if self.fleet.exclusive else {}
        environment = (
            own
            | self.extras(job)
            | python_path(f"{head.code}/python")
            | placement.environment()
            | dict(job.environment)
        )
        return node_script(
            job,
            placement,
            head.folder,
            head.interpreter,
            environment,
            host.name,
            self.fleet.platform,
        )

    def extras(self, job: Job) -> dict[str, str]:
        """Returns extra environment variables for the job's nodes."""
        return {}

    def submit(self, request: Request) -> Handle:
        """Kills all processes of earlier attempts and starts every node.

        If a node fails to start, kills the others.
        """
        handle = Handle(
            self.name,
            f"{self.config.name}-{request.job.kind}",
            request.token,
            request.job.nodes,
            request.hosts,
        )
        secrets, hosts = values_of(request.job.secrets), self._hosts(handle)
        look = host_commands.look(handle.id, handle.token)
        said = self.transport.run(look, timeout=FENCE_TIMEOUT, hosts=hosts).ok
        if len(said) == len(hosts) and not any(
            answer.stdout.startswith("absent") for answer in said.values()
        ):
            return handle
        if image := request.job.image:
            lock = lock_name(load_platform(self.fleet.platform))
            pull(self.transport, hosts, image, lock)
        self._head.refuse_other_runs(hosts)
        self._fence(hosts)
        environment = {**request.environment, **secrets}
        self._start(handle, [artifact.text for artifact in request.artifacts], environment)
        now = time.monotonic()
        looks = Looks(hosts, dict.fromkeys(hosts, RUNNING), dict.fromkeys(hosts, now))
        self._look_after(handle, looks)
        return handle

    def _start(
        self, handle: Handle, scripts: Iterable[str], environment: Mapping[str, str]
    ) -> None:
        """Starts every node, or none."""
        head, hosts = self._head, self._hosts(handle)
        starting = host_commands.start(
            handle.id, head.mark, head.interpreter, head.code, head.folder
        )
        orders = {
            host: host_commands.task(script, environment, handle.token)
            for host, script in zip(hosts, scripts, strict=True)
        }
        answers = self.transport.each(
            lambda host: self.transport.ask(
                host, starting, stdin=orders[host], timeout=START_TIMEOUT
            ),
            hosts,
        )
        if failed := Answers(answers).failed:
            self._fence([host for host in hosts if host not in failed])
            raise BackendError(by_host("the job could not be started", failed), next="make doctor")

    def status(self, handle: Handle) -> Status:
        """Returns the status based on the nodes' latest responses.

        A node counts as lost after `lost_after` seconds of silence (hosts/fleet.py). A job's first
        call waits for responses.
        """
        looks = self._looks.get(handle.token) or self._look_first(handle)
        exits, lost, unheard, words, now = {}, {}, set[int](), "", time.monotonic()
        for node, host in enumerate(looks.hosts):
            match looks.said.get(host):
                case PartState("ended" | "absent", code, said):
                    exits[node], words = code, words or (f"{host}: {said}" if said else "")
                case PartState("rebooted"):
                    lost[node] = "it rebooted"
                case _ if (silent := now - looks.heard.get(host, 0.0)) > lost_after(
                    len(looks.hosts)
                ):
                    unheard.add(node)
                    lost[node] = (
                        "no answer over SSH: "
                        f"{looks.trouble.get(host, f'silent for {silent:.0f} s')}"
                    )
        phase = (
            Phase.ENDED
            if len(exits) == len(looks.hosts)
            else Phase.STOPPING
            if looks.asked
            else Phase.RUNNING
        )
        hosts = tuple(host.name for host in looks.hosts)
        return Status(phase, words, exits=exits, lost=lost, silent=frozenset(unheard), hosts=hosts)

    def stop(self, handle: Handle, at_once: bool) -> None:
        """Stops the nodes.

        Ranks on unreachable hosts continue until they notice that a new attempt has begun.
        """
        hosts, looks = self._hosts(handle), self._looks.get(handle.token)
        if looks:
            looks.asked = True
        if not at_once:
            self.transport.run(
                host_commands.terminate(handle.id), timeout=FENCE_TIMEOUT, hosts=hosts
            )
            return
        lost = self.status(handle).lost if looks else {}
        if looks := self._looks.pop(handle.token, None):
            looks.closed.set()
        self._fence([host for node, host in enumerate(hosts) if node not in lost])

    def find(self, run: Run) -> Handle:
        """Returns a handle for all of the run's processes, identified by the run's mark on every
        host.
        """
        return Handle(
            self.name,
            f"{run.name}-train",
            "",
            len(self.transport.hosts),
            tuple(map(str, self.transport.hosts)),
        )

    def cut_off(self, handle: Handle) -> str:
        """Returns this machine's host name if no other host of the job responds, otherwise "".

        Waits until the result is certain.
        """
        here = next((host for host in self.transport.hosts if is_here(host)), None)
        looks, began = self._looks.get(handle.token), time.monotonic()
        if not (self._head.leads and here and looks and set(looks.hosts) - {here}):
            return ""
        others = [host for host in looks.hosts if host != here]
        while not self._is_heard(looks, others, began):
            heard = max(looks.heard.get(host, 0.0) for host in others)
            if time.monotonic() - heard > lost_after(len(looks.hosts)):
                rest = [host for host in self.transport.hosts if host != here]
                return "" if self._any_answers(rest) else here.name
            time.sleep(LOOK_EVERY / 4)
        return ""

    def _is_heard(self, looks: Looks, hosts: Sequence[Host], began: float) -> bool:
        """Returns whether one of these hosts has responded since shortly before `began`.

        Queries those whose part of the job has ended, because they are no longer polled.
        """
        since = began - 2 * look_every(len(looks.hosts))
        if max(looks.heard.get(host, 0.0) for host in hosts) > since:
            return True
        ended = [host for host in hosts if looks.said.get(host, RUNNING) != RUNNING]
        return bool(ended) and self._any_answers(ended)

    def _any_answers(self, hosts: Sequence[Host]) -> bool:
        return bool(self.transport.run("true", timeout=8, hosts=hosts).ok)

    def place(self, run: Run) -> Place:
        """Returns the run folder on the head, or a mirror of it on any other machine."""
        return self._head.place(run) if self.hands_over else OnHead(run)

    def learn(self, run: Run) -> None:
        """Records the host problems that a run found.

        Only the user's machine does this, because it plans the next launch.
        """
        if self.hands_over:
            self._head.quarantine.learn(run.read_events(), self._head.known)

    def bill(self) -> Bill | None:
        return hours_alone(self.config)

    def machines(self) -> Machines:
        return OwnHosts(self.config)

    @property
    def _first_port(self) -> int:
        """Returns the run's port offset, which depends on the run name if runs can share hosts."""
        return 0 if self.fleet.exclusive else crc32(self._head.mark.encode())

    def _hosts(self, handle: Handle) -> tuple[Host, ...]:
        named = {host.name: host for host in self.transport.hosts}
        return tuple(named[name] for name in handle.hosts if name in named)

    def _look_first(self, handle: Handle) -> Looks:
        """Starts polling a job that another process submitted.

        Hosts count as lost until they respond.
        """
        looks = Looks(self._hosts(handle))
        for host, answer in self.transport.run(
            self._question(handle), timeout=8, hosts=looks.hosts
        ).items():
            self._hear(looks, host, settled(answer))
        if handle.token:  # jobs from `find` have no token, so each call queries them
            self._look_after(handle, looks)
        return looks

    def _question(self, handle: Handle) -> str:
        """Returns the command that prints the state of a host's part of the job.

        For a job from `find`, it prints whether the host has any process of the run.
        """
        if handle.token:
            return host_commands.look(handle.id, handle.token)
        return host_commands.look_for(self._head.mark)

    def _look_after(self, handle: Handle, looks: Looks) -> None:
        """Starts one polling thread per host."""
        self._looks[handle.token] = looks
        for host in looks.hosts:
            threading.Thread(
                target=self._keep_looking,
                args=(handle, looks, host),
                name=f"look-{host}",
                daemon=True,
            ).start()

    def _keep_looking(self, handle: Handle, looks: Looks, host: Host) -> None:
        """Polls one host until its part of the job ends, or until polling is stopped."""
        pause = look_every(len(looks.hosts))
        while looks.said.get(host, RUNNING) == RUNNING and not looks.closed.wait(pause):
            self._hear(
                looks, host, settled(self.transport.ask(host, self._question(handle), timeout=8))
            )

    def _hear(self, looks: Looks, host: Host, answer: Result | HostFailure) -> None:
        if isinstance(answer, HostFailure):
            looks.trouble[host] = answer.message
            return
        try:
            looks.said[host], looks.heard[host] = (
                host_commands.read_look(answer.stdout),
                time.monotonic(),
            )
        except Implausible as error:
            looks.trouble[host] = implausible(error, "the state of its node process").message

    def _fence(self, hosts: Iterable[Host]) -> None:
        # on the head, spare the launchers, because this process is one of them
        fence = host_commands.fence(self._head.mark, launchers=self.hands_over)
        failed = self.transport.run(fence, timeout=FENCE_TIMEOUT, hosts=hosts).failed
        stuck = {host: failure for host, failure in failed.items() if failure.kind == "exit"}
        if stuck:
            raise BackendError(
                by_host("could not kill the processes of this run", stuck),
                next="reboot the host if a process is stuck on a dead disk",
            )
