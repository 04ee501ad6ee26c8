"""Evidence from individual log lines: the cause, the writer, the time, and whether the process
survived.

Lines outside exceptions, such as library messages and process exits, are classified by their
writer. Node names and addresses, rank PIDs, and votes against peers determine where the blame goes.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from .causes import Sign, Weight, first_sign
from .lines import LogLine
from .tracebacks import Tracebacks

# log line from slurmctld or slurmd
DAEMON = re.compile(r"\[\d{4}-\d\d-\d\dT[\d:]{8}\.\d{3}\] (?:\[[\w.]+\] )?(?:\w+: )?")
# c10 log line about an error or a process exit
SEVERE = re.compile(r"\[[EF]\d* ?[^\]]*\.cpp:\d+\] ")
LOGGED = re.compile(
    r"(?:\[?(?:ERROR|CRITICAL|FATAL)\]?(?: - |:[\w.]*: ?|:? +(?:\S+:(?= ))?)|[-|\w. ]{0,60} - "
    r"(?:ERROR|CRITICAL|FATAL) - )\s*"
)
CONJECTURE = re.compile(
    r"(?i)(?:some |the )?(?:potential|possible|likely|common) (?:root )?(?:causes?|reasons?)\b"
)
PARTING = re.compile(
    r"(?i)\b(?:stopping|abort(?:ing|ed)|exiting|quitting|giving up|terminating|(?:can ?no|can.)t "
    r"continue)\b"
)
COMPLAINT = re.compile(
    r"(?i)^(?!.*(?:warn|ignor|deprecat|retrying|retry (?:in|after|#|\d)|(?:will|to) retry|retry "
    r"loop|fall(?:ing)? back|skip|if you see|means that))"
    r".*\b(?:fail(?:ed|ure)|error|fatal|unable|can ?not|could "
    r"not|can.t|denied|refused|lost|killed|corrupt(?:ed)?|\w+(?:Error|Exception))\b"
)
# exception quoted after other text
QUOTED = re.compile(
    r"^(?![\w.]*(?:Error|Exception): ).*?[^\w.]((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b.*)"
)
ENDED = re.compile(  # process exit, as reported by its launcher
    r"(?i)(?:\b(?:local_)?rank(?::? |=)(?P<rank>\d+)\b.{0,200}?)?\b"
    r"(?:(?:exit(?:s|ed)?|exitcode|return(?:s|ed)?|ended|terminated|crashed)(?: with)?[ "
    r"a-z_(]{0,20}(?:code|status)?\W{0,4}(?P<code>-\d{1,2}|1[2-9]\d)"
    r"|(?:exited|killed|terminated|died|crashed)(?: (?:by|on|of|with|from|due to))?:? signal:? "
    r"(?P<signal>\d+))\b"
)
CUDA = re.compile(r"Cuda failure (?:\d+ )?'(?P<what>[^']+)'")
FOLLOWED = re.compile(  # launcher message about processes that the launcher itself killed
    r"(?i)\b(?:clean|terminat|stopp|kill|end|cancel)\w* (?:up )?(?:the )?(?:\w+ "
    r"){0,2}(?:other|remaining|rest)\b"
)
# Writers that observe processes from outside. Their lines are not process output.
OUTSIDE = ("kernel", "watch")
Found = tuple[Sign, re.Match[str]]


def meant(who: str, text: str) -> Found | None:
    """Returns the matching pattern for a line outside an exception, given its writer."""
    if who in OUTSIDE:
        return first_sign((who, "any"), text)
    if daemon := DAEMON.match(text):
        return first_sign(("agent",), text[daemon.end() :]) or first_sign(("agent",), text)
    by = ("library", "any") if who == "rank" else ("library", "any", "agent")
    if severe := SEVERE.match(text):
        found = _whole(by, text[severe.end() :])
        if found and found[0].firm:
            return found
    if logged := LOGGED.match(text):
        text = text[logged.end() :]
        return _mild(_whole(by, text)) or implied(f"error: {text}", by)
    return _said(by, stated(text))


def _whole(by: tuple[str, ...], text: str) -> Found | None:
    """Returns the matching pattern for a message that its logger marked as an error."""
    return _reasoned(first_sign((*by, "error"), text), by, text)


def _said(by: tuple[str, ...], text: str) -> Found | None:
    """Returns the matching pattern for a line in no known format."""
    if found := heavier(first_sign(by, text), implied(text, by)):
        return _reasoned(found, by, text)
    # Schedulers join multiple reasons with " - ".
    return next(filter(None, (first_sign(by, part) for part in text.split(" - ")[1:])), None)


def _reasoned(found: Found | None, by: tuple[str, ...], text: str) -> Found | None:
    """Returns the match in the reason after an error message's colon if it indicates a different
    cause, as in `Failed compilation: no such library`. Otherwise, returns `found`.
    """
    rest = text[found[1].end() :] if found else ""
    if found is None or found[0].closed or found[0].weight != Weight.WORD or ": " not in rest:
        return found
    reason = first_sign((*by, "error"), rest)
    if reason is None or reason[0].rank != (Weight.WORD, True) or reason[0].cause == found[0].cause:
        return found
    return replace(reason[0], closed=False), reason[1]


def implied(text: str, by: tuple[str, ...]) -> Found | None:
    """Returns the match for an error that a line only implies: a quoted exception or CUDA error, an
    exit code, or a process's last message.
    """
    if match := CUDA.search(text):
        return first_sign(("error",), f"CUDA error: {match['what']}")
    if "agent" in by and (match := ENDED.search(text)) and not FOLLOWED.search(text):
        code = int(match["signal"] or match["code"])
        rank = f" of rank {match['rank']}" if match["rank"] else ""
        return first_sign(("exit",), f"signal {abs(code) % 128}{rank}")
    if PARTING.search(text):
        return _mild(first_sign((*by, "error"), text), Weight.WORD)
    if not COMPLAINT.search(text):
        return None
    every, named = (*by, "error"), QUOTED.search(text)
    quoted = named[1] if named else ""
    inner = first_sign(every, quoted) or first_sign(("program",), quoted)
    return _mild(firmer(inner, first_sign(every, text)) or inner)


def firmer(inner: Found | None, whole: Found | None) -> Found | None:
    """Chooses between the match in a quoted exception and the match in the whole message. Prefers
    the quoted exception if its pattern is firm and at least as strong.
    """
    return inner if inner and inner[0].firm and heavier(inner, whole) is inner else whole


def heavier(found: Found | None, other: Found | None) -> Found | None:
    """Returns the stronger match, or `found` if both are equally strong."""
    return max(filter(None, (found, other)), key=lambda one: one[0].weight, default=None)


def stated(text: str) -> str:
    """Strips the guesses at causes that some libraries append, since they would match patterns."""
    match = CONJECTURE.search(text)
    return text[: match.start()] if match else text


def _mild(found: Found | None, most: Weight = Weight.HINT) -> Found | None:
    """Caps the weight of a logged error, because the program may have recovered."""
    return found and (
        replace(found[0], weight=min(found[0].weight, most), firm=False, closed=False),
        found[1],
    )


_OWN = (  # lines in which a node reports its name
    re.compile(r"^(?P<name>[\w.-]+):\d+:\d+ \[\d+\] .*NCCL "),
    re.compile(r"NCCL INFO .*Using .*?:(?P<name>\d+\.\d+\.\d+\.\d+)<"),
    re.compile(r"SocketImpl\(fd=\d+, addr=\[(?P<name>[^\]]+)\]"),
    re.compile(r"My EFA addr: (?P<name>fi_addr_efa://\[[^\]]+\])"),
    re.compile(r"^\s+host\s+: (?P<name>\S+)"),
    re.compile(r"[Tt]he node '(?P<name>[^']+)' has joined round \d+"),
)
_OF_ALL = re.compile(r"localhost|127\.[\d.]+|::1")  # names and addresses that mean the node itself
_HINTS = ("NCCL ", "SocketImpl(", "My EFA addr", " host ", "has joined round")
_PID_HINTS = ("pid", "NRT:", "TDRV:", "NCCL ")
# torchrun's and DeepSpeed's line about the local rank that failed first
_LOCAL = re.compile(r"failed \(exitcode.* local_rank: (\d+)|--local_rank=(\d+).* exits with return")
_PIDS = (
    re.compile(r"\(pid:? (\d+)\)"),
    re.compile(r"^\d{4}-\w{3}-\d\d [\d:.]+ +(\d+):\d+ "),
    re.compile(r"^[\w.-]+:(\d+):\d+ \[\d+\] .*NCCL "),
)


@dataclass
class Book:
    """Directory that maps names and addresses to nodes, and PIDs to ranks."""

    nodes: dict[str, int | None] = field(default_factory=dict)
    pids: dict[tuple[int | None, int], int] = field(default_factory=dict)
    # first failed rank per node, according to its launcher
    failed: dict[int | None, int] = field(default_factory=dict)
    # failed local ranks in logs that belong to no known node
    local: list[int] = field(default_factory=list)

    def note(self, node: int | None, rank: int | None, text: str) -> None:
        """Records a node's name or a rank's PID from a line that the node wrote."""
        for pattern in _OWN if any(hint in text for hint in _HINTS) else ():
            match = pattern.search(text)
            if match and not _OF_ALL.fullmatch(name := plain(match["name"])):
                self.nodes.setdefault(name, node)
        if rank is None:
            rank = self._note_local(node, text)
        if rank is None:
            return
        for pattern in _PIDS if any(hint in text for hint in _PID_HINTS) else ():
            if match := pattern.search(text):
                self.pids.setdefault((node, int(match[1])), rank)

    def _note_local(self, node: int | None, text: str) -> int | None:
        """Records the local rank that failed, if the node is unknown. Returns it, or None."""
        if node is not None or not (match := _LOCAL.search(text)):
            return None
        self.local.append(int(match[1] or match[2]))
        return self.local[-1]

    def node_of(self, peer: str | None) -> int | None:
        """Returns the node with this name or address, or None if it is unknown."""
        return None if peer is None else self.nodes.get(plain(peer))


def plain(name: str) -> str:
    """Normalizes a host name: strips port, domain and process, and converts EC2's `ip-10-0-0-1` to
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


