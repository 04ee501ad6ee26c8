"""The verdict: who failed first, of what, its last words, what was done about it, and what to type."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .. import runs
from ..backends.base import Status
from ..plan.request import Request
from ..watchdog import Alarm
from .causes import CAUSES, Cause
from .diagnosis import Finding, Line, diagnose, quote, read_lines

TAIL = 12  # lines
TRACEBACK = "Traceback (most recent call last):"
OURS = re.compile(r"^(trainfleet\.\S+\.)?((Data|Run|Backend|Config|Checkpoint|Trainfleet)Error|Broken|BadText): ")


@dataclass(frozen=True)
class Mark:
    """A moment before a job: what is older, in time or in the logs, has no part in its verdict."""

    time: float
    ends: Mapping[Path, int]

    @property
    def clock(self) -> float:
        """Seconds of the local day, as stamps in logs have it, less a minute for clocks that go behind."""
        local = time.localtime(self.time - 60)
        return local.tm_hour * 3600 + local.tm_min * 60 + local.tm_sec + self.time % 1


def mark(request: Request) -> Mark:
    """This moment."""
    return Mark(time.time(), {command.log: command.log.stat().st_size for command in request.commands if command.log.exists()})


@dataclass(frozen=True)
class Verdict:
    """The one block that a user reads when something has died."""

    cause: str  # a key of CAUSES
    words: str
    node: int | None
    rank: int | None
    host: str
    lines: tuple[str, ...]
    next: str
    done: str = ""

    @property
    def who(self) -> str:
        place = f"node {self.node}" + (f" ({self.host})" if self.host else "") if self.node is not None else ""
        return " on ".join(filter(None, (f"rank {self.rank}" if self.rank is not None else "", place))) or "the job"

    @property
    def kind(self) -> Cause:
        return CAUSES[self.cause]

    def __str__(self) -> str:
        said = [line for line in self.lines if line != self.words]
        quoted = [f"  | {line}" for line in said if said != [TRACEBACK]]  # its head alone tells nothing
        head = f"failed: {self.who}: {self.kind.words} ({self.cause})"
        block = [
            head,
            f"  why: {self.words.removeprefix('why: ')}",
            *quoted,
            f"  done: {self.done}" if self.done else "",
            f"  next: {self.next}",
        ]
        return "\n".join(filter(None, block))

    def record(self) -> runs.Record:
        """What the event and results.json keep of it."""
        return {"who": self.who, **asdict(self)}


def judge(request: Request, status: Status, run: runs.Run, since: Mark, alarm: Alarm | None = None) -> Verdict:
    """The verdict on a job that failed, from what was written and seen since the mark."""
    faults = [event for event in run.read_events() if event["event"] == "fault" and event["time"] >= since.time]
    lines = [*_seen(status, alarm, since), *_faults(faults, since)]
    for command in request.commands:
        lines += read_lines(command.log, command.node, since.ends.get(command.log, 0), since.clock)
    finding = diagnose(lines)
    verdict = _unexplained(request, status, since) if finding is None else _of(finding, lines, request)
    told = next((event for event in faults if event.get("rank") == verdict.rank and event.get("next")), None)
    return replace(verdict, next=told["next"]) if told else verdict


def _of(finding: Finding, lines: list[Line], request: Request) -> Verdict:
    cause = CAUSES[finding.cause]
    host = next((command.host for command in request.commands if command.node == finding.node), "")
    quoted = tuple(map(plain, quote(finding, lines)))
    return Verdict(finding.cause, plain(finding.words), finding.node, finding.rank, host, quoted, cause.next)


def plain(words: str) -> str:
    """A message of ours without the name of its class, which says nothing to a user."""
    return OURS.sub("", words)


def _unexplained(request: Request, status: Status, since: Mark) -> Verdict:
    """No line gives the cause away: the node that a signal ended, or else the first that ended badly, and its last words."""
    ended = sorted((_exit(code)[1] != "killed", node) for node, code in status.exit_codes.items() if code)
    node = ended[0][1] if ended else 0
    command = request.commands[node]
    words, cause = _exit(status.exit_codes.get(node))
    return Verdict(
        cause, words, node, None, command.host, tail(command.log, since.ends.get(command.log, 0)), f"less {command.log}"
    )


def _exit(code: int | None) -> tuple[str, str]:
    if code is None:
        return "was stopped", "unknown"
    if code < 0 or code > 128:
        return f"was killed by signal {code - 128 if code > 128 else -code}", "killed"
    return f"ended with exit code {code}", "unknown"


def _seen(status: Status, alarm: Alarm | None, since: Mark) -> Iterator[Line]:
    """What backend and watchdog saw, as lines of the time when they saw it."""
    now = time.time() - since.time + 60
    if alarm:
        yield Line(now, alarm.node, alarm.rank, "watch", alarm.words)
    for node, why in status.lost.items():
        yield Line(now - 1, node, None, "watch", f"lost node {node}: {why}")


def _faults(faults: list[runs.Record], since: Mark) -> Iterator[Line]:
    """What ranks said of themselves, as the end of the traceback that it is."""
    for event in faults:
        words = f"{event['error']}: {event['message']}" + (f"; why: {event['why']}" if event.get("why") else "")
        for text in (TRACEBACK, *event.get("traceback", ())[:-1], words):
            yield Line(event["time"] - since.time + 60, event.get("node"), event.get("rank"), "rank", text)


def tail(log: Path, start: int = 0) -> tuple[str, ...]:
    """What the last lines of a log behind byte `start` say, without their stamps; none when there is no log."""
    return tuple(line.text for line in read_lines(log, 0, start)[-TAIL:])
