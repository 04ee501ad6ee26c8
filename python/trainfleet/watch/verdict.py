"""The one cause named for a failure: the first rank that said why, or else the last words of the first node that failed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from .. import runs
from ..backends.base import Status
from ..plan.request import Request

TAIL = 12  # lines


@dataclass(frozen=True)
class Mark:
    """A moment before a job: what is older, in time or in the logs, has no part in its verdict."""

    time: float
    ends: dict[Path, int]


def mark(request: Request) -> Mark:
    """This moment."""
    return Mark(time.time(), {command.log: command.log.stat().st_size for command in request.commands if command.log.exists()})


@dataclass(frozen=True)
class Verdict:
    """Who failed first, why, its last lines, and what to type."""

    who: str
    cause: str
    lines: tuple[str, ...]
    next: str

    def __str__(self) -> str:
        quoted = "\n".join(f"  | {line}" for line in self.lines)
        return "\n".join(filter(None, (f"failed: {self.who}: {self.cause}", quoted, f"  next: {self.next}")))


def judge(request: Request, status: Status, events: Path, since: Mark) -> Verdict:
    """The verdict on a job that failed, from what was written since the mark."""
    faults = [event for event in runs.read_lines(events) if event["event"] == "fault" and event["time"] >= since.time]
    if faults:
        first = min(faults, key=lambda event: event["time"])
        where = f"rank {first['rank']} on node {first['node']}"
        # What a rank says in full (why, next) is one message; a traceback's lines help only where it is no message to a user.
        return Verdict(
            where,
            first["message"],
            tuple(first.get("traceback", ())),
            first.get("next") or f"make logs, or read {request.job.folder}/logs",
        )
    node = next((node for node, code in sorted(status.exit_codes.items()) if code), 0)
    log = request.commands[node].log
    return Verdict(f"node {node}", _exit(status.exit_codes.get(node)), tail(log, since.ends.get(log, 0)), f"less {log}")


def _exit(code: int | None) -> str:
    if code is None:
        return "was stopped"
    return (
        f"was killed by signal {code - 128 if code > 128 else -code}"
        if code < 0 or code > 128
        else f"ended with exit code {code}"
    )


def tail(log: Path, start: int = 0) -> tuple[str, ...]:
    """What the last lines of a log behind byte `start` say, without their stamps; none when there is no log."""
    try:
        text = log.read_bytes()[start:].decode(errors="replace")
    except FileNotFoundError:
        return ()
    return tuple(line.partition(" | ")[2] or line for line in text.splitlines()[-TAIL:])
