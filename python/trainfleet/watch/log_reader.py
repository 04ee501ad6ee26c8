"""Reads all nodes' log lines, and classifies each one as part of a traceback, part of a launcher's
report, evidence of a cause, or progress.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from .causes import Weight, first_sign
from .evidence import OUTSIDE, Book, Evidence, Record, Writer, meant, signed
from .exception_classifier import errors
from .lines import DAY, TRACEBACK, LogLine, is_calm, is_closing, is_progress, learned, strip

# kernel log line, recognized by its syslog or dmesg prefix or by a driver's name
KERNEL = re.compile(
    r"^(?:(?:<\d+>)?\[ *\d{1,8}\.\d+\] |\[\w{3} \w{3} +\d+ [\d:]+ \d{4}\] |(?:\w{3} +\d+ [\d:]+ "
    r")?(?:\S+ )?kernel: |kern: +\w+: +(?:\[\S+\]: )?|"
    r"(?=NVRM: |Lustre(?:Error)?: |EXT4-fs |XFS \(|nvme nvme\d|blk_update_request: |pcieport "
    r"\S+: |mce: |EDAC |nfs: server |"
    r"infiniband \w+: |efa \S+: |mlx5_core \S+: |neuron:\w+: |nvidia\S* \S*: "
    r"|oom-kill:|(?:Memory cgroup o|O)ut of memory: Kill|INFO: task |systemd-oomd))"
)
# launcher line about the rank that failed first: torchrun, mp.spawn, MPI
_FAILED = re.compile(
    r"\s*rank\s+: (\d+) \(local_rank|-- Process (\d+) terminated with the following"
    r"|MPI_ABORT was invoked on rank (\d+)\b|mpi\S+ noticed that process rank (\d+)\b"
    r"|\s+Process name: \[\[\d+,\d+\],\s*(\d+)\]"
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
    """Returns the seconds to add to each line's clock time, in whole days. Makes each node's times
    increase past midnight, and aligns the ends of the nodes' logs.
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
    """Classifies a line. `text` follows the line's prefixes."""
    stream, (node, rank, who) = record.streams[writer], writer
    parser = stream.tracebacks
    # Text before the traceback is a scheduler message that quotes the program.
    before = text.partition(TRACEBACK)[0] if who == "agent" and TRACEBACK in text else ""
    if sign := first_sign(("agent",), before):
        stream.signed.append(signed(sign, line, writer, index, text.strip()))
    if parser.base is not None and parser.take(line, index, text):
        return
    record.book.note(node, rank, text)
    if who in AGENTS and (found := report.take(line, writer, index, text, record.book)) is not None:
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
        """Returns the evidence in a line, or None if other patterns may match it.

        The launcher itself kills the ranks that it lists after the first failed one.
        """
        if match := re.fullmatch(r"\s*\[(\d+)\]:", text):
            self.entry = int(match[1])
        elif match := _FAILED.match(text):
            self.rank = int(next(filter(None, match.groups())))
            if self.entry == 0:
                book.failed.setdefault(line.node, self.rank)
        elif match := re.match(r"\s*exitcode\s+: (-?)(\d+)\s+\(pid: (\d+)\)", text):
            if self.rank is not None:
                book.pids.setdefault((line.node, int(match[3])), self.rank)
            if self.entry == 0 and (found := self._first(line, writer, index, *match.groups()[:2])):
                return [found]
        return [] if self.entry and _FATE.match(text) else None

    def _first(
        self, line: LogLine, writer: Writer, index: int, sign: str, code: str
    ) -> Evidence | None:
        """Returns the evidence in the first failed rank's exit code, if any."""
        if not sign:  # an exception, which may be in another log
            words = f"rank {self.rank} exited with code {code}; its error is not in this log"
            found = Evidence(Weight.VICTIM, "unknown", line, writer, index, self.rank, words)
            return replace(found, error=True, firm=False)
        if (fate := _EXITS.get(code)) is None:
            return None
        words = f"rank {self.rank} was killed by signal {code}"
        # The report does not show who killed the rank.
        found = Evidence(fate[1], fate[0], line, writer, index, self.rank, words)
        return replace(found, firm=fate[0] != "killed")
