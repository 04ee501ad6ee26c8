"""Classifies all nodes' log lines as part of a traceback, part of a launcher's report, evidence of
a cause, or progress. Exceptions are classified by message, by the code that raised them, and by the
operation that failed.
"""

from __future__ import annotations

import errno
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from .causes import Weight, firm_causes, first_sign
from .evidence import (
    OUTSIDE,
    Book,
    Evidence,
    Found,
    ProcessLines,
    Record,
    Writer,
    firmer,
    heavier,
    implied,
    meant,
    signed,
    stated,
)
from .lines import DAY, TRACEBACK, LogLine, is_calm, is_closing, is_progress, learned, strip
from .tracebacks import BUGS, PROGRAM, PrintedException

# kernel log line, recognized by its syslog or dmesg prefix or by a driver's name
KERNEL = re.compile(
    r"^(?:(?:<\d+>)?\[ *\d{1,8}\.\d+\] |\[\w{3} \w{3} +\d+ [\d:]+ \d{4}\] |(?:\w{3} +\d+ [\d:]+ "
    r")?(?:\S+ )?kernel: |kern: +\w+: +(?:\[\S+\]: )?|"
    r"(?=NVRM: |Lustre(?:Error)?: |EXT4-fs |XFS \(|nvme nvme\d|blk_update_request: |pcieport "
    r"\S+: |mce: |EDAC |nfs: server |"
    r"infiniband \w+: |efa \S+: |mlx5_core \S+: |neuron:\w+: |nvidia\S* \S*: "
    r"|oom-kill:|(?:Memory cgroup o|O)ut of memory: Kill|INFO: task |systemd-oomd))"
)
# launcher line about the rank that failed first: torchrun, mp.spawn, MPI, Composer
_FAILED = re.compile(
    r"\s*rank\s+: (\d+) \(local_rank|-- Process (\d+) terminated with the following"
    r"|MPI_ABORT was invoked on rank (\d+)\b|mpi\S+ noticed that process rank (\d+)\b"
    r"|\s+Process name: \[\[\d+,\d+\],\s*(\d+)\]|ERROR:composer\S*:Rank (\d+) crashed"
)
_FATE = re.compile(r"\s*(?:exitcode\s+: -|traceback : Signal )")
AGENTS = ("agent", "node")  # writers that print launchers' reports
_EXITS = {
    "9": ("killed", Weight.WORD),
    "11": ("code", Weight.WORD),
    "7": ("host-memory", Weight.HINT),
    "4": ("environment", Weight.HINT),
}


def read(lines: Iterable[LogLine], book: Book) -> Record:
    """Collects the evidence in the lines. Each node's lines must be in the order in which they were
    written.
    """
    record, nodes = Record(book), defaultdict[int | None, list[LogLine]](list)
    for line in lines:
        nodes[line.node].append(line)
    shifts = _days(nodes)
    for node, mine in nodes.items():
        _read_node(record, mine, shifts[node])
    for writer, stream in record.streams.items():
        record.evidence += [*stream.signed, *errors(writer, stream)]
    return record


def _days(nodes: Mapping[int | None, list[LogLine]]) -> dict[int | None, list[float]]:
    """Returns each line's day offset, in seconds, to add to its clock time. The offsets make each
    node's times increase past midnight and align the ends of the nodes' logs.
    """
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


def _read_node(record: Record, lines: list[LogLine], shifts: list[float]) -> None:
    report, own = TorchrunReport(), learned(line.text for line in lines)
    for index, (line, shift) in enumerate(zip(lines, shifts, strict=True)):
        prefixed, text = (None, line.text) if line.who in OUTSIDE else strip(line.text, own)
        rank = prefixed if line.rank is None else line.rank
        who = line.who if rank is None or line.who in OUTSIDE else "rank"
        if rank is None and who == "agent" and (stamp := KERNEL.match(text)):
            who, text = "kernel", text[stamp.end() :]
        if shift:
            line = replace(line, time=line.time + shift)
        _read_line(record, report, line, (line.node, rank, who), index, text)


