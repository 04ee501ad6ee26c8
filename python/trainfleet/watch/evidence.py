"""Defines evidence: the cause that a log line shows, its writer, its time, and whether its process
survived it; and whom the nodes blame: names and addresses of nodes, pids of ranks, votes against
peers.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .causes import Weight
from .line_classifier import OUTSIDE, Found
from .lines import LogLine
from .tracebacks import Tracebacks

_OWN = (  # lines in which a node reports its own name
    re.compile(r"^(?P<name>[\w.-]+):(?P<pid>\d+):\d+ \[\d+\] .*NCCL "),
    re.compile(r"NCCL INFO .*Using .*?:(?P<name>\d+\.\d+\.\d+\.\d+)<"),
    re.compile(r"SocketImpl\(fd=\d+, addr=\[(?P<name>[^\]]+)\]"),
    re.compile(r"My EFA addr: (?P<name>fi_addr_efa://\[[^\]]+\])"),
    re.compile(r"^\s+host\s+: (?P<name>\S+)"),
    re.compile(r"[Tt]he node '(?P<name>[^']+)' has joined round \d+"),
)
_OF_ALL = re.compile(r"localhost|127\.[\d.]+|::1")  # names that every node has
_HINTS = ("NCCL ", "SocketImpl(", "My EFA addr", " host ", "has joined round")
_PIDS = (re.compile(r"\(pid:? (\d+)\)"), re.compile(r"^\d{4}-\w{3}-\d\d [\d:.]+ +(\d+):\d+ "))


@dataclass
class Book:
    """The directory of a job: node by name or address, rank by node and pid."""

    nodes: dict[str, int] = field(default_factory=dict)
    pids: dict[tuple[int, int], int] = field(default_factory=dict)
    # the rank that torchrun saw fail first, by node
    failed: dict[int, int] = field(default_factory=dict)

    def note(self, node: int, rank: int | None, text: str) -> None:
        """Learns a node's name or a rank's pid from a line that it wrote."""
        if any(hint in text for hint in _HINTS):
            for pattern in _OWN:
                if match := pattern.search(text):
                    if not _OF_ALL.fullmatch(name := plain(match["name"])):
                        self.nodes.setdefault(name, node)
                    if rank is not None and match.groupdict().get("pid"):
                        self.pids.setdefault((node, int(match["pid"])), rank)
        if rank is not None and ("pid" in text or "NRT:" in text or "TDRV:" in text):
            for pattern in _PIDS:
                if match := pattern.search(text):
                    self.pids.setdefault((node, int(match[1])), rank)

    def node_of(self, peer: str | None) -> int | None:
        """Returns the node with this name or address, or None if it is unknown."""
        return None if peer is None else self.nodes.get(plain(peer))


def plain(name: str) -> str:
    """Returns a host's name in one form: without port, domain and process; EC2's `ip-10-0-0-1` as
    an address.
    """
    if name.startswith("fi_addr"):
        return name
    name = re.sub(r"_\d+_\d+$", "", name.strip("[]").removeprefix("::ffff:").lower())
    name = name.rpartition("@")[2]
    if match := re.match(r"ip-(\d+)-(\d+)-(\d+)-(\d+)\b", name):
        return ".".join(match.groups())
    return (
        name
        if re.fullmatch(r"[\d.:a-f]+", name)
        else re.sub(r"-ib$|-eth\d$", "", name.partition(".")[0])
    )


def votes(accusations: Iterable[tuple[int | None, int | None]]) -> Counter[int]:
    """Counts for each node how many other nodes blame it, from (accuser, accused) pairs."""
    accusers: Mapping[int, set[int]] = defaultdict(set)
    for accuser, accused in accusations:
        if accuser is not None and accused is not None and accuser != accused:
            accusers[accused].add(accuser)
    return Counter({node: len(others) for node, others in accusers.items()})


def most_blamed(counted: Counter[int]) -> int | None:
    """Returns the node that most others blame, or None after a tie or without votes."""
    ranking = counted.most_common(2)
    if not ranking or (len(ranking) > 1 and ranking[0][1] == ranking[1][1]):
        return None
    return ranking[0][0]


SKEW = 60.0  # seconds by which the clocks of two nodes may differ
SAME_CLOCK = 2.0  # seconds within which ranks of a node notice each other's failures
ONE_MORE = 30.0  # seconds after which a single further step shows that the job continued
BREATH = 5.0  # seconds after a mere warning; a calm line later than that shows that it was harmless
Writer = tuple[int | None, int | None, str]


@dataclass(frozen=True)
class Evidence:
    """The cause that a line shows. `node` and `rank` are those it blames, `line` has its writer.

    `error`: a process's exception. `firm`: the words say it, it is not inferred because others are
    missing. `closed`: they mean nothing else.
    """

    weight: Weight
    cause: str
    time: float
    line: LogLine
    writer: Writer
    index: int  # index of its line among those of its node
    node: int | None
    rank: int | None
    words: str
    error: bool = False
    firm: bool = True
    closed: bool = False
    guessed: bool = False  # an exception with words that no catalogue has
    # text matched by the sign's groups: peer, rank, pid, joined, all
    groups: Mapping[str, str] = field(default_factory=dict)


@dataclass
class ProcessLines:
    """The state kept for one process's lines."""

    tracebacks: Tracebacks = field(default_factory=Tracebacks)
    signed: list[Evidence] = field(default_factory=list)
    progress: int = -1  # index of its last line about a step
    calm: float = -math.inf  # time of its last line that is not a complaint


