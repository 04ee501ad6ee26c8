"""Evidence: what each line of the logs gives away, by whom and when it was said, and whether its process outlived it."""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from .blame import Book
from .catalogue import Sign, firm_causes, first_sign, signs
from .causes import Weight
from .lines import DAY, Line, is_calm, is_closing, is_progress
from .prefixes import TRACEBACK, learned, strip
from .tracebacks import BUGS, PROGRAM, Block, Tracebacks

SKEW = 60.0  # seconds that clocks of two nodes may be apart
SAME_CLOCK = 2.0  # seconds within which ranks of a node notice each other's failures
ONE_MORE = 30.0  # seconds after which even a single step more shows that the job went on
BREATH = 5.0  # seconds behind a mere warning; a calm line after that shows that it was no more
KERNEL = re.compile(  # a record of the kernel's log, by what syslog or dmesg put before it, or by the part of it that speaks
    r"^(?:(?:<\d+>)?\[ *\d+\.\d+\] |\[\w{3} \w{3} +\d+ [\d:]+ \d{4}\] |(?:\w{3} +\d+ [\d:]+ )?(?:\S+ )?kernel: |"
    r"kern: +\w+: +(?:\[\S+\]: )?|"
    r"(?=NVRM: |Lustre(?:Error)?: |EXT4-fs |XFS \(|nvme nvme\d|blk_update_request: |pcieport \S+: |mce: |EDAC |nfs: server |"
    r"infiniband \w+: |efa \S+: |mlx5_core \S+: |neuron:\w+: |nvidia\S* \S*: |oom-kill:|(?:Memory cgroup o|O)ut of memory: Kill|"
    r"INFO: task |systemd-oomd))"
)
DAEMON = re.compile(r"\[\d{4}-\d\d-\d\dT[\d:]{8}\.\d{3}\] (?:\[[\w.]+\] )?(?:\w+: )?")  # a line of slurmctld or slurmd
SEVERE = re.compile(r"\[[EF]\d* ?[^\]]*\.cpp:\d+\] ")  # an error or the end of a process, as c10 logs it
LOGGED = re.compile(r"(?:\[?(?:ERROR|CRITICAL|FATAL)\]?(?:[: ]\S*?[: ]| - )|[-|\w. ]{0,60} - (?:ERROR|CRITICAL|FATAL) - )\s*")
CONJECTURE = re.compile(r"(?i)(?:some |the )?(?:potential|possible|likely|common) (?:root )?(?:causes?|reasons?)\b")
PARTING = re.compile(r"(?i)\b(?:stopping|abort(?:ing|ed)|exiting|quitting|giving up|terminating|(?:can ?no|can.)t continue)\b")
COMPLAINT = re.compile(
    r"(?i)^(?!.*(?:warn|ignor|deprecat|retrying|retry (?:in|after|#|\d)|(?:will|to) retry|retry loop|fall(?:ing)? back|skip"
    r"|if you see|means that))"
    r".*\b(?:fail(?:ed|ure)|error|fatal|unable|can ?not|could not|can.t|denied|refused|lost|killed|corrupt(?:ed)?"
    r"|\w+(?:Error|Exception))\b"
)
QUOTED = re.compile(
    r"^(?![\w.]*(?:Error|Exception): ).*?[^\w.]((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b.*)"
)  # an exception behind other words
ENDED = re.compile(  # a process, as its launcher tells
    r"(?i)(?:\brank (?P<rank>\d+)\b.{0,200}?)?\b"
    r"(?:(?:exit(?:s|ed)?|exitcode|return(?:s|ed)?|ended|crashed)[ a-z_(]{0,20}(?:code|status)?\W{0,4}(?P<code>-\d{1,2}|1[2-9]\d)"
    r"|(?:exited|killed|terminated|died|crashed)(?: (?:by|on|of|with|from|due to))?:? signal:? (?P<signal>\d+))\b"
)
RESTORING = re.compile(
    r"(?i)(?:load|restore|resume|read)_?\w*(?:checkpoint|ckpt|state)|\bresume\b|torch/distributed/checkpoint/"
    r"|torch/serialization\.py \w*load"
)
STARTING = re.compile(
    r"subprocess\.py _execute_child|\bsubprocess\.\w+\(|\bPopen\(|\bcheck_(?:output|call)\(|\bos\.exec\w+\("
)  # a program
_LAST = re.compile(r"Last error:\n(?!NCCL WARN)(.+)")
CUDA = re.compile(r"Cuda failure (?:\d+ )?'(?P<what>[^']+)'")
_EXITS = {"9": ("killed", Weight.WORD), "11": ("code", Weight.WORD), "7": ("host-memory", Weight.HINT),
          "4": ("environment", Weight.HINT)}  # fmt: skip
