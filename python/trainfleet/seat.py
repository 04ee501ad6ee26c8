"""A node's seat: which node of a job this is, where its ranks meet the others, and its torchrun line, the same on every backend.

Each engine passes these to a node in its own way; a reader for each makes a `Seat` of them. `torchrun` is a pure function
of the seat: `make plan` prints its words, and the node runs them. Standard library only: it is imported before anything else.

What is covered: environments as the engines document them (tests/unit/test_seat.py says where). What is not: nodes of Slurm, AWS
Batch and SageMaker themselves.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from .door import whole
from .errors import BackendError

PORT = 29400  # where the ranks meet when nobody says
LOOPBACK = "127.0.0.1"
LOOPBACK_CARD = "lo"  # on Linux, which nodes of fleets run
MEETING = "trainfleet.devices.meeting"  # starts torchrun, whose store it has listen at the meeting's address alone
RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")
HOSTS = r"[^\[\]]*(\[[0-9]{1,6}(-[0-9]{1,6})?(,[0-9]{1,6}(-[0-9]{1,6})?)*\][^\[\]]*)*"  # `a[01-02,7]`: at most a million hosts
Environment = Mapping[str, str]


@dataclass(frozen=True)
class Seat:
    """Node `node` of `nodes`; the ranks meet at `meet`:`port`. Attempts count from 1; `address` is this node's own, if known."""

    node: int
    nodes: int
    meet: str
    port: int = PORT
    attempt: int = 1
    address: str = ""

    @property
    def master(self) -> str:
        """Where its torchrun meets the others': on this machine alone, where there are no others."""
        return self.meet if self.nodes > 1 else LOOPBACK

    def environment(self) -> dict[str, str]:
        """What `of_fleet` reads this seat from. The attempt is left out: it is not known before the job is submitted."""
        values = {"NODE": self.node, "NODES": self.nodes, "MEET": self.meet, "PORT": self.port, "ADDRESS": self.address}
        return {f"TRAINFLEET_{name}": str(value) for name, value in values.items() if value != ""}


def torchrun(seat: Seat, ranks: int, module: str, python: str, scratch: Path | None = None) -> tuple[str, ...]:
    """torchrun's command line for one node, up to the module. With `scratch`, lines get a prefix per rank, and logs lie there.

    The rendezvous is static: node ranks are ours, and no host name is looked up.
    """
    own = [f"--local-addr={seat.address}"] if seat.address else []
    logs = ["--tee=3", f"--log-dir={scratch}"] if scratch else []
    return (
        python, "-m", MEETING, "torch.distributed.run",
        f"--nnodes={seat.nodes}", f"--nproc-per-node={ranks}", f"--node-rank={seat.node}",
        f"--master-addr={seat.master}", f"--master-port={seat.port}", *own,
        "--max-restarts=0", "--monitor-interval=0.5", *logs, "-m", module,
    )  # fmt: skip


def require_numbers(*names: str) -> None:
    """Refuses a job whose variables are not the numbers that they should be, before anything of it has started."""
    for name in names:
        if (value := os.environ.get(name)) and not re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,9})?", value):
            raise BackendError(f"{name} is {value[:80]!r}, which is no number", next=f"unset {name}; or {_NEXT}")


