"""This machine plays every node: N torchrun agents that meet on 127.0.0.1, each a node with its own log.

What is covered: all of it runs for real, in the tests too. The host's name is never used (it need not resolve), and every process
dies with the launcher, however the launcher dies.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from .. import hardware, runs
from ..config import Config
from ..errors import BackendError
from ..plan.job import Job
from ..plan.request import Command, Request
from ..processes import die_with_parent, signal_group
from ..seat import LOOPBACK as ADDRESS
from ..seat import Seat, torchrun
from .base import Status

KILL_GRACE = 5.0  # seconds that SIGKILLed processes get to be gone


@dataclass(frozen=True)
class Handle:
    """The supervisors of the nodes, in node order."""

    nodes: tuple[subprocess.Popen[bytes], ...]


class Local:
    """This machine, as a backend (base.py)."""

    name = "local"
    shares_disk = True

    def __init__(self, config: Config | None = None) -> None:
        """Needs nothing of the config: this machine is what it is."""

    def plan(self, job: Job) -> Request:
        """One command a node.

        Raises:
            BackendError: the port that the config asks for is taken, or there are fewer accelerators than nodes.
        """
        port = (_check_port(job.port) if job.port else _free_port()) if job.torchrun else 0
        return Request(job, tuple(self._command(job, node, port) for node in range(job.nodes)))

    def _command(self, job: Job, node: int, port: int) -> Command:
        cores, log = max(1, hardware.local_cores() // job.nodes), runs.node_log(job.folder, node)
        if job.torchrun:
            environment = {"OMP_NUM_THREADS": str(max(1, cores // job.ranks_per_node)), "GLOO_SOCKET_IFNAME": _loopback()}
            seat = Seat(node, job.nodes, ADDRESS, port, address=ADDRESS)
            program = torchrun(seat, job.ranks_per_node, job.module, sys.executable, runs.scratch(log))
        else:
            environment = {"NODE_RANK": str(node), "NODES": str(job.nodes), "WORKERS": str(cores)}
            program = (sys.executable, "-m", job.module)
        argv = (sys.executable, "-m", "trainfleet.supervisor", str(log), "--", *program, *job.arguments)
        return Command(node, argv, environment | job.environment | _accelerators(job, node), log)

    def again(self, jobs: Sequence[Job], broken: Mapping[str, str]) -> Request:
        """The same on another port: this machine has no other nodes."""
        return self.plan(jobs[0])

    def submit(self, request: Request) -> Handle:
        """Starts every node; if one can't be started, those that were are stopped."""
        started: list[subprocess.Popen[bytes]] = []
        for command in request.commands:
            try:
                command.log.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                self.stop(Handle(tuple(started)))
                raise runs.unwritable(command.log.parent, error) from error
            try:
                started.append(
                    subprocess.Popen(command.argv, env=os.environ | command.environment, stdin=subprocess.DEVNULL,
                                     start_new_session=True, preexec_fn=die_with_parent)
                )  # fmt: skip
            except OSError as error:
                self.stop(Handle(tuple(started)))
                raise BackendError(
                    "the node could not be started", where=f"node {command.node}", why=str(error), next="df -h . ; ulimit -a"
                ) from error
        return Handle(tuple(started))

    def status(self, handle: Handle) -> Status:
        codes = {node: code for node, process in enumerate(handle.nodes) if (code := process.poll()) is not None}
        return Status(len(codes) < len(handle.nodes), codes)

    def ask_to_stop(self, handle: Handle) -> None:
        """SIGTERM to every node: its command finishes what must not be half done, then leaves."""
        for process in handle.nodes:
            signal_group(process.pid, signal.SIGTERM)

    def stop(self, handle: Handle) -> None:
        """Nothing of the job runs when this returns: a supervisor's death takes its command along."""
        for process in handle.nodes:
            signal_group(process.pid, signal.SIGKILL)
        for process in handle.nodes:
            process.wait(KILL_GRACE)


def _accelerators(job: Job, node: int) -> dict[str, str]:
    """Which devices are this node's, when the machine has any."""
    devices = hardware.local_accelerators()
    if not devices or not job.torchrun:
        return {}
    if devices < job.nodes * job.ranks_per_node:
        wanted = f"{job.nodes} nodes x {job.ranks_per_node} ranks"
        raise BackendError(
            f"{wanted} on {devices} accelerators", why="two ranks can't share one", next=f"make {job.kind} NODES=1"
        )
    first = node * job.ranks_per_node
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + job.ranks_per_node)))}


def _loopback() -> str:
    """The loopback interface's name (`lo`, on macOS `lo0`): gloo otherwise looks the host name up."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def _free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind((ADDRESS, 0))
        return int(probe.getsockname()[1])


def _check_port(port: int) -> int:
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError as error:
            raise BackendError(
                f"port {port} is in use", where=ADDRESS, why="fleet.port asks for it, and the nodes must meet there",
                next=f"ss -ltnp 'sport = :{port}' shows by whom; without fleet.port a free one is taken",
            ) from error  # fmt: skip
    return port
