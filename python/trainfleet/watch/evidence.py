"""Defines evidence: the cause that a log line shows, its writer, its time, and whether its process
survived it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from .blame import Book
from .causes import Weight
from .line_classifier import OUTSIDE, Found
from .lines import LogLine
from .tracebacks import Tracebacks

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