@dataclass
class Record:
    """All evidence that was read."""

    book: Book
    evidence: list[Evidence] = field(default_factory=list)
    # times of each node's last two steps
    steps: dict[int | None, tuple[float, float]] = field(default_factory=dict)
    closed: float | None = None  # time at which the work was reported as ended well
    streams: dict[Writer, ProcessLines] = field(default_factory=lambda: defaultdict(ProcessLines))

    @property
    def homes(self) -> dict[int, int | None]:
        """Maps each rank that wrote a line to its node."""
        return {rank: node for node, rank, _ in self.streams if rank is not None}


def signed(
    sign: Found, line: LogLine, time: float, writer: Writer, index: int, words: str
) -> Evidence:
    """Makes the evidence from a sign in a line; a process's own line is never proof."""
    what, match = sign
    weight, closed = what.weight, what.closed
    if weight == Weight.PROOF and writer[2] == "rank" and what.cause not in ("busy", "preempted"):
        weight, closed = Weight.WORD, False
    groups = {key: value for key, value in match.groupdict().items() if value}
    cause = (
        f"-{what.cause}" if what.cancels else f"+{what.cause}" if what.forestalls else what.cause
    )
    return Evidence(
        weight,
        cause,
        time,
        line,
        writer,
        index,
        writer[0],
        writer[1],
        words,
        firm=what.firm,
        closed=closed,
        groups=groups,
    )


def survived(evidence: Evidence, record: Record) -> bool:
    """Tells whether the job continued after it: its process reported a later step, or others did at
    least two more steps.
    """
    # its line was among lines that any process may have written
    untold = evidence.writer[2] == "kernel" and evidence.line.who == "agent"
    stream = record.streams[(evidence.writer[0], None, "agent") if untold else evidence.writer]
    if stream.progress > evidence.index:
        return True
    mild = evidence.weight <= Weight.HINT or evidence.cause == "rendezvous"
    if (
        mild
        and evidence.writer[2] not in OUTSIDE
        and not evidence.error
        and stream.calm > evidence.time + BREATH
    ):
        return True
    ended = record.closed is not None and evidence.time > record.closed - SKEW
    if ended and (evidence.weight <= Weight.HINT or not evidence.firm):
        return True
    complaint = evidence.weight <= Weight.HINT and not evidence.firm and not evidence.error
    for node, (last_but_one, last) in record.steps.items():
        if complaint and node == evidence.node and last > evidence.time:
            return True
        more, one = (SAME_CLOCK, ONE_MORE) if node == evidence.node else (SKEW, SKEW)
        if last_but_one > evidence.time + more or last > evidence.time + one:
            return True
    return False
