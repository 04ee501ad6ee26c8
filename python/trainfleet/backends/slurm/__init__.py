"""Slurm backend: each job is one sbatch job, in which srun starts one task per node.

Slurm decides when and where jobs run. This package runs in two places. A machine with sbatch, such
as a login node, plans, submits, follows and stops jobs, and its working directory must be visible
to all nodes. Any other machine forwards its commands to the machine with sbatch in fleet.hosts
(launch/remote_launch.py), just as the ssh backend forwards commands to its head.

A job continues without its launcher. Slurm requeues it after a node failure or preemption. The
batch script requeues it at the time limit, or after a failure that is worth a retry (sbatch.py).

Tested: a real four-node Slurm cluster (tests/fleet/slurmlab.py), with and without accounting. Not
tested: pyxis, apptainer, and nodes that are created on demand.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from ...cloud.prices import by_table
from ...cloud.template_inputs import cluster_name
from ...config import Config, Refusals
from ...hosts.fleet import Quarantine
from ...hosts.host_results import HostFailure
from ...hosts.install_steps import lock_name
from ...hosts.platform import load_platform
from ...node.entrypoint import CARD, CARDS, LOCK, PORTS
from ...node.placement import expand_hosts
from ...node.placements import SLURM as PLACEMENT
from ...plan.estimate import Bill
from ...plan.fabric_environment import fabric_environment
from ...plan.job import Job, Request
from ...process.install_paths import CODE, python_path
from ...run import run_folder
from ...run.run_folder import Run
from ...trust import untrusted_input
from ...trust.errors import BackendError
from .. import job_starts, supported_keys
from ..base import Backend, Can, Handle, Machines, Phase, Probe, Status
from ..head import HEAD, Head, hours_alone
from ..node_script import values_of
from ..run_storage import Place, Shared
from . import cluster_checks, cluster_file, resources, sbatch
from .client import (
    COMMENT,
    GIVEN,
    GONE,
    PHASES,
    TIMEOUT,
    Said,
    SlurmClient,
    SlurmJob,
    after_profile,
    as_asked,
    ask_here,
    how_it_ended,
    is_for_nodes,
    refused,
    why_waiting,
)
from .parallelcluster import Cluster
from .resources import Login, Partitions, as_slurm_says, folder_of

# seconds for all processes of a killed job to exit, including KillWait and the nodes' epilog
TO_END = 60.0
NAMED = 8  # maximum number of nodes to name per line
STARTS = {
    "CONFIGURING": "its nodes are starting",
    "SUSPENDED": "it is suspended; next: run scontrol resume",
}


class Slurm(Backend):
    """Backend for Slurm clusters (base.py)."""

    name, inherits = "slurm", GIVEN
    can = frozenset(
        {Can.SHARED, Can.LEAVE_OUT, Can.MACHINES, Can.RETRIES, Can.OUTLIVES, Can.IMAGE}
        | {Can.FOLLOWS, Can.QUEUES}
    )
    is_here, owned, tried_on, placement = False, True, "real Slurm", PLACEMENT
    pretended = MappingProxyType({Can.IMAGE: "no pyxis", Can.MACHINES: "fake pcluster"})

    def __init__(self, config: Config) -> None:
        self.config, self.fleet = config, config.fleet
        made = config.fleet.slurm.create is not None and shutil.which("sbatch") is None
        self.hands_over = HEAD not in os.environ and (bool(config.fleet.hosts) or made)
        self._head = Login(config) if self.hands_over else None
        self.folder = folder_of(config)
        self.quarantine = self._head.quarantine if self._head else Quarantine()
        self.engine = SlurmClient(self._ask_head if self.hands_over else ask_here)
        self._asked: set[str] = set()  # tokens of jobs that were asked to stop
        self._known: tuple[Config, list[str]] | None = None

    def head(self) -> Head | None:
        return self._head

    @property
    def lingers(self) -> bool:
        return self._head is None or bool(self._head.located.fleet.hosts)

    def learn(self, run: Run) -> None:
        self.quarantine.learn(run.read_events(), as_slurm_says)

    @property
    def interpreter(self) -> str:
        """Returns the path of the nodes' Python interpreter."""
        return self._head.interpreter if self._head else self.fleet.python or sys.executable

    def _ask_head(
        self, words: Sequence[str], stdin: str, environment: Mapping[str, str] | None
    ) -> Said:
        """Runs a Slurm command on the head."""
        head = self._head
        if head is None or not head.located.fleet.hosts:
            what = f"the cluster {cluster_name(self.config)} does not exist yet"
            raise BackendError(what, where="fleet.slurm.create", next="make setup")
        host = head.transport.hosts[0]
        command = f"bash -lc {shlex.quote(as_asked(words, shlex.join(words)))}"
        answer = head.transport.ask(host, command, stdin=stdin, timeout=TIMEOUT)
        if isinstance(answer, HostFailure):
            raise BackendError(
                answer.message,
                where=host.name,
                next=answer.next or "check fleet.hosts and fleet.ssh",
            )
        return Said(answer.exit_code, after_profile(answer.stdout), answer.stderr)

    @staticmethod
    def refuse(config: Config) -> Refusals:
        slurm, folder = config.fleet.slurm, config.fleet.shared_folder
        yield from supported_keys.refuse(config)
        yield from sbatch.refuse(config)
        if (
            slurm.time_limit_minutes is not None
            and slurm.warn_before_seconds >= 60 * slurm.time_limit_minutes
        ):
            yield (
                "fleet.slurm.warn_before_seconds",
                f"{slurm.warn_before_seconds} s: fleet.slurm.time_limit_minutes is only "
                f"{slurm.time_limit_minutes} min; set a lower value",
            )
        if folder is not None and not folder.startswith("/"):
            yield (
                "fleet.shared_folder",
                f"{folder!r}: Slurm jobs need a folder that all nodes share, e.g. /fsx/trainfleet",
            )
        if (slurm.container_runtime is None) != (config.fleet.container == "none"):
            works = (
                "pyxis or apptainer"
                if slurm.container_runtime is None
                else "null, or another fleet.container"
            )
            yield (
                "fleet.slurm.container_runtime",
                f"{slurm.container_runtime or 'null'}: fleet.container is "
                f"{config.fleet.container}; set {works}",
            )
        if config.fleet.hosts and folder is None:
            yield (
                "fleet.shared_folder",
                "null: set the folder for runs/ and data/ on the SSH host",
            )
        if slurm.create:
            yield from cluster_file.refuse(config)

    def plan(self, job: Job, without: Mapping[str, str]) -> Request:
        """Returns the batch script.

        Slurm selects the nodes, except for those in `without` or in quarantine.

        Raises:
            BackendError: the job is being launched, but the cluster can't run it. The message lists
                the cluster's partitions.
        """
        without = {
            entry.host: f"in quarantine: {entry.evidence}"
            for entry in self.quarantine.entries().values()
        } | dict(without)
        ground = sbatch.Ground(
            self.folder, "python" if job.image else self.interpreter, tuple(sorted(without))
        )
        code = f"{self._head.code}/python" if self._head else str(CODE)
        # the image contains the code, and checks at startup that it has these versions
        own = (
            {LOCK: lock_name(load_platform(self.fleet.platform))}
            if job.image
            else python_path(code)
        )
        environment = self._fabric(job) | own | dict(job.environment)
        config, notes = self._sited()
        script = sbatch.script(config, job, ground, environment, notes)
        if job.launch:
            cluster_checks.require(self.engine, config.fleet.slurm, job.nodes, script.text, without)
        return Request(job, (script,))

    def _sited(self) -> tuple[Config, list[str]]:
        """Returns the config with the site's sbatch settings, and a note about each environment
        variable that sets one.
        """
        config = cluster_file.in_every_zone(self.config)
        if self._known is None:
            # the launch's next query will fail too, and report the reason
            with suppress(BackendError):
                self._known = sbatch.with_site_options(config, sbatch.site_options(self.engine))
        return self._known or (
            config,
            ["the settings in sbatch's environment (SBATCH_ACCOUNT ...) are not known yet"],
        )

    def _fabric(self, job: Job) -> dict[str, str]:
        """Returns the fabric variables that are known before nodes are allocated.

        Each node adds its network interface and ports (node/entrypoint.py).
        """
        kind = self.fleet.node_type
        if not job.torchrun:
            return {}
        found = fabric_environment(
            kind, CARD, f"{PORTS}{kind.fabric}" if kind else "", alone=job.nodes == 1
        )
        there = {name: value for name, value in found.items() if CARD in value or PORTS in value}
        plain = {name: value for name, value in found.items() if name not in there}
        return plain | (
            {CARDS: " ".join(f"{name}={value}" for name, value in there.items())} if there else {}
        )

    def submit(self, request: Request) -> Handle:
        """Submits a job, at most once per token.

        If two processes submit a token concurrently, the second job to start finds the first one's
        claim file and exits.
        """
        job = request.job
        if number := self._number(job.folder, request.token):
            return self._handle(job.folder, number, request.token, job.nodes)
        claim = job_starts.claim(job.folder, request.token)
        if job.secrets:
            cluster_checks.require_private(self.engine)
        for file in (claim, run_folder.job_log(job.folder)):
            run_folder.make_folder(file.parent)
        environment = {
            **request.environment,
            **values_of(job.secrets),
            sbatch.TOKEN: request.token,
        }
        words = [
            "--parsable",
            f"--export={','.join(sorted({*self.inherits, *environment}))}",
            f"--comment={COMMENT} {request.token} {job.nodes} {job.folder} "
            f"{Path(self.folder, run_folder.RUNS, self.config.name)}",
        ]
        said = self.engine.sbatch(words, request.artifacts[0].text, environment)
        number = said.out.strip().partition(";")[0]
        if said.code or not untrusted_input.whole(number):
            raise cluster_checks.explained(self.engine, refused("sbatch", said.error or said.out))
        run_folder.write_atomic(claim, number + "\n")
        self.engine.expect(number)
        return self._handle(job.folder, number, request.token, job.nodes)

    def _number(self, folder: Path, token: str) -> str:
        """Returns a token's job ID from its claim file.

        Queries Slurm if the submitter died before writing the claim file.
        """
        if number := job_starts.number(folder, token):
            return number
        return next((job.id for job in self.engine.mine().values() if job.token == token), "")

    def _handle(self, folder: Path, number: str, token: str, nodes: int) -> Handle:
        return Handle(self.name, f"{folder}:{number}", token, nodes)

    def status(self, handle: Handle) -> Status:
        """Returns the job's status, based on Slurm's state and the nodes' exit codes.

        A failed node is reported immediately, even if other nodes are still shutting down.
        """
        if not self._is_known(handle):
            return Status(Phase.ENDED)
        folder, number = _place(handle)
        job, (start, exits) = self.engine.look(number), job_starts.exits(folder, number)
        phase = self._phase(job, handle)
        hosts = tuple(expand_hosts(job.nodes))
        if phase is Phase.QUEUED:
            return Status(phase, self._why_waiting(job), job.restarts + 1)
        if phase is Phase.ENDED:
            if job.state != GONE or start >= 0:
                exits = job_starts.ends(folder, number, start, handle.nodes) | exits
            words = self._with_leader(how_it_ended(job, start), job)
            return Status(phase, words, max(start, 0) + 1, exits, hosts=hosts, leaves=True)
        if start != job.restarts:
            exits = {}
        words = self._why_exiting(job, handle, exits)
        return Status(phase, words, job.restarts + 1, exits, hosts=hosts, leaves=True)

    def _phase(self, job: SlurmJob, handle: Handle) -> Phase:
        phase = PHASES.get(job.state, Phase.ENDED)
        is_asked = phase is Phase.RUNNING and handle.token in self._asked
        return Phase.STOPPING if is_asked else phase

    def _why_exiting(self, job: SlurmJob, handle: Handle, exits: Mapping[int, int]) -> str:
        """Returns why an active job is suspended, not ready yet, or cancelled, or "" if it isn't.

        If its nodes have exited, the next `look` queries Slurm, because the state is about to
        change.
        """
        failed = any(exits.values())
        if failed or len(exits) == handle.nodes:
            self.engine.wake()
        if words := STARTS.get(job.state):
            return words
        return job_starts.why_cancelled(*_place(handle), job.restarts) if failed else ""

    def _why_waiting(self, job: SlurmJob) -> str:
        words = self._with_leader(why_waiting(job.reason), job)
        nodes = (
            self.engine.unavailable(self._sited()[0].fleet.slurm.partition or "")
            if is_for_nodes(job.reason)
            else {}
        )
        return "; ".join(
            [words, *(f"{node} is {why}" for node, why in list(nodes.items())[:NAMED])]
        )

    def _with_leader(self, words: str, job: SlurmJob) -> str:
        """Appends the run and state of the job that this job depends on, if trainfleet submitted
        it.
        """
        number = (
            re.match(r"afterok:([0-9]{1,18})\b", job.dependency)
            if "Dependency" in job.reason
            else None
        )
        with suppress(BackendError):
            if number and (ours := (leader := self.engine.look(number[1])).ours):
                run = Path(ours[3]).name
                return (
                    f"{words}; job {leader.id} ({run}) is {leader.state}: run make logs RUN={run}"
                )
        return words

    def _is_known(self, handle: Handle) -> bool:
        """Returns whether the handle's job belongs to its token."""
        folder, number = _place(handle)
        if not number:
            return False
        if claimant := job_starts.number(folder, handle.token):
            return claimant == number
        job = self.engine.mine().get(number)
        return job is not None and job.token == handle.token

    def stop(self, handle: Handle, at_once: bool) -> None:
        """Sends SIGTERM to the nodes' entrypoints.

        With `at_once`, sends SIGKILL to the job's steps and cancels the job.
        """
        _, number = _place(handle)
        status = self.status(handle)
        self._asked.add(handle.token)
        if status.ended:
            return
        if status.phase is Phase.QUEUED:
            self._cancel(number)
        elif not at_once:
            self.engine.ask(["scancel", "--signal=TERM", number], "", None)
        else:
            self._end(handle, number)
        self.engine.wake()

    def _end(self, handle: Handle, number: str) -> None:
        said = self.engine.ask(
            ["squeue", "--noheader", "--steps", f"--jobs={number}", "--format=%i"], "", None
        )
        for step in re.findall(r"(?m)^[0-9]{1,18}\.[0-9]{1,18}$", said.out):
            self.engine.ask(["scancel", "--signal=KILL", step], "", None)
        self._cancel(number)
        deadline = time.monotonic() + TO_END
        while not self.status(handle).ended and time.monotonic() < deadline:
            time.sleep(0.2)
            self.engine.wake()

    def _cancel(self, number: str) -> None:
        said = self.engine.ask(["scancel", number], "", None)
        if said.code and not re.search(r"(?i)invalid job id|already complet", said.error):
            raise refused("scancel", said.error)

    def find(self, run: Run) -> Handle:
        """Returns the run's newest active job in Slurm."""
        where = str(Path(self.folder, run.folder))
        active = [job for job in self.engine.mine().values() if PHASES.get(job.state)]
        mine = [job for job in active if job.ours[4:] == [where]]
        if not mine:
            return Handle(self.name, "", "", 0)
        job = max(mine, key=lambda job: int(job.id))
        _, token, nodes, folder, _ = job.ours
        return self._handle(Path(folder), job.id, token, int(nodes))

    def place(self, run: Run) -> Place:
        """Returns the run folder if this machine shares the nodes' file system, otherwise a mirror
        of it.
        """
        if self._head:
            return self._head.place(run)
        return Shared(run, lambda: not self.status(self.find(run)).ended)

    def absent(self, hosts: Sequence[str]) -> Mapping[int, str]:
        if self.hands_over:
            return {}
        gone = cluster_checks.absent(self.engine, hosts)
        return {node: gone[host] for node, host in enumerate(hosts) if host in gone}

    def bill(self) -> Bill | None:
        """Returns the cost of a cluster that setup creates, or only the node hours on any other
        cluster.
        """
        if not self.fleet.slurm.create:
            return hours_alone(self.config)
        return cluster_file.costs(self.config, by_table()).bill(self.fleet.nodes)

    def machines(self) -> Machines:
        enter = self._head.enter if self._head else lambda: 0
        if self.fleet.slurm.create:
            return Cluster(self.config, enter)
        return Partitions(self.engine, enter)

    def probe(self) -> Probe | None:
        """Returns sinfo's report on the nodes, and the facts of one node.

        Returns None for clusters that setup creates, because their node types are known.
        """
        if self.fleet.slurm.create:
            return None
        lines, facts = resources.report(self.engine, self._sited()[0].fleet.slurm)
        return Probe(tuple(lines), {facts.hostname: facts} if facts else {})


def _place(handle: Handle) -> tuple[Path, str]:
    """Returns the job's folder and its number in Slurm."""
    folder, _, number = handle.id.rpartition(":")
    return Path(folder), number