SAVING = re.compile(r"(?im) _?(?:save|write|dump)(?:$|_\w*$|checkpoint|state)")  # functions that write
OWN = re.compile(
    r"^(?!.*(?:/(?:site|dist)-packages/|/lib/python\d|\.pxi\b|\.pyx\b|<frozen|<string))\S"
)  # a file of the program's own
KEYS = re.compile(r"(?i)load_state_dict\(|\b\w*(?:checkpoint|ckpt|state_dict)\w*\[")  # a line that takes a checkpoint apart
WIDE = ("storage", "data")  # whose wide words, as "timed out" and "not found", any failure has
OUTSIDE = ("kernel", "watch")  # who sees processes from outside: their lines are no process's output
RAISED = ("Exception", "RuntimeError", "ValueError")  # by a program itself, where its own line is the innermost
TELLING = {"unknown": 0, "code": 1}  # causes that are named where nothing says more
SLIPS = ("NameError", "UnboundLocalError", "RecursionError")  # exceptions that only the program's text can cause
FOLLOWED = re.compile(  # a launcher's word on processes that it ended itself
    r"(?i)\b(?:clean|terminat|stopp|kill|end|cancel)\w* (?:up )?(?:the )?(?:\w+ ){0,2}(?:other|remaining|rest)\b"
)
Found = tuple[Sign, re.Match[str]]
Writer = tuple[int | None, int | None, str]


@dataclass(frozen=True)
class Evidence:
    """What a line gives away. `node` and `rank` are those it is about, `line` is by whom it was said.

    `error`: a process's exception. `firm`: the words say so, it is not inferred from the lack of others; `closed`: they mean
    nothing else.
    """

    weight: Weight
    cause: str
    time: float
    line: Line
    writer: Writer
    index: int  # of its line among those of its node
    node: int | None
    rank: int | None
    words: str
    error: bool = False
    firm: bool = True
    closed: bool = False
    groups: Mapping[str, str] = field(default_factory=dict)  # what the sign's groups matched: peer, rank, pid, joined, all


@dataclass
class Stream:
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
    steps: dict[int | None, tuple[float, float]] = field(default_factory=dict)  # by node: when it told of its last two steps
    closed: float | None = None  # when the work was said to be ended well
    streams: dict[Writer, Stream] = field(default_factory=lambda: defaultdict(Stream))

    @property
    def homes(self) -> dict[int, int | None]:
        """The node of each rank that wrote anything."""
        return {rank: node for node, rank, _ in self.streams if rank is not None}


def read(lines: Iterable[Line], book: Book) -> Record:
    """What the lines give away; those of one node are in the order in which they were written."""
    record, nodes = Record(book), defaultdict[int | None, list[Line]](list)
    for line in lines:
        nodes[line.node].append(line)
    shifts = _days(nodes)
    for node, mine in nodes.items():
        _read_node(record, mine, shifts[node])
    for writer, stream in record.streams.items():
        record.evidence += [*stream.signed, *_errors(writer, stream)]
    return record


def _days(nodes: Mapping[int | None, list[Line]]) -> dict[int | None, list[float]]:
    """For each line what to add to its clock, so that a node's times rise over midnight and the nodes' ends lie together."""
    shifts, reference = {}, None
    for node in sorted(nodes, key=lambda node: -1 if node is None else node):
        day, before, mine = 0.0, None, []
        for line in nodes[node]:
            if line.who not in OUTSIDE:
                day += DAY if before is not None and line.time < before - DAY / 2 else 0.0
                before = line.time
            mine.append(day)
        end = day + (before if before is not None else nodes[node][-1].time)
        reference = end if reference is None else reference
        apart = round((reference - end) / DAY) * DAY
        late = [line.who in OUTSIDE for line in nodes[node]]
        shifts[node] = [
            (round((end - line.time) / DAY) * DAY if out else shift) + apart
            for line, shift, out in zip(nodes[node], mine, late, strict=True)
        ]
    return shifts


