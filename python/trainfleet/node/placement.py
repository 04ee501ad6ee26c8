"""Placement of a node: its number in the job, the ranks' rendezvous address, and its torchrun
command.

Each scheduler passes these values to its nodes in its own way, and placements.py converts them to a
`Placement`. `torchrun` is a pure function of the placement, so `make plan` prints exactly the
command that the node runs. Uses only the standard library, because this module is imported before
all others.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ..trust.errors import BackendError

PORT = 29400  # default rendezvous port
LOOPBACK = "127.0.0.1"
LINK = "ip link set lo up"  # suggested fix if the loopback address is unreachable
LOOPBACK_CARD = "lo"  # loopback interface on Linux, which all nodes run
# Module that starts torchrun with a store that listens only on the rendezvous address
MEETING = "trainfleet.devices.meeting"
# Pattern of a Slurm node list, such as `a[01-02,7]`, with numbers of up to six digits
HOSTS = r"[^\[\]]*(\[[0-9]{1,6}(-[0-9]{1,6})?(,[0-9]{1,6}(-[0-9]{1,6})?)*\][^\[\]]*)*"
NEXT = "start it as the backend does; run make plan OUT=folder to see the command"
STARTS = 900.0  # maximum seconds between the first and the last node's start
TERM_GRACE = (
    20.0  # seconds from SIGTERM to SIGKILL, enough to finish a step and save a small checkpoint
)
Environment = Mapping[str, str]


@dataclass(frozen=True)
class Placement:
    """Placement of node `node` of `nodes`. The ranks rendezvous at `meet`:`port`. `attempt` counts
    from 1, and `address` is this node's address if known.
    """

    node: int
    nodes: int
    meet: str
    port: int = PORT
    attempt: int = 1
    address: str = ""

    @property
    def master(self) -> str:
        """Returns the rendezvous address for torchrun. For a single node, this is the loopback
        address.
        """
        return self.meet if self.nodes > 1 else LOOPBACK

    def environment(self) -> dict[str, str]:
        """Returns the environment variables from which placements.py reads this placement.
        Excludes the attempt, which is unknown until the job is submitted.
        """
        values = {
            "NODE": self.node,
            "NODES": self.nodes,
            "MEET": self.meet,
            "PORT": self.port,
            "ADDRESS": self.address,
        }
        return {f"TRAINFLEET_{name}": str(value) for name, value in values.items() if value != ""}


@dataclass(frozen=True)
class Terms:
    """Rules that a scheduler applies to its nodes.

    Attributes:
        wait: Seconds within which all nodes must start, or 0 if the launcher ensures that they do.
        grace: Seconds from SIGTERM until all processes must have exited, slightly less than the
            scheduler allows.
        echoes: Whether the scheduler keeps the nodes' output.
        failure: File for the failure reason.
        decides: Whether node 0 determines the outcome of the job, which ends when node 0 exits and
            is retried if its exit code is 75.
    """

    wait: float = STARTS
    grace: float = TERM_GRACE
    echoes: bool = False
    failure: Path | None = None
    decides: bool = False


@dataclass(frozen=True)
class PlacementSource:
    """Interface to a scheduler. `read` returns a node's placement, and `terms` describes how the
    scheduler treats its nodes.

    `has_started_this` returns whether the scheduler started this process. `name` is the scheduler's
    name for the entry point's --on option.
    """

    name: str
    read: Callable[[], Placement]
    has_started_this: Callable[[], bool]
    terms: Terms = Terms()


def torchrun(
    placement: Placement, ranks: int, module: str, python: str, scratch: Path | None = None
) -> tuple[str, ...]:
    """Returns one node's torchrun command line, up to and including the module. If `scratch` is
    given, each output line is prefixed with its rank, and logs are written to that folder.

    The rendezvous is static: trainfleet assigns the node ranks, and no host names are resolved.
    """
    own = [f"--local-addr={placement.address}"] if placement.address else []
    logs = ["--tee=3", f"--log-dir={scratch}"] if scratch else []
    return (
        python, "-m", MEETING, "torch.distributed.run",
        f"--nnodes={placement.nodes}", f"--nproc-per-node={ranks}", f"--node-rank={placement.node}",
        f"--master-addr={placement.master}", f"--master-port={placement.port}", *own,
        "--max-restarts=0", "--monitor-interval=0.5", *logs, "-m", module,
    )  # fmt: skip


def require_numbers(*names: str) -> None:
    """Raises BackendError if any of these variables is set to something other than a number. Called
    before the job starts.
    """
    for name in names:
        if (value := os.environ.get(name)) and not re.fullmatch(
            r"[0-9]{1,18}(\.[0-9]{1,9})?", value
        ):
            raise BackendError(
                f"{name} is {value[:80]!r}, not a number", next=f"unset {name}; or {NEXT}"
            )


def lone_rank(placement: Placement) -> dict[str, str]:
    """Returns the environment that torchrun would set for a node's only rank, so that a job can run
    without waiting for torchrun to start.
    """
    values = {
        "RANK": placement.node,
        "WORLD_SIZE": placement.nodes,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "GROUP_RANK": placement.node,
    }
    return {name: str(value) for name, value in values.items()} | {
        "MASTER_ADDR": placement.master,
        "MASTER_PORT": str(placement.port),
    }


def expand_hosts(words: str) -> Iterator[str]:
    """Yields the hosts of a Slurm node list in order. For example, `a[01-02,7],b` becomes a01, a02,
    a7, b.
    """
    if not re.fullmatch(HOSTS, words):
        raise BackendError(
            f"{words[:80]!r} is not a valid host list", where="SLURM_STEP_NODELIST", next=NEXT
        )
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", words):
        yield from _expand(part)


def _expand(part: str) -> Iterator[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    ranges, _, tail = rest.partition("]")
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield from _expand(f"{head}{number:0{len(first)}d}{tail}")


def unlinked() -> str:
    """Returns why this machine can't reach the loopback address that simulated nodes use, or "" if
    it can.
    """
    try:
        with (
            socket.create_server((LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), 5),
        ):
            return ""
    except OSError as error:
        return (
            f"this machine can't reach its loopback address {LOOPBACK}: {error.strerror or error}"
        )


def own_address() -> str:
    """Returns the address at which other machines can reach this one, which is that of the default
    route's interface. Sends no packets.
    """
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(("169.254.169.254", 80))
        except OSError:
            return LOOPBACK  # no route to other machines
        return str(probe.getsockname()[0])


def card(routes: Path = Path("/proc/net/route")) -> str:
    """Returns the network interface of this machine's default route, or "" if there is no default
    route.
    """
    try:
        rows = [line.split() for line in routes.read_text().splitlines()[1:]]
    except OSError:
        return ""
    ways = sorted(
        (int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"
    )
    return ways[0][1] if ways else ""


@dataclass(frozen=True)
class Variables:
    """A scheduler's environment variables, all of which start with `prefix`."""

    prefix: str
    environment: Environment

    def word(self, name: str, default: str | None = None) -> str:
        value = self.environment.get(self.prefix + name, default)
        if value is None or (not value and default is None):
            raise BackendError(
                f"{self.prefix}{name} is not set",
                why="this process was not started as a node of a job",
                next=NEXT,
            )
        return value

    def number(self, name: str, default: int | None = None) -> int:
        value = self.word(name, None if default is None else str(default))
        if not re.fullmatch("[0-9]{1,18}", value):
            raise BackendError(f"{self.prefix}{name} is {value!r}, not a number", next=NEXT)
        return int(value)


def checked(placement: Placement, where: str) -> Placement:
    if not (0 <= placement.node < placement.nodes and placement.meet):
        raise BackendError(
            f"node {placement.node} of {placement.nodes} is not a valid placement",
            where=where,
            next=NEXT,
        )
    if not 0 <= placement.port < 2**16:  # 0 if the job's ranks do not rendezvous
        raise BackendError(
            f"{placement.port} is not a valid rendezvous port", where=where, next=NEXT
        )
    return placement
