"""Evidence: what a line of the logs gives away, by whom and when it was said, and whether its
process outlived it.
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

SKEW = 60.0  # seconds that clocks of two nodes may be apart
SAME_CLOCK = 2.0  # seconds within which ranks of a node notice each other's failures
ONE_MORE = 30.0  # seconds after which even a single step more shows that the job went on
BREATH = 5.0  # seconds behind a mere warning; a calm line after that shows that it was no more
Writer = tuple[int | None, int | None, str]


@dataclass(frozen=True)
class Evidence:
    """What a line gives away. `node` and `rank` are those it is about, `line` is by whom it was
    said.

    `error`: a process's exception. `firm`: the words say so, it is not inferred from the lack of
    others; `closed`: they mean nothing else.
    """

    weight: Weight
    cause: str
    time: float
    line: LogLine
    writer: Writer
    index: int  # of its line among those of its node
    node: int | None
    rank: int | None
    words: str
    error: bool = False
    firm: bool = True
    closed: bool = False
    guessed: bool = False  # of an exception in which no catalogue has a word
    # what the sign's groups matched: peer, rank, pid, joined, all
    groups: Mapping[str, str] = field(default_factory=dict)


@dataclass
class ProcessLines:
    """What is kept of one process's lines."""

    tracebacks: Tracebacks = field(default_factory=Tracebacks)
    signed: list[Evidence] = field(default_factory=list)
    progress: int = -1  # the index of its last line about a step
    calm: float = -math.inf  # when it last wrote what is no complaint


@dataclass
class Record:
    """All that was read."""

    book: Book
    evidence: list[Evidence] = field(default_factory=list)
    # by node: when it told of its last two steps
    steps: dict[int | None, tuple[float, float]] = field(default_factory=dict)
    closed: float | None = None  # when the work was said to be ended well
    streams: dict[Writer, ProcessLines] = field(default_factory=lambda: defaultdict(ProcessLines))

    @property
    def homes(self) -> dict[int, int | None]:
        """The node of each rank that wrote anything."""
        return {rank: node for node, rank, _ in self.streams if rank is not None}


def signed(
    sign: Found, line: LogLine, time: float, writer: Writer, index: int, words: str
) -> Evidence:
    """The evidence that a sign in a line is: from a process itself, never proof."""
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
    """Whether the job went on after it: its process wrote of a step later, or others did of more
    than the one they were in.
    """
    # it stood among lines that may be anybody's
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