def _read_node(record: Record, lines: list[Line], shifts: list[float]) -> None:
    report, own = Report(), learned(line.text for line in lines)
    for index, (line, shift) in enumerate(zip(lines, shifts, strict=True)):
        prefixed, text = (None, line.text) if line.who in OUTSIDE else strip(line.text, own)
        rank = line.rank if line.rank is not None else prefixed
        writer: Writer = (line.node, rank, line.who if line.who in OUTSIDE or rank is None else "rank")
        if rank is None and line.who == "agent" and (stamp := KERNEL.match(text)):
            writer, text = (line.node, None, "kernel"), text[stamp.end() :]
        stream, time = record.streams[writer], line.time + shift
        if TRACEBACK in text and writer[2] == "agent" and (sign := first_sign(("agent",), text.partition(TRACEBACK)[0])):
            stream.signed.append(_signed(sign, line, time, writer, index, text.strip()))  # an engine quotes the program
        if shift:
            line = replace(line, time=time)
        if stream.tracebacks.base is not None and stream.tracebacks.take(line, index, text):
            continue
        if line.node is not None:
            record.book.note(line.node, rank, text)
        if rank is None and writer[2] != "kernel" and (found := report.take(line, index, time, text, record.book)):
            stream.signed += found
        elif writer[2] not in OUTSIDE and stream.tracebacks.take(line, index, text):
            continue
        elif sign := _sign("agent" if line.who == "agent" and writer[2] == "rank" else writer[2], text):
            stream.signed.append(_signed(sign, line, time, writer, index, text.strip()))
        else:
            _note_life(record, stream, writer, index, time, text)


def _note_life(record: Record, stream: Stream, writer: Writer, index: int, time: float, text: str) -> None:
    """Remembers that a process went on."""
    if writer[2] in (*OUTSIDE, "node"):
        return
    if is_progress(text):
        stream.progress = index
        record.steps[writer[0]] = record.steps.get(writer[0], (-math.inf, -math.inf))[1], time
        if is_closing(text):
            record.closed = time
    if is_calm(text):
        stream.calm = time


def _sign(who: str, text: str) -> Found | None:
    """What a line that is no exception means, of what its writer may say."""
    if who in OUTSIDE:
        return first_sign((who, "any"), text)
    by = ("library", "any") if who == "rank" else ("library", "any", "agent")
    if daemon := DAEMON.match(text):
        return first_sign(("agent",), text[daemon.end() :]) or first_sign(("agent",), text)
    if (severe := SEVERE.match(text)) and (found := first_sign((*by, "error"), rest := text[severe.end() :])) and found[0].firm:
        return _reasoned(found, by, rest)
    if logged := LOGGED.match(text):
        text = text[logged.end() :]
        return _mild(_reasoned(first_sign((*by, "error"), text), by, text)) or _implied(f"error: {text}", by)
    text = stated(text)
    if not any(word in text for group in by for word in _words(group)):
        return _implied(text, by)
    found = first_sign(by, text)
    if (implied := _implied(text, by)) and (found is None or found[0].weight < implied[0].weight):
        found = implied
    if found is None and who == "agent" and (parts := text.split(" - ")[1:]):  # engines put one reason behind another
        return next(filter(None, (first_sign(by, part) for part in parts)), None)
    return _reasoned(found, by, text)


def _reasoned(found: Found | None, by: tuple[str, ...], text: str) -> Found | None:
    """What a line quotes as the reason of its complaint, where that is another cause: `Failed compilation: no such library`."""
    if found is None or found[0].closed or found[0].weight != Weight.WORD or ": " not in text[found[1].end() :]:
        return found
    reason = first_sign((*by, "error"), text[found[1].end() :])
    other = reason is not None and reason[0].firm and reason[0].weight == Weight.WORD and reason[0].cause != found[0].cause
    return reason and (replace(reason[0], closed=False), reason[1]) if other else found


