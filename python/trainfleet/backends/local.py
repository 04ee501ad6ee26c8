"""Local backend: simulates all nodes on this machine.

Each node is a torchrun agent with a separate log. The agents rendezvous on 127.0.0.1, so the
hostname does not have to resolve. All processes die with the launcher, even if it crashes. While
the launcher is alive, other processes can query and stop its jobs. They find each node's process
through its file in the nodes/ subfolder of the job's folder.

Tested: everything, with real processes.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path

from ..checkpoints import init_from
from ..config import Config, Refusals
from ..config.addresses import absent
from ..hardware import node_types
from ..hosts import facts as reading
from ..hosts import probe
from ..hosts.host_results import Implausible
from ..node.placement import LOOPBACK, Placement
from ..node.placements import FLEET as PLACEMENT
from ..node.supervisor import EXIT, process_in, read, said_file, told, write
from ..plan.estimate import Bill, list_price
from ..plan.job import Artifact, Job, Request
from ..process.file_systems import replace_file
from ..process.install_paths import CODE, python_path
from ..process.processes import die_with_parent, identity, signal_group
from ..run import contents, run_folder
from ..run.run_folder import Run
from ..trust import untrusted_input
from ..trust.errors import BackendError, InputError
from .base import Backend, Can, Handle, Machines, Phase, Probe, Status
from .node_script import node_script, values_of
from .own_machines import ThisMachine
from .run_storage import Here, Place

KILL_GRACE = 5.0  # seconds that processes may take to exit after SIGKILL
MOST_NODES = 64
WSL = Path("/dev/dxg")  # device file of the Windows GPU under WSL


class Local(Backend):
    """Backend that runs jobs on this machine (base.py)."""

    name = "local"
    can = frozenset({Can.SHARED})
    is_here, tried_on, placement, inherits = True, "real", PLACEMENT, ("all of it",)

    def __init__(self, config: Config | None = None) -> None:
        self.nodes = config.fleet.nodes if config else 1
        self._bill = Bill((list_price(config) if config else None) or 0.0)
        self._started: dict[int, subprocess.Popen[bytes]] = {}  # pid → child process to reap
        self._asked: set[str] = set()

    @staticmethod
    def refuse(config: Config) -> Refusals:
        if config.fleet.instance_type is not None:
            yield (
                "fleet.instance_type",
                "the local backend uses this machine; remove it, or set another fleet.backend",
            )
        if config.fleet.container != "none":
            yield (
                "fleet.container",
                "the local backend uses the Python environment that make built; set none",
            )
        if config.fleet.nodes > MOST_NODES:
            yield (
                "fleet.nodes",
                f"{config.fleet.nodes}: the local backend simulates at most {MOST_NODES} nodes "
                "on one machine",
            )
        yield from _other(config)
        yield from absent(config)
        yield from init_from.faults(config)
        if (
            config.train.precision == "fp8"
            and not config.fleet.rank_device
            and not node_types.local_accelerators()
        ):
            yield (
                "train.precision",
                "fp8: CPUs do not support it, only GPUs since Ada and Hopper; set auto",
            )

    def plan(self, job: Job, without: Mapping[str, str]) -> Request:
        """Returns one script per node. Ignores `without`, because every node is this machine.

        Raises:
            BackendError: the configured port is in use, or there are more ranks than accelerators.
        """
        port = _port(job.port or 0) if job.torchrun else 0
        return Request(job, tuple(self._script(job, node, port) for node in range(job.nodes)))

    def _script(self, job: Job, node: int, port: int) -> Artifact:
        cores = max(1, node_types.local_cores() // job.nodes)
        placement = Placement(node, job.nodes, LOOPBACK, port, address=LOOPBACK)
        if job.torchrun:
            own = {
                "OMP_NUM_THREADS": str(max(1, cores // job.ranks_per_node)),
                # without this, gloo resolves the hostname, which can fail; macOS names the
                # interface lo0
                "GLOO_SOCKET_IFNAME": next(
                    (name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo"
                ),
            }
        else:
            own = {"WORKERS": str(cores)}
        given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        own |= python_path(
            os.pathsep.join(
                dict.fromkeys([str(CODE), *(str(Path(folder).absolute()) for folder in given)])
            )
        )
        environment = (
            own | placement.environment() | dict(job.environment) | _accelerators(job, node)
        )
        return node_script(job, placement, Path.cwd(), sys.executable, environment)

    def submit(self, request: Request) -> Handle:
        """Starts all nodes. If one fails to start, stops the others."""
        handle = Handle(
            self.name, str(request.job.folder.absolute()), request.token, request.job.nodes
        )
        if all(_is_of(handle, _file(handle, node)) for node in range(handle.nodes)):
            return handle
        secrets = values_of(request.job.secrets)
        for node, artifact in enumerate(request.artifacts):
            try:
                self._start(
                    _file(handle, node),
                    artifact,
                    os.environ | request.environment | secrets,
                    handle.token,
                )
            except OSError as error:
                self.stop(handle, at_once=True)
                if isinstance(error, PermissionError) or error.errno in (28, 30):
                    raise run_folder.unwritable(_file(handle, node), error) from error
                raise BackendError(
                    "could not start the node",
                    where=f"node {node}",
                    why=str(error),
                    next="df -h . ; ulimit -a",
                ) from error
        return handle

    def _start(
        self, file: Path, artifact: Artifact, environment: Mapping[str, str], token: str
    ) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        script, exit_file = file.with_name(f"{file.name}.sh"), file.with_name(f"{file.name}.exit")
        exit_file.unlink(missing_ok=True)
        replace_file(script, artifact.text.encode())
        # captures output that the node does not write to its log, for example before the log exists
        with open(said_file(file), "wb", opener=untrusted_input.opener) as said:
            process = subprocess.Popen(
                ["/bin/sh", str(script)],
                env={**environment, EXIT: str(exit_file)},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._started[process.pid] = process
        write(file, f"{identity(process.pid) or process.pid} {token}")

    def status(self, handle: Handle) -> Status:
        exits = {
            node: code
            for node in range(handle.nodes)
            if (code := self._exit(handle, _file(handle, node))) is not None
        }
        reason = next(
            (
                words
                for node, code in exits.items()
                if code and (words := told(_read_said(handle, node)))
            ),
            "",
        )
        if len(exits) == handle.nodes:
            return Status(Phase.ENDED, reason, exits=exits)
        return Status(
            Phase.STOPPING if handle.token in self._asked else Phase.RUNNING, reason, exits=exits
        )

    def _exit(self, handle: Handle, file: Path) -> int | None:
        """Returns a node's exit code, or None if it is running.

        A dead node that left no exit code counts as killed.
        """
        if not _is_of(handle, file):
            return 137
        pid, said, _ = process_in(file)
        if pid in self._started:
            self._started[pid].poll()  # reap the process if it has exited
        # check liveness first: a node that exits before the read has already written its code
        alive = identity(pid) == said
        code = read(file.with_name(f"{file.name}.exit"))
        if re.fullmatch("[0-9]{1,3}", code):
            return int(code)
        if alive:
            return None
        # exit code of the shell that ran the node; negative if a signal killed the shell
        shell = self._started[pid].returncode if pid in self._started else None
        return 137 if shell is None or shell < 0 else int(shell)

    def stop(self, handle: Handle, at_once: bool) -> None:
        """Sends SIGTERM to every node, or SIGKILL if `at_once` is set.

        When a supervisor dies, so does its command.
        """
        self._asked.add(handle.token)
        files = [
            file for node in range(handle.nodes) if _is_of(handle, file := _file(handle, node))
        ]
        alive = [pid for file in files if (pid := _alive(file))]
        for pid in alive:
            signal_group(pid, signal.SIGKILL if at_once else signal.SIGTERM)
        deadline = time.monotonic() + KILL_GRACE
        while at_once and any(map(_alive, files)) and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in alive if at_once else ():
            if process := self._started.pop(pid, None):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(KILL_GRACE)

    def find(self, run: Run) -> Handle:
        """Returns the newest job in the run folder.

        A job's processes all die with its launcher, so no job can be running elsewhere.
        """
        nodes = sorted(contents.NODE.at(run.folder, node=0).parent.glob("node-*[0-9]"))
        token = process_in(nodes[0])[2] if nodes else ""
        return Handle(self.name, str(run.folder.absolute()), token, len(nodes))

    def place(self, run: Run) -> Place:
        return Here(run)

    def bill(self) -> Bill | None:
        return self._bill

    def machines(self) -> Machines:
        return ThisMachine(self.nodes)

    def probe(self) -> Probe | None:
        """Returns this machine's hardware, or None if it can't be read, such as on systems other
        than Linux.
        """
        try:
            found = reading.read_here()
        except Implausible:
            return None
        return Probe(
            tuple(probe.describe(found)) if found.gpus or found.bus else (), {"this machine": found}
        )


def _file(handle: Handle, node: int) -> Path:
    """Returns the file that identifies the node's process: `pid start boot token`."""
    return contents.NODE.at(handle.id, node=node)