def votes(evidence: Iterable[Evidence], book: Book) -> Counter[int]:
    """Counts how many other nodes blame each node as the peer that they lost."""
    accusers: Mapping[int, set[int]] = defaultdict(set)
    for one in evidence:
        accused = book.node_of(one.groups.get("peer"))
        if one.node is not None and accused is not None and accused != one.node:
            accusers[accused].add(one.node)
    return Counter({node: len(others) for node, others in accusers.items()})


def most_blamed(counted: Counter[int]) -> int | None:
    """Returns the node that most others blame, or None if there is a tie or no votes."""
    ranking = counted.most_common(2)
    if not ranking or (len(ranking) > 1 and ranking[0][1] == ranking[1][1]):
        return None
    return ranking[0][0]


SKEW = 60.0  # maximum clock difference between two nodes, in seconds
SAME_CLOCK = 2.0  # maximum seconds for ranks of a node to notice each other's failures
ONE_MORE = 30.0  # a single step this many seconds after an error shows that the job continued
# A normal line this many seconds after a warning shows that the warning was harmless.
BREATH = 5.0
Writer = tuple[int | None, int | None, str]


@dataclass(frozen=True)
class Evidence:
    """A cause that a log line indicates. `rank` is to blame; `writer` wrote the line.

    `error` marks a process's exception. `firm` means that the line states the cause. Otherwise, the
    cause is inferred. `closed` means that the line is unambiguous.
    """

    weight: Weight
    cause: str
    line: LogLine
    writer: Writer
    index: int  # the line's index within its node's lines
    rank: int | None
    words: str
    error: bool = False
    firm: bool = True
    closed: bool = False
    guessed: bool = False  # whether the exception matches no pattern in the catalogue
    more: tuple[str, ...] = ()  # the message's lines after its first line
    # text captured by the pattern's groups: peer, rank, pid, joined, all
    groups: Mapping[str, str] = field(default_factory=dict)

    @property
    def node(self) -> int | None:
        return self.writer[0]

    @property
    def time(self) -> float:
        return self.line.time