def _read_line(
    record: Record, report: TorchrunReport, line: LogLine, writer: Writer, index: int, text: str
) -> None:
    """Classifies a line. `text` is the line without its prefixes."""
    stream, (node, rank, who) = record.streams[writer], writer
    parser = stream.tracebacks
    # Text before the traceback is a scheduler message that quotes the program.
    before = text.partition(TRACEBACK)[0] if who == "agent" and TRACEBACK in text else ""
    if sign := first_sign(("agent",), before):
        stream.signed.append(signed(sign, line, writer, index, text.strip()))
    if parser.base is not None and parser.take(line, index, text):
        return
    record.book.note(node, rank, text)
    if (found := report.take(line, writer, index, text, record.book)) is not None:
        stream.signed += found
        return
    if who not in OUTSIDE and parser.take(line, index, text):
        return
    if sign := meant(line.who if who == "rank" else who, text):
        stream.signed.append(signed(sign, line, writer, index, text.strip()))
    else:
        _note_life(record, writer, index, line.time, text)


def _note_life(record: Record, writer: Writer, index: int, time: float, text: str) -> None:
    """Records signs of life: progress, and lines that report no problem."""
    if writer[2] in (*OUTSIDE, "node"):
        return
    if is_progress(text):
        record.streams[writer].progress = index
        record.steps[writer[0]] = record.steps.get(writer[0], (-math.inf, -math.inf))[1], time
        if is_closing(text):
            record.closed = time
    if is_calm(text):
        record.streams[writer].calm = time


@dataclass
class TorchrunReport:
    """A launcher's report on a node's first failed rank, such as torchrun's `rank : 3 (local_rank:
    1)`, `exitcode : -9 (pid: 771)`.
    """

    entry: int = 0
    rank: int | None = None

    def take(
        self, line: LogLine, writer: Writer, index: int, text: str, book: Book
    ) -> list[Evidence] | None:
        """Returns the evidence in a line, or None if other patterns may match it. Ignores the ranks
        listed after the first failed one, because the launcher itself killed them.
        """
        if writer[2] not in AGENTS:
            return None
        if match := re.fullmatch(r"\s*\[(\d+)\]:", text):
            self.entry = int(match[1])
        elif match := _FAILED.match(text):
            self.rank = int(next(filter(None, match.groups())))
            if self.entry == 0:
                book.failed.setdefault(line.node, self.rank)
        elif match := re.match(r"\s*exitcode\s+: (-?)(\d+)\s+\(pid: (\d+)\)", text):
            if self.rank is not None:
                book.pids[line.node, int(match[3])] = self.rank
            if self.entry == 0 and (found := self._first(line, writer, index, *match.groups()[:2])):
                return [found]
        return [] if self.entry and _FATE.match(text) else None

    def _first(
        self, line: LogLine, writer: Writer, index: int, sign: str, code: str
    ) -> Evidence | None:
        """Returns the evidence in the first failed rank's exit code, if any."""
        if not sign:  # the rank raised an exception, which may be in another log
            words = f"rank {self.rank} exited with code {code}; its error is not in this log"
            found = Evidence(Weight.VICTIM, "unknown", line, writer, index, self.rank, words)
            return replace(found, error=True, firm=False)
        if (fate := _EXITS.get(code)) is None:
            return None
        words = f"rank {self.rank} was killed by signal {code}"
        # The report does not show who killed the rank.
        found = Evidence(fate[1], fate[0], line, writer, index, self.rank, words)
        return replace(found, firm=fate[0] != "killed")