def _implied(text: str, by: tuple[str, ...]) -> Found | None:
    """What a line means in which no library speaks: a CUDA error that another quotes, an exit code, last words."""
    if match := CUDA.search(text):
        return first_sign(("error",), f"CUDA error: {match['what']}")
    if "agent" in by and (match := ENDED.search(text)) and not FOLLOWED.search(text):
        code = int(match["signal"] or match["code"])
        rank = f" of rank {match['rank']}" if match["rank"] else ""
        return first_sign(("exit",), f"signal {abs(code) if code < 128 else code - 128}{rank}")
    if PARTING.search(text):
        return _unsure(first_sign((*by, "error"), text))
    if not COMPLAINT.search(text):
        return None
    named = QUOTED.search(text)
    inner = (first_sign((*by, "error"), named[1]) or first_sign(("program",), named[1])) if named else None
    return _mild(_firmer(inner, first_sign((*by, "error"), text)) or inner)


def _unsure(found: Found | None) -> Found | None:
    return found and (replace(found[0], firm=False, closed=False), found[1])


def _firmer(inner: Found | None, whole: Found | None) -> Found | None:
    """What an exception's message means, of its last named part and the whole: that part where it is as weighty."""
    return inner if inner and inner[0].firm and (not whole or inner[0].weight >= whole[0].weight) else whole


def stated(text: str) -> str:
    """A text without the guesses at its causes that some libraries add: they would be taken for causes."""
    match = CONJECTURE.search(text)
    return text[: match.start()] if match else text


def _mild(found: Found | None) -> Found | None:
    """What a program only logged, as a hint: it may have got over it."""
    return found and (replace(found[0], weight=min(found[0].weight, Weight.HINT), firm=False, closed=False), found[1])


@functools.cache
def _words(group: str) -> tuple[str, ...]:
    """Words of which one is in every line with a sign of this group."""
    every = {word for sign in signs().get(group, ()) for word in sign.about}
    return (*every, "NVRM", "kernel:") if group == "agent" else tuple(every)


def _signed(sign: Found, line: Line, time: float, writer: Writer, index: int, words: str) -> Evidence:
    what, match = sign
    weight, closed = what.weight, what.closed
    if weight == Weight.PROOF and writer[2] == "rank" and what.cause not in ("busy", "preempted"):
        weight, closed = Weight.WORD, False
    groups = {key: value for key, value in match.groupdict().items() if value}
    cause = f"-{what.cause}" if what.cancels else f"+{what.cause}" if what.forestalls else what.cause
    return Evidence(
        weight, cause, time, line, writer, index, writer[0], writer[1], words, firm=what.firm, closed=closed, groups=groups
    )


def _errors(writer: Writer, stream: Stream) -> Iterator[Evidence]:
    """The root of each of a process's chains of exceptions."""
    for chain in stream.tracebacks.chains:
        causes = [_error(writer, block) for block in chain]
        if found := max(causes, key=lambda one: (one.weight, one.firm, TELLING.get(one.cause, 2)), default=None):
            yield found


def _error(writer: Writer, block: Block) -> Evidence:
    line = block.line
    by = ("error", "library", "any") if line.who == "rank" else ("error", "library", "any", "agent")
    node, rank, _ = writer
    blank = Evidence(Weight.WORD, "unknown", line.time, line, writer, block.index, node, rank, block.message[0], True, False)
    text = stated(block.text)
    if last := _LAST.search(text):  # what NCCL had warned of
        text = f"{text[: last.start()]}\nNCCL WARN {last[1]}"
    sign = _firmer(first_sign(by, stated(block.inner)) if block.inner else None, first_sign(by, text))
    if block.bare and (implied := _implied(block.text, by)) and (sign is None or sign[0].weight < implied[0].weight):
        sign = implied
    where = first_sign(("frame",), block.where)
    if sign and not sign[0].firm and where and sign[0].cause in WIDE and "[Errno " not in text:
        sign = None  # what they were about, the frame tells better
    if sign and (sign[0].firm or block.name not in BUGS):
        said = next((text for text in block.message if sign[0].search(text)), block.message[0])
        found = replace(_signed(sign, line, line.time, writer, block.index, said), error=True)
        if len(firm_causes(by, stated(block.text))) > 1:
            found = replace(found, firm=False, closed=False)
        cause = _handled(found.cause, found.firm, block)
        return replace(found, cause=cause, closed=found.closed and cause == found.cause)
    if where:
        return replace(blank, cause=where[0].cause)
    if block.bare or block.aside:
        blank = replace(blank, weight=Weight.HINT)
    return _guess(blank, block, text)