def _read_said(handle: Handle, node: int) -> str:
    """Returns a node's output that is not in its log, or "" if it can't be read."""
    with suppress(OSError, InputError):
        return read(said_file(_file(handle, node)))
    return ""


def _is_of(handle: Handle, file: Path) -> bool:
    return bool(handle.token) and process_in(file)[2] == handle.token


def _alive(file: Path) -> int:
    """Returns the PID of a node's process, or 0 if it is not running."""
    pid, said, _ = process_in(file)
    return pid if pid and identity(pid) == said else 0


def _other(config: Config) -> Refusals:
    """Yields an error for each fleet.accelerator setting that contradicts this machine's drivers.

    Skipped under WSL, because the drivers expose no device files there.
    """
    kind = config.fleet.node_type
    devices = node_types.local_accelerators()
    row = node_types.local_accelerator()
    if WSL.exists():
        return
    if config.fleet.device == "cuda" and not devices and not config.fleet.is_told:
        yield (
            "fleet.platform",
            f"{config.fleet.platform}: this machine's drivers report no GPU; remove it",
        )
    if config.fleet.accelerator is None or kind is None or kind.accelerator is None:
        return
    if not devices:
        other = (
            "remove it to train on CPUs, or set fleet.backend to ssh or slurm to plan without hosts"
        )
        yield (
            "fleet.accelerator",
            f"{kind.name}: this machine's drivers report no accelerator; {other}",
        )
    elif row and row.words != kind.accelerator.words:
        yield (
            "fleet.accelerator.name",
            f"{kind.accelerator.label}: this machine has {row.label}; remove it",
        )
    elif kind.accelerators > devices:
        yield (
            "fleet.accelerator.per_node",
            f"{kind.accelerators}: this machine has {devices}; remove it",
        )


def _accelerators(job: Job, node: int) -> dict[str, str]:
    """Returns CUDA_VISIBLE_DEVICES for a node, or an empty dict if the machine has no
    accelerators.
    """
    devices = node_types.local_accelerators()
    if not devices or not job.torchrun:
        return {}
    if devices < job.nodes * job.ranks_per_node:
        raise BackendError(
            f"{job.nodes} nodes x {job.ranks_per_node} ranks need more than the {devices} "
            "accelerators of this machine",
            why="two ranks can't share an accelerator",
            next=f"make {job.kind} NODES=1",
        )
    first = node * job.ranks_per_node
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + job.ranks_per_node)))}


def _port(asked: int) -> int:
    """Returns the port, or a free one if `asked` is 0. Raises BackendError if the port is in
    use.
    """
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, bool(asked))
        try:
            probe.bind((LOOPBACK, asked))
        except OSError as error:
            raise BackendError(
                f"port {asked} is in use",
                where=LOOPBACK,
                why="the nodes rendezvous on this port (fleet.rendezvous_port)",
                next=(
                    f"run ss -ltnp 'sport = :{asked}' to see the process, or remove "
                    "fleet.rendezvous_port to use a free port"
                ),
            ) from error
        return int(probe.getsockname()[1])