RESTORING = re.compile(
    r"(?i)(?:load|restore|resume|read)_?\w*(?:checkpoint|ckpt|state)|\bresume\b|(?:torch/distributed/checkpoint|/orbax|/tensorstore)/"
    r"|torch/serialization\.py \w*load"
)
# code that launches a program
STARTING = re.compile(
    r"subprocess\.py "
    r"_execute_child|\bsubprocess\.\w+\(|\bPopen\(|\bcheck_(?:output|call)\(|\bos\.exec\w+\("
)
# errno(3) numbers as printed by Rust and C
_NUMBER = re.compile(
    r"\bOs \{ code: (?P<code>\d+),|\(os error (?P<number>\d+)\)|(?<![\w.])(?P<name>E[A-Z]{3,12})\b"
)
_LAST = re.compile(r"Last error:\n(?!NCCL WARN)(.+)")
# functions that write files
SAVING = re.compile(r"(?im) _?(?:save|write|dump)(?:$|_\w*$|checkpoint|state)")
# one of the program's own files
OWN = re.compile(
    r"^(?!.*(?:/(?:site|dist)-packages/|/lib/python\d|\.pxi\b|\.pyx\b|<frozen|<string))\S"
)
# library file, except for libraries that call back into the program
LIBRARY = re.compile(
    r"/(?:site|dist)-packages/(?!torch/(?:nn/modules/module|multiprocessing|utils/data)|torch_xla)"
)
MISFIT = re.compile(  # errors in a library that expects another version of its dependency
    r"unexpected keyword argument|takes (?:from )?\d+ .{0,30}positional arguments? but"
    r"|(?:module|type object) '[\w.]+' has no attribute"
    r"|'(?!NoneType|DataFrame|Series|Namespace|Tensor|Parameter|Dataset)[A-Z][a-z]\w+' object "
    r"has no attribute"
)
# source lines that read values from a checkpoint
KEYS = re.compile(r"(?i)load_state_dict\(|\b\w*(?:checkpoint|ckpt|state_dict)\w*\[")
# Argument checks in torch and numpy. The catalogues cover their other failures.
CALLED = re.compile(
    r"/(?:site|dist)-packages/(?:torch/(?:functional|_tensor\.py|autograd|optim|amp|linalg|fft|nn/(?!parallel))|numpy/|einops/)"
)
# Causes with broad patterns such as "timed out" and "not found", which match many failures.
WIDE = ("storage", "data")
# Exceptions that count as the program's own if its code is the innermost frame.
RAISED = ("Exception", "RuntimeError", "ValueError")
MORE = 5  # maximum number of lines of an exception's message to quote
TELLING = {"unknown": 0, "code": 1}  # causes of last resort, in ascending order of preference
# Exceptions that only a bug in the source code can cause.
SLIPS = ("NameError", "UnboundLocalError", "RecursionError")


def errors(writer: Writer, stream: ProcessLines) -> Iterator[Evidence]:
    """Yields the most likely root cause of each exception chain in a process's output."""
    for chain in stream.tracebacks.chains:
        causes = ((_error(writer, block, block is chain[0]), block) for block in chain)
        found, block = max(causes, key=lambda pair: _telling(pair[0]))
        groups = {**found.groups, "rank": block.rank} if block.rank else found.groups
        yield replace(found, groups=groups, more=tuple(block.message[1:MORE]))


def _telling(one: Evidence) -> tuple[bool, Weight, bool, int]:
    return not one.guessed, one.weight, one.firm, TELLING.get(one.cause, 2)


def _error(writer: Writer, block: PrintedException, root: bool) -> Evidence:
    line, text = block.line, numbered(stated(block.text))
    by = ("error", "library", "any") if line.who == "rank" else ("error", "library", "any", "agent")
    if last := _LAST.search(text):  # the NCCL warning that the exception quotes
        text = f"{text[: last.start()]}\nNCCL WARN {last[1]}"
    where = first_sign(("frame",), block.where)
    if sign := _sign(block, text, by, where):
        return _named(sign, writer, block, by)
    weight = Weight.WORD if where or not (block.bare or block.aside) else Weight.HINT
    said = block.message[0]
    blank = Evidence(weight, "unknown", line, writer, block.index, writer[1], said, True, False)
    if where:
        return replace(blank, cause=where[0].cause)
    return replace(_guess(blank, block, text, root), guessed=True)