def _handled(cause: str, firm: bool, block: Block) -> str:
    """What was wrong, by what was done with the file: data that is read as a checkpoint, a checkpoint that is written."""
    missing = cause in ("data", "disk") and re.search(r"\[Errno (?:2|13)\]", block.text)
    if missing and STARTING.search(f"{block.frames}\n{block.source}"):
        return "environment"
    if cause == "data" and RESTORING.search(block.frames):
        return "checkpoint"
    return "disk" if cause == "checkpoint" and not firm and SAVING.search(block.frames) else cause


def _guess(blank: Evidence, block: Block, text: str) -> Evidence:
    """An exception in which no catalogue has a word: the program's, where Python or its own line raises it, or where it argues
    about arguments; else nobody knows its cause.
    """
    if block.name == "KeyError" and KEYS.search(block.source):
        return replace(blank, cause="checkpoint")
    if block.name in PROGRAM:
        firm = not (block.bare or block.aside)
        return replace(blank, cause="code", firm=firm, closed=firm and block.name in SLIPS)
    if block.name in (*RAISED, "AssertionError") and RESTORING.search(block.frames):
        return replace(blank, cause="checkpoint")
    own = block.name in RAISED and OWN.match(block.frames.rpartition("\n")[2])
    known = own or block.name == "AssertionError" or first_sign(("program",), text)
    return replace(blank, cause="code") if known else blank


@dataclass
class Report:
    """torchrun's report of a node's first failed rank: `rank : 3 (local_rank: 1)`, `exitcode : -9 (pid: 771)`."""

    entry: int = 0
    rank: int | None = None

    def take(self, line: Line, index: int, time: float, text: str, book: Book) -> list[Evidence]:
        """What a line of it gives away; [] where it is none, or tells nothing."""
        if match := re.fullmatch(r"\s*\[(\d+)\]:", text):
            self.entry = int(match[1])
        elif match := re.match(r"\s*rank\s+: (\d+) \(local_rank", text):
            self.rank = int(match[1])
            if self.entry == 0 and line.node is not None:
                book.failed[line.node] = self.rank
        elif match := re.match(r"\s*exitcode\s+: (-?\d+)\s+\(pid: (\d+)\)", text):
            if self.rank is not None and line.node is not None:
                book.pids.setdefault((line.node, int(match[2])), self.rank)
            if self.entry == 0 and (fate := _EXITS.get(match[1].removeprefix("-"))) and match[1].startswith("-"):
                words = f"rank {self.rank} was killed by signal {match[1][1:]}"
                writer: Writer = (line.node, None, line.who)
                return [
                    Evidence(fate[1], fate[0], time, line, writer, index, line.node, self.rank, words, firm=fate[0] != "killed")
                ]  # by whom, nobody tells here
        return []


def survived(evidence: Evidence, record: Record) -> bool:
    """Whether the job went on after it: its process wrote of a step later, or others did of more than the one they were in."""
    untold = evidence.writer[2] == "kernel" and evidence.line.who == "agent"  # it stood among lines that may be anybody's
    stream = record.streams[(evidence.writer[0], None, "agent") if untold else evidence.writer]
    if stream.progress > evidence.index:
        return True
    mild = evidence.weight <= Weight.HINT or evidence.cause == "rendezvous"
    if mild and evidence.writer[2] not in OUTSIDE and not evidence.error and stream.calm > evidence.time + BREATH:
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
