"""Diagnoses a failure from all nodes' log lines: which rank failed first, and why.

`diagnose` returns None if the lines do not show a cause.

Rules of evidence, in order:
1. An error is not the cause if its process survived it: if that process or others reported steps
   later, or if the error was retracted.
2. A process's last exception counts. If it names no cause (RuntimeError), an earlier message from a
   library, or from the kernel about a file system, takes precedence. A failed mount explains a
   missing file.
3. Lines from a machine (kernel, scheduler, watchdog) are proof. A rank's lines never are, because
   they may quote anything.
4. Lines that name a cause come next, then hints. Ranks that only lost a peer come last, even though
   they report errors first and most often.
5. Among equals, a named cause beats an unknown one. Ties go to the node that most others blame,
   then to the earliest line.
6. Time is only the last tiebreaker, because node clocks differ. Around midnight, they may be off by
   a whole day.
7. The rank that wrote a line is not necessarily to blame. A PID, rank, host or address in the line
   may identify another one. Victims only count as votes against the peer that most of them lost.
   When ranks time out together, the one that did not time out or has fallen behind is blamed.
8. A finding is certain if a machine reports it, or if a process reports it unambiguously (`closed`
   in the catalogues). It is uncertain if there is a competing cause, or if the same process named
   another cause shortly before. Weak evidence is reported as likely. Without evidence, no cause is
   named. An exception that matches no pattern is blamed on the program if Python or the program's
   own code raised it, or if it is about arguments. Otherwise, its cause is `unknown`, and any named
   cause takes precedence. The finding then only identifies and quotes the rank that failed first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..trust import untrusted_input
from .causes import Weight
from .evidence import (
    ENDED,
    OUTSIDE,
    SKEW,
    Book,
    Evidence,
    Record,
    most_blamed,
    plain,
    survived,
    votes,
)
from .lines import MOST, LogLine, parse, read_lines
from .log_reader import TELLING, read

__all__ = ["Diagnosis", "LogLine", "diagnose", "parse", "quote", "read_lines"]
JUST_BEFORE = 60.0  # maximum seconds between a library's message and the exception that it explains
TOGETHER = 5.0  # maximum seconds between related exceptions of one process
# Pairs of causes: a library's message with the first cause explains an exception with the second.
EXPLAINS = (("mount", "data"), ("environment", "compiler"))
TAIL = 8  # maximum number of lines to quote in a finding
_PID = re.compile(r"\b(?:pid[=:]? ?|[Pp]rocess )(\d+)")
_RANK = re.compile(
    r"(?i)^[^\]]{0,60}\brank[ =:]?(\d+)\]|(?:^|: )rank "
    r"(\d+):|\b(?:error|exception|failed|failure) (?:on|in) rank (\d+)\b"
)
# Causes that affect a whole node or job, so no rank is blamed.
OF_A_NODE = (
    "lost-node",
    "preempted",
    "cancelled",
    "dependency",
    "rendezvous",
    "busy",
    "capacity",
    "quota",
    "request",
)


AGENTS = ((None, "agent"), (None, "node"))  # (rank, type) of the writers that every node has


@dataclass(frozen=True)
class Diagnosis:
    """Explanation of a failure. `sure` means certain enough to act on. `nodes` contains all nodes
    that show the same cause. `more` contains further lines of a multi-line exception message.
    """

    weight: Weight
    line: LogLine
    cause: str
    node: int | None
    rank: int | None
    words: str
    sure: bool = False
    nodes: frozenset[int | None] = frozenset()
    more: tuple[str, ...] = ()


def diagnose(
    lines: Iterable[LogLine],
    pids: Mapping[tuple[int | None, int], int] | None = None,
    hosts: Mapping[str, int] | None = None,
    nodes: int = 0,
) -> Diagnosis | None:
    """Returns the explanation of a failure, or None if no line shows a cause.

    `pids` maps (node, PID) to ranks. `hosts` maps host names and addresses to nodes. `nodes` is the
    node count.
    """
    book = Book({plain(name): node for name, node in (hosts or {}).items()}, dict(pids or {}))
    record = read(lines, book)
    heard = [one for one in _uncancelled(record.evidence) if not survived(one, record)]
    standing = settle(heard)
    if not standing:
        return None
    counted = votes(standing, book)
    best = _nearer(min(standing, key=lambda one: _order(one, counted)), standing)
    node, rank, words = _whom(best, standing, record, counted, nodes)
    sure = best.closed and _is_uncontested(best, standing, heard)
    alike = frozenset(one.node for one in standing if one.cause == best.cause) - {None}
    return Diagnosis(best.weight, best.line, best.cause, node, rank, words, sure, alike, best.more)


def _is_uncontested(
    best: Evidence, standing: Sequence[Evidence], heard: Sequence[Evidence]
) -> bool:
    """Returns whether `best` has no rival: equally strong evidence for another cause, including an
    error that the same process reported shortly before.
    """
    own = (one for one in heard if one.writer == best.writer)
    near = (one for one in own if abs(one.time - best.time) < JUST_BEFORE)
    rivals = (one for one in [*standing, *near] if one.firm and one.cause != best.cause)
    rival = any(one.weight >= best.weight and one.time < best.time + SKEW for one in rivals)
    return best.weight >= Weight.WORD and not rival


def _order(one: Evidence, counted: Counter[int]) -> tuple[int, bool, bool, int, float, int, int]:
    blamed = counted[one.node] if one.node is not None else 0
    rank, node = (-1 if number is None else number for number in (one.rank, one.node))
    return -one.weight, not one.firm, one.cause == "unknown", -blamed, one.time, rank, node


def _nearer(best: Evidence, standing: Sequence[Evidence]) -> Evidence:
    """Refines a cause using the same node's kernel log. An exception without a clear cause is
    blamed on a file system or disk error from around the same time. A killed process counts as out
    of host memory if the kernel counted an OOM kill. A storage failure becomes a disk failure if
    the kernel logged disk errors.
    """
    kernel = [one for one in standing if one.writer == (best.node, None, "kernel")]
    disks = [one for one in kernel if one.cause in ("storage", "disk")]
    if (best.error, best.firm) == (True, False) and best.cause in TELLING:
        return [best, *(one for one in disks if abs(one.time - best.time) < JUST_BEFORE)][-1]
    if best.cause == "killed" and any(one.words.startswith("vmstat: oom_kill") for one in kernel):
        return replace(
            best,
            cause="host-memory",
            words=f"{best.words}; the node's count of out-of-memory kills increased",
        )
    disk = best.cause == "storage" and any(one.cause == "disk" for one in disks)
    return replace(best, cause="disk") if disk else best


def _uncancelled(evidence: Sequence[Evidence]) -> list[Evidence]:
    """Returns the evidence that indicates a cause, was not retracted, and is not merely a
    consequence of another failure.
    """
    marks = [one for one in evidence if one.cause[0] in "-+"]
    meant = (one for one in evidence if one.cause[0] not in "-+" and one.cause != "none")
    return [one for one in meant if not any(_annuls(mark, one) for mark in marks)]


def _annuls(mark: Evidence, one: Evidence) -> bool:
    if mark.cause[1:] != one.cause or mark.node != one.node:
        return False
    return (
        mark.time >= one.time
        if mark.cause[0] == "-"
        else mark.index < one.index and one.weight <= Weight.HINT
    )


def settle(evidence: Sequence[Evidence]) -> list[Evidence]:
    """Discards a process's other evidence if its last exception names a cause. Keeps proof and any
    message that explains the exception.
    """
    by_writer: dict[object, list[Evidence]] = {}
    for one in evidence:
        by_writer.setdefault(one.writer, []).append(one)
    return [one for mine in by_writer.values() for one in _last_words(mine)]


def _last_words(mine: list[Evidence]) -> list[Evidence]:
    errors = [one for one in mine if one.error]
    last = _telling(errors) if errors else None
    if last is None or last.weight == Weight.VICTIM:
        return mine
    said = [one for one in mine if not one.error]
    proof = [one for one in said if one.weight == Weight.PROOF]
    if last.firm:
        explained = [one for one in said if (one.cause, last.cause) in EXPLAINS]
        return [*proof, *explained, last]
    recent = [one for one in said if one.time > last.time - JUST_BEFORE]
    explained = [one for one in recent if one.weight >= last.weight]
    return [*proof, *explained] if explained else [last, *said]


def _telling(errors: list[Evidence]) -> Evidence:
    """Returns the most specific of a process's last exceptions, or else the last exception that
    named a cause.
    """
    end = max(errors, key=lambda one: one.index)
    last = max(
        (one for one in errors if one.time > end.time - TOGETHER),
        key=lambda one: (one.weight, one.firm, one.cause != "unknown", one.index),
    )
    if last.cause != "unknown":
        return last
    named = [one for one in errors if one.cause != "unknown" and one.weight > Weight.VICTIM]
    return [last, *named][-1]


def _whom(
    best: Evidence, standing: Sequence[Evidence], record: Record, counted: Counter[int], nodes: int
) -> tuple[int | None, int | None, str]:
    """Returns the node and rank to blame, and a description of the failure."""
    if best.cause == "victim":
        return most_blamed(counted), None, _loss(standing, counted) or best.words
    if (rank := untrusted_input.whole(best.groups.get("rank", ""), MOST)) is not None:
        return record.homes.get(rank, _home(best)), rank, best.words
    if best.cause == "hang" and best.weight == Weight.HINT and best.writer[2] != "watch":
        return _who_hangs(best, standing, record)
    if best.cause == "rendezvous":
        alike = any(one.cause == best.cause and one.writer != best.writer for one in standing)
        return (*_absent(best, record, nodes, alike), best.words)
    return (*_accused(best, standing, record, counted), best.words)


def _home(best: Evidence) -> int | None:
    """Returns the writer's node if a rank that the line names must have run there. This holds for
    lines from outside observers, or about a process that was killed or exited.
    """
    ended = ENDED.search(best.words) and " on node " not in best.words
    here = best.writer[2] in OUTSIDE or best.cause == "killed" or ended
    return best.node if here else None


def _accused(
    best: Evidence, standing: Sequence[Evidence], record: Record, counted: Counter[int]
) -> tuple[int | None, int | None]:
    """Returns the node and rank to blame for a line that names no rank."""
    peer, blamed = best.groups.get("peer"), most_blamed(counted)
    named = record.book.node_of(peer)
    if peer and best.cause == "host-memory" and named is None:
        return best.node, None
    if peer and best.cause in ("lost-node", "preempted", "host-memory"):
        return named, None
    if peer and best.cause == "fabric" and blamed is not None and counted[blamed] > 1:
        return blamed, None
    if best.cause == "code" and "mismatch between collectives" in best.words:
        return None, None
    return best.node, _rank_of(best, standing, record)


def _rank_of(best: Evidence, standing: Sequence[Evidence], record: Record) -> int | None:
    """Returns the rank to blame on the evidence's node: the one that the line identifies by PID or
    number, or else the first rank that failed.
    """
    if best.rank is not None or best.cause in OF_A_NODE:
        return best.rank
    match = _PID.search(best.words)
    if match and (rank := record.book.pids.get((best.node, int(match[1])))) is not None:
        return rank
    if match := _RANK.search(best.words):
        return untrusted_input.whole(match[match.lastindex or 0], MOST)
    return _failed_on(best, standing, record.book)


def _failed_on(best: Evidence, standing: Sequence[Evidence], book: Book) -> int | None:
    """Returns the first rank that failed on the evidence's node. Sources are the launcher's report,
    the ranks' errors, or the launcher's local rank, which equals the rank in a single-node job.
    """
    outside = best.writer[2] == "kernel"
    if not outside and best.node in book.failed:
        return book.failed[best.node]
    mine = (one for one in standing if one.node == best.node and one.rank is not None)
    failed = [(one.time, one.rank) for one in mine if one.weight > Weight.VICTIM]
    if failed and (outside or len({rank for _, rank in failed}) == 1):
        return min(failed)[1]
    return book.local[0] if len(book.local) == 1 else None


def _loss(standing: Sequence[Evidence], counted: Counter[int]) -> str:
    """Describes the node that disappeared and how many others lost it, or returns "" if no line
    names a single peer.
    """
    node = most_blamed(counted)
    if node is not None:
        return f"node {node} disappeared; {counted[node]} other nodes lost their connections to it"
    peers = Counter(plain(one.groups["peer"]) for one in standing if "peer" in one.groups)
    return (
        f"the peer {peers.most_common(1)[0][0]} disappeared, according to {peers.total()} log lines"
        if len(peers) == 1
        else ""
    )


def _absent(
    best: Evidence, record: Record, nodes: int, alike: bool
) -> tuple[int | None, int | None]:
    """Returns the only node that did not join the rendezvous, or the only rank that reports a
    failed rendezvous. Returns (None, None) if there is not exactly one.

    A node counts as missing if neither its ranks nor its launcher left log lines. `alike` means
    that other writers report the same failure.
    """
    agents = {node for node, rank, who in record.streams if (rank, who) in AGENTS}
    here = {node for node in {*record.homes.values(), *agents} if node is not None}
    if "joined" not in best.groups:
        return (best.node, best.rank) if best.rank is not None and not alike else (None, None)
    joined, every = (
        untrusted_input.whole(best.groups[name], MOST) or 0 for name in ("joined", "all")
    )
    of = nodes or (every if 1 < len(here) <= joined < every and max(here) < every else 0)
    missing = sorted(set(range(of)) - here)
    return (missing[0], None) if len(missing) == 1 else (None, None)


def _who_hangs(
    best: Evidence, standing: Sequence[Evidence], record: Record
) -> tuple[int | None, int | None, str]:
    """Returns the node and rank to blame for a collective timeout, and the reason. The blamed rank
    is the one that did not time out, or whose collectives are behind.

    Returns None for node and rank if no rank stands out.
    """
    waited = sorted(
        (one for one in standing if one.cause == "hang" and one.rank is not None),
        key=lambda one: _sequence(one.line.text),
    )
    late = {one.rank: one for one in waited}
    homes = record.homes
    missing = sorted(rank for rank in homes if rank not in late)
    behind = {rank: number for rank, one in late.items() if (number := _sequence(one.line.text))}
    if 0 < len(missing) < len(late):
        who = missing[0]
        why = f"rank {missing[0]} never joined the collective that the others waited for"
    elif len(set(behind.values())) > 1:
        who = min((rank for rank in behind if rank is not None), key=lambda rank: behind[rank])
        why = f"rank {who} is at collective {behind[who]}; the others are at {max(behind.values())}"
    else:
        return None, None, best.words
    return homes.get(who), who, why


def _sequence(text: str) -> int:
    match = re.search(r"SeqNum=(\d+)", text)
    return int(match[1]) if match else 0


def quote(finding: Diagnosis, lines: Sequence[LogLine]) -> tuple[str, ...]:
    """Returns the writer's last lines, up to the line that showed the cause and the rest of its
    message.
    """
    writer = finding.line.node, finding.line.rank, finding.line.who
    mine = [line for line in lines if (line.node, line.rank, line.who) == writer]
    ends = (index for index, line in enumerate(mine) if line.text == finding.line.text)
    end = next(ends, len(mine) - 1) + 1
    return (*(line.text for line in mine[max(0, end - TAIL) : end]), *finding.more)