def _sign(
    block: PrintedException, text: str, by: tuple[str, ...], where: Found | None
) -> Found | None:
    """Returns the pattern that an exception's message matches, unless the pattern is broad and the
    exception's class or frame is more informative.
    """
    sign = firmer(first_sign(by, stated(block.inner)), first_sign(by, text))
    if block.bare:
        sign = heavier(sign, implied(block.text, by))
    if sign is None or sign[0].firm:
        return sign
    vague = where and sign[0].cause in WIDE and "[Errno " not in text
    return None if vague or block.name in BUGS else sign


def _named(sign: Found, writer: Writer, block: PrintedException, by: tuple[str, ...]) -> Evidence:
    """Creates evidence from the pattern that an exception matches."""
    # The pattern may require a prefix that the quoted exception lacks.
    lines = (one for one in block.message if sign[0].search(f"{one}\nNCCL WARN {one}"))
    said = next(lines, block.message[0])
    found = replace(signed(sign, block.line, writer, block.index, said), error=True)
    if len(firm_causes(by, stated(block.text))) > 1:
        found = replace(found, firm=False, closed=False)
    cause = _handled(found.cause, found.firm, block)
    return replace(found, cause=cause, closed=found.closed and cause == found.cause)


def numbered(text: str) -> str:
    """Adds Python's errno format to errno(3) numbers printed by other languages."""
    return _NUMBER.sub(_number, text)


def _number(match: re.Match[str]) -> str:
    told = match["code"] or match["number"] or getattr(errno, match["name"] or "", None)
    return f"{match[0]} [Errno {told}]" if told else match[0]


def _handled(cause: str, firm: bool, block: PrintedException) -> str:
    """Refines a cause by the operation that failed. A missing file counts as an environment failure
    if it is a program being launched. A data error during a restore counts as a checkpoint failure.
    A failed checkpoint write counts as a disk failure.
    """
    missing = cause in ("data", "disk") and re.search(r"\[Errno (?:2|13)\]", block.text)
    if missing and STARTING.search(f"{block.frames}\n{block.source}"):
        return "environment"
    if cause == "data" and RESTORING.search(block.frames):
        return "checkpoint"
    return "disk" if cause == "checkpoint" and not firm and SAVING.search(block.frames) else cause


def _guess(blank: Evidence, block: PrintedException, text: str, root: bool) -> Evidence:
    """Classifies an exception that matches no catalogue pattern. Blames the program if Python or
    the program's own code raised it, or if it concerns arguments. Otherwise, the cause is unknown.
    """
    if block.panicked:
        return replace(blank, cause="code")
    if block.name == "KeyError" and (KEYS.search(block.source) or "state_dict" in text):
        return replace(blank, cause="checkpoint")
    if block.name in PROGRAM and _misfits(block, text):
        return replace(blank, cause="environment")
    if block.name in PROGRAM:
        firm = blank.weight == Weight.WORD
        return replace(blank, cause="code", firm=firm, closed=firm and block.name in SLIPS)
    if block.name in (*RAISED, "AssertionError") and RESTORING.search(block.frames):
        return replace(blank, cause="checkpoint")
    return replace(blank, cause="code") if _is_own(block, text, root) else blank


def _is_own(block: PrintedException, text: str, root: bool) -> bool:
    """Returns whether the program's own code raised the exception, or it concerns arguments."""
    frame = block.frames.rpartition("\n")[2]
    raised = block.name in RAISED and (CALLED.search(frame) or (root and OWN.match(frame)))
    checked = block.name == "AssertionError" or (block.name == "ValueError" and block.frames)
    return bool(raised or checked or first_sign(("program",), text))


def _misfits(block: PrintedException, text: str) -> bool:
    """Returns whether a library failed during its import or because of an incompatible dependency
    version.
    """
    frames = block.frames.split("\n")
    importing = sum(frame.endswith(" <module>") for frame in frames) > 1
    return LIBRARY.search(frames[-1]) is not None and (importing or MISFIT.search(text) is not None)