@dataclass
class ProcessLines:
    """Reader state for one process's lines."""

    tracebacks: Tracebacks = field(default_factory=Tracebacks)
    signed: list[Evidence] = field(default_factory=list)
    progress: int = -1  # index of the last line that reported a step
    calm: float = -math.inf  # time of the last line that reported no problem


@dataclass
class Record:
    """All evidence in the logs."""

    book: Book
    evidence: list[Evidence] = field(default_factory=list)
    # times of each node's last two steps
    steps: dict[int | None, tuple[float, float]] = field(default_factory=dict)
    closed: float = math.inf  # time of the line that reported a successful end
    streams: dict[Writer, ProcessLines] = field(default_factory=lambda: defaultdict(ProcessLines))

    @property
    def homes(self) -> dict[int, int | None]:
        """Maps each rank with log lines to the node it ran on."""
        return {rank: node for node, rank, _ in self.streams if rank is not None}


def signed(sign: Found, line: LogLine, writer: Writer, index: int, words: str) -> Evidence:
    """Creates evidence from a pattern match. A rank's own line counts as proof only for the causes
    busy and preempted.
    """
    what, match = sign
    weight, closed = what.weight, what.closed
    if weight == Weight.PROOF and writer[2] == "rank" and what.cause not in ("busy", "preempted"):
        weight, closed = Weight.WORD, False
    groups = {key: value for key, value in match.groupdict().items() if value}
    found = Evidence(weight, what.cause, line, writer, index, writer[1], words)
    return replace(found, firm=what.firm, closed=closed, groups=groups)


def survived(evidence: Evidence, record: Record) -> bool:
    """Returns whether the job continued after this evidence, as shown by later training steps or,
    for weak evidence, by later normal lines or a successful end.
    """
    node, _, who = evidence.writer
    # A kernel line in the agent's output may come from any process.
    untold = who == "kernel" and evidence.line.who == "agent"
    stream = record.streams[(node, None, "agent") if untold else evidence.writer]
    calm = stream.calm > evidence.time + BREATH and who not in OUTSIDE and not evidence.error
    hint, ended = evidence.weight <= Weight.HINT, evidence.time > record.closed - SKEW
    signs = (
        stream.progress > evidence.index,
        calm and (hint or evidence.cause == "rendezvous"),
        ended and (hint or not evidence.firm),
    )
    return any(signs) or any(_stepped(evidence, *last) for last in record.steps.items())


def _stepped(evidence: Evidence, node: int | None, steps: tuple[float, float]) -> bool:
    """Returns whether a node's last two steps show that the job continued."""
    mild = evidence.weight <= Weight.HINT and not (evidence.firm or evidence.error)
    here = node == evidence.node
    more, one = (SAME_CLOCK, 0.0 if mild else ONE_MORE) if here else (SKEW, SKEW)
    return steps[0] > evidence.time + more or steps[1] > evidence.time + one
