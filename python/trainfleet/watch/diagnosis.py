"""From the lines of all nodes to one finding: which rank failed first, and of what.

Culprits before victims: in a job that has lost one rank all others complain, and loudest are those who only lost their peer. So
what a line weighs comes first (causes.py), and the clock only decides between lines that weigh as much: clocks of nodes differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .causes import HINT, SIGNATURES, VICTIM, WORD

DAY = 86400.0
TAIL = 8  # lines that a finding quotes
_STAMP = re.compile(r"(?:rank (\d+)|(\w+)) +(\d\d):(\d\d):(\d\d\.\d{3}) \| ?(.*)")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Warning|Interrupt|Exit|Failure|Iteration|Fault)\b.*")
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")


@dataclass(frozen=True)
class Line:
    """One line of a node's log: seconds since the job began, the rank that wrote it, or else who did (agent, kernel, node)."""

    time: float
    node: int | None
    rank: int | None
    who: str
    text: str


@dataclass(frozen=True)
class Finding:
    """What a line gives away."""

    weight: int
    line: Line
    cause: str
    node: int | None
    rank: int | None
    words: str


def read_lines(log: Path, node: int, start: int = 0, began: float = 0.0) -> list[Line]:
    """The lines of a node's log behind byte `start`; `began` is the clock (seconds of the day) when the job began."""
    try:
        text = log.read_bytes()[start:].decode(errors="replace")
    except FileNotFoundError:
        return []
    return list(parse(text.splitlines(), node, began))


def parse(lines: Iterable[str], node: int, began: float = 0.0) -> Iterator[Line]:
    """The stamped lines; one without a stamp belongs to the line before it."""
    time, rank, who = 0.0, None, "agent"
    for text in lines:
        if match := _STAMP.fullmatch(text):
            number, other, hours, minutes, seconds, text = match.groups()
            clock = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
            time, rank, who = (clock - began) % DAY, int(number) if number else None, other or "rank"
        yield Line(time, node, rank, who, text)


def diagnose(lines: Sequence[Line]) -> Finding | None:
    """The finding that explains the others; None when no line gives anything away."""
    findings = [*_signed(lines), *_exits(lines), *_tracebacks(lines)]
    if not findings:
        return None
    first = min(findings, key=lambda finding: (-finding.weight, finding.line.time))
    return _who_hangs(first, findings, lines) if first.cause == "hang" and first.weight == HINT else _ranked(first, findings)


def quote(finding: Finding, lines: Sequence[Line]) -> tuple[str, ...]:
    """The line that gave it away, with what the same rank wrote just before."""
    writer = finding.line.node, finding.line.rank, finding.line.who
    mine = [line for line in lines if (line.node, line.rank, line.who) == writer]
    end = next((place for place, line in enumerate(mine) if line is finding.line), len(mine) - 1) + 1
    return tuple(line.text for line in mine[max(0, end - TAIL) : end])


def _signed(lines: Iterable[Line]) -> Iterator[Finding]:
    """Lines with the words of a cause."""
    for line in lines:
        for signature in SIGNATURES:
            if signature.pattern.search(line.text):
                yield Finding(signature.weight, line, signature.cause, line.node, line.rank, line.text.strip())
                break


def _exits(lines: Iterable[Line]) -> Iterator[Finding]:
    """What torchrun's report says of a node's first failed rank: `rank : 3 (local_rank: 1)`, `exitcode : -9 (pid: 1)`."""
    entry, rank = 0, None
    for line in lines:
        if line.rank is not None:
            continue
        if match := re.fullmatch(r"\s*\[(\d+)\]:", line.text):
            entry = int(match[1])
        elif match := re.match(r"\s*rank\s+: (\d+) \(local_rank", line.text):
            rank = int(match[1])
        elif (match := re.match(r"\s*exitcode\s+: -(\d+) \(pid", line.text)) and entry == 0:
            cause, weight = {"9": ("killed", WORD), "11": ("code", WORD), "7": ("host-memory", HINT)}.get(match[1], ("", 0))
            if cause:
                yield Finding(weight, line, cause, line.node, rank, f"rank {rank} was killed by signal {match[1]}")


def _tracebacks(lines: Sequence[Line]) -> Iterator[Finding]:
    """Each rank's last traceback, when nothing else explains it: a bug. Those before it were survived."""
    for rank in sorted({(line.node or 0, line.rank) for line in lines if line.rank is not None}):
        mine = [line for line in lines if (line.node or 0, line.rank) == rank]
        starts = [place for place, line in enumerate(mine) if line.text.startswith("Traceback (most recent call last)")]
        if not starts:
            continue
        place = starts.pop()
        while starts and any(line.text.startswith(_CHAINED) for line in mine[starts[-1] : place]):
            place = starts.pop()
        end = next((line for line in mine[place:] if _EXCEPTION.fullmatch(line.text)), None)
        if end and not any(signature.pattern.search(end.text) for signature in SIGNATURES):
            yield Finding(WORD, end, "code", end.node, end.rank, end.text)


def _ranked(finding: Finding, findings: Sequence[Finding]) -> Finding:
    """A finding about a node gets the rank of that node that complained first, if one did."""
    if finding.cause == "lost-node" and finding.weight == HINT:
        return replace(finding, node=None)  # whoever noticed is not the one that is lost
    if finding.rank is not None or finding.cause in ("lost-node", "preempted"):
        return finding
    ranks = [other for other in findings if other.rank is not None and other.node == finding.node and other.weight > VICTIM]
    return replace(finding, rank=min(ranks, key=lambda other: other.line.time).rank) if ranks else finding


def _who_hangs(first: Finding, findings: Sequence[Finding], lines: Sequence[Line]) -> Finding:
    """Of ranks that timed out together, the one that did not even notice, or the one whose collectives are behind the others'.

    Where neither is there, nobody is named.
    """
    late = {finding.rank: finding for finding in findings if finding.cause == "hang" and finding.rank is not None}
    homes = {line.rank: line.node for line in lines if line.rank is not None}
    missing = sorted(rank for rank in homes if rank not in late and rank is not None)
    behind = {rank: _sequence(finding.line.text) for rank, finding in late.items()}
    if 0 < len(missing) < len(late):
        who, why = missing[0], f"rank {missing[0]} never came to the collective that the others waited in"
    elif len(set(behind.values())) > 1:
        who = min(behind, key=lambda rank: behind[rank])
        why = f"rank {who} is at collective {behind[who]}, the others at {max(behind.values())}"
    else:
        return replace(first, node=None, rank=None)
    return replace(first, node=homes[who], rank=who, words=why)


def _sequence(text: str) -> int:
    match = re.search(r"SeqNum=(\d+)", text)
    return int(match[1]) if match else 0