def lone_rank(seat: Seat) -> dict[str, str]:
    """The environment that torchrun would give a node's only rank, for a job that need not wait for torchrun to start."""
    values = {"RANK": seat.node, "WORLD_SIZE": seat.nodes, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": seat.node}
    return {name: str(value) for name, value in values.items()} | {"MASTER_ADDR": seat.master, "MASTER_PORT": str(seat.port)}


def of_fleet(environment: Environment = os.environ) -> Seat:
    """The seat that this program's own backends (local, ssh) give a node: see `Seat.environment`."""
    read = _Variables("TRAINFLEET_", environment)
    nodes = read.number("NODES")
    seat = Seat(
        read.number("NODE"), nodes, read.word("MEET"), read.number("PORT"), read.number("ATTEMPT", 1), read.word("ADDRESS", "")
    )
    return _checked(seat, "TRAINFLEET_NODE")


def of_slurm(environment: Environment = os.environ) -> Seat:
    """The seat of a task that srun started, one a node (https://slurm.schedmd.com/srun.html, OUTPUT ENVIRONMENT VARIABLES).

    Jobs that share a node must not share a port, and a requeued job's first port may linger: both are in the number.
    """
    read = _Variables("SLURM_", environment)
    nodes = read.number("STEP_NUM_NODES", read.number("JOB_NUM_NODES", read.number("NNODES", 1)))
    hosts = list(expand_hosts(read.word("STEP_NODELIST", environment.get("SLURM_JOB_NODELIST"))))
    restarts = read.number("RESTART_COUNT", 0)
    port = 20000 + (read.number("JOB_ID") + restarts) % 10000  # under what kernels hand out to clients (32768 on)
    seat = Seat(read.number("NODEID"), nodes, hosts[0], port, restarts + 1, environment.get("SLURMD_NODENAME", ""))
    return _checked(seat, "SLURM_NODEID")


def of_batch(environment: Environment = os.environ) -> Seat:
    """The seat of a node of an AWS Batch job (https://docs.aws.amazon.com/batch/latest/userguide/job_env_vars.html).

    The main node has seat 0, whatever its index. Batch does not give it its own address, which is looked up.
    """
    read = _Variables("AWS_BATCH_JOB_", environment)
    read.word("ID")  # the others have defaults, as a job of one node lacks them: without this any process would be such a job
    nodes, index, main = read.number("NUM_NODES", 1), read.number("NODE_INDEX", 0), read.number("MAIN_NODE_INDEX", 0)
    meet = read.word("MAIN_NODE_PRIVATE_IPV4_ADDRESS", "") if index != main else own_address() if nodes > 1 else LOOPBACK
    if not meet:
        raise BackendError("a node of an AWS Batch job is not told where to meet", where=f"node {index}",
                           why="AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS is not set", next=_NEXT)  # fmt: skip
    node = 0 if index == main else index + 1 if index < main else index
    return _checked(Seat(node, nodes, meet, PORT, read.number("ATTEMPT", 1)), "AWS_BATCH_JOB_NODE_INDEX")


def of_sagemaker(file: Path = RESOURCES) -> Seat:
    """The seat of a host of a SageMaker training job, from its resourceconfig.json. SageMaker does not report a retry.

    https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        hosts, own = sorted(map(str, record["hosts"]), key=_by_number), str(record["current_host"])
        return _checked(Seat(hosts.index(own), len(hosts), hosts[0], PORT, 1, own), str(file))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackendError("can't tell which host of the job this is", where=str(file),
                           why=f"{type(error).__name__}: {error}", next=_NEXT) from error  # fmt: skip


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sorts algo-2 before algo-10, as consoles and logs count."""
    return [(-1, part) if (number := whole(part)) is None else (number, "") for part in re.split(r"([0-9]+)", name)]


READERS: dict[str, Callable[[], Seat]] = {
    "fleet": of_fleet, "slurm": of_slurm, "batch": of_batch, "sagemaker": of_sagemaker,
}  # fmt: skip


def engine(environment: Environment = os.environ, resources: Path = RESOURCES) -> str:
    """Who started this node, a key of READERS; our own launcher counts before the engine around it.

    Raises:
        BackendError: none of them did.
    """
    signs = {"TRAINFLEET_NODE": "fleet", "AWS_BATCH_JOB_ID": "batch", "SLURM_JOB_ID": "slurm"}
    for name, reader in signs.items():
        if name in environment:
            return reader
    if resources.exists():
        return "sagemaker"
    why = f"none of {', '.join(signs)} is set, and there is no {resources}"
    raise BackendError("this process was not started as a node of a job", why=why, next=_NEXT)


_NEXT = "start it as the backend does: make plan OUT=folder shows how"


def expand_hosts(words: str) -> Iterator[str]:
    """The hosts of a Slurm node list in their order: `a[01-02,7],b` → a01, a02, a7, b."""
    if not re.fullmatch(HOSTS, words):
        raise BackendError(f"{words[:80]!r} is no list of hosts", where="SLURM_STEP_NODELIST", next=_NEXT)
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


def own_address() -> str:
    """The address by which other machines reach this one: that of the interface by which it would leave. Nothing is sent."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect(("169.254.169.254", 80))
        except OSError:
            return LOOPBACK  # it has no way out, so it is alone
        return str(probe.getsockname()[0])


def card(routes: Path = Path("/proc/net/route")) -> str:
    """The network card by which this machine reaches others: that of its default route; "" where there is none."""
    try:
        rows = [line.split() for line in routes.read_text().splitlines()[1:]]
    except OSError:
        return ""
    ways = sorted((int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == row[7] == "00000000")
    return ways[0][1] if ways else ""


@dataclass(frozen=True)
class _Variables:
    """What an engine says by variables that begin with `prefix`."""

    prefix: str
    environment: Environment

    def word(self, name: str, default: str | None = None) -> str:
        value = self.environment.get(self.prefix + name, default)
        if value is None or (not value and default is None):
            raise BackendError(
                f"{self.prefix}{name} is not set", why="this process was not started as a node of a job", next=_NEXT
            )
        return value

    def number(self, name: str, default: int | None = None) -> int:
        value = self.word(name, None if default is None else str(default))
        if not re.fullmatch("[0-9]{1,18}", value):
            raise BackendError(f"{self.prefix}{name} is {value!r}, which is no number", next=_NEXT)
        return int(value)


def _checked(seat: Seat, where: str) -> Seat:
    if not (0 <= seat.node < seat.nodes and seat.meet):
        raise BackendError(f"node {seat.node} of {seat.nodes} is no seat of a job", where=where, next=_NEXT)
    if not 0 <= seat.port < 2**16:  # 0: a job whose ranks do not meet
        raise BackendError(f"{seat.port} is no port where ranks can meet", where=where, next=_NEXT)
    return seat
