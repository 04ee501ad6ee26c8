"""The table of events that a run folder can hold: who writes each, and which fields it has.

events/<writer>.jsonl holds a line an event: its time (unix), its name and its fields. A file has one writer, because appending is
not atomic over NFS:

launcher-<host>    the launcher on that host; after a takeover another host has another file
node-<i>-<attempt> the ranks of one node in one attempt; they share a kernel, so their appends are atomic

Readers merge the files by time (`merge`), with `events.jsonl`, the one file of a run that began before format 2.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

FORMAT = 2  # of the run folder: 1 had events.jsonl and heartbeats/rank-<r>.json
Number = (int, float)
Kind = type | tuple[type, ...]


class Owner(Enum):
    """Who writes an event."""

    LAUNCHER = "launcher"
    RANK_0 = "rank 0"
    RANKS = "any rank"


@dataclass(frozen=True)
class EventKind:
    """An event's writer and meaning, the fields that it always has, and those that it may have."""

    owner: Owner
    tells: str
    fields: Mapping[str, Kind] = field(default_factory=dict)
    optional: Mapping[str, Kind] = field(default_factory=dict)


LAUNCHER, RANK_0, RANKS = Owner
NONE = type(None)
EVENTS = {
    "launched": EventKind(LAUNCHER, "the ranks of a launch are started", {"nodes": int, "ranks_per_node": int},
    {"started": Number}),
    "queued": EventKind(LAUNCHER, "the job waits for machines, or for them to start", {"phase": str, "reason": str}),
    "running": EventKind(LAUNCHER, "a job that waited runs", {"attempt": int}, {"hosts": list}),
    "restarted": EventKind(LAUNCHER, "another attempt follows", {"attempt": int, "cause": str, "who": str},
                       {"nodes": int, "hosts": list}),
    "verdict": EventKind(LAUNCHER, "why an attempt failed",
                     {"who": str, "cause": str, "words": str, "node": (int, NONE), "rank": (int, NONE), "host": str,
                      "lines": (list, tuple), "next": str, "done": str, "then": str, "sure": bool, "nodes": int}),
    "quarantined": EventKind(LAUNCHER, "a host is left out from now on", {"host": str, "evidence": str}),
    "slow": EventKind(LAUNCHER, "a rank's own work takes much longer than the others'",
                  {"rank": int, "node": int, "step": int, "busy_seconds": Number}),
    "unreachable": EventKind(LAUNCHER, "a node does not answer, and its ranks go on", {"node": int, "host": str, "why": str}),
    "fabric": EventKind(LAUNCHER, "NCCL's own words say that the fabric is not used as it should be", {"node": int, "why": str}),
    "slow-link": EventKind(LAUNCHER, "a node's links are bad, or far worse than the others' while the run is slower than it was",
                       {"node": (int, NONE), "host": str, "why": str}),
    "initialized": EventKind(RANK_0, "the weights are those of another model", {"source": str}),
    "resumed": EventKind(RANK_0, "training goes on from a checkpoint",
                     {"step": int, "world_size": int, "saved_by": int, "changed": dict}),
    "began": EventKind(RANK_0, "training begins: all is loaded", {"step": int}),
    "lost": EventKind(RANK_0, "steps of an attempt that died are done again, and their lines taken out of the metrics",
                  {"step": int, "steps": int, "spans": list}),
    "damaged": EventKind(RANK_0, "a checkpoint was set aside", {"step": int, "address": str, "why": str}),
    "skipped": EventKind(RANK_0, "steps were left out since the last line of metrics", {"step": int, "steps": int}),
    "overflowed": EventKind(RANK_0, "steps were left out as their gradients overflowed fp16, since the last line of metrics",
                        {"step": int, "steps": int}),
    "logger-failed": EventKind(RANK_0, "a service of train.loggers gets no more of this run", {"service": str, "message": str}),
    "checkpointed": EventKind(RANK_0, "a checkpoint is committed", {"step": int, "seconds": Number}),
    "unsaved": EventKind(RANK_0, "a checkpoint could not be made", {"step": int, "message": str, "why": str}),
    "finished": EventKind(RANK_0, "the last step is done", {"step": int}),
    "stopped": EventKind(RANK_0, "the ranks left when they were asked to", {"step": int}),
    "notice": EventKind(RANKS, "a node is about to be taken away", {"node": int, "notice": str}),
    "orphaned": EventKind(RANKS, "the launcher is gone: all ranks save and leave", {"node": int, "seconds": Number}),
    "fault": EventKind(RANKS, "a rank failed",
                   {"node": int, "rank": (int, NONE), "error": str, "message": str, "why": str, "next": str},
                   {"traceback": list, "order": int}),
}  # fmt: skip


def launcher() -> str:
    """The writer's name of a launcher on this host."""
    return f"launcher-{re.sub(r'[^A-Za-z0-9.-]', '-', platform.node()) or 'here'}"


def node(number: int, attempt: int) -> str:
    """The writer's name of a node's ranks."""
    return f"node-{number}-{attempt}"


def merge(files: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The events of all files by time. One writer's events keep their order, even if its clock was set back.

    Records without a name or a time are left out.
    """
    timed: list[tuple[float, dict[str, Any]]] = []
    for lines in files:
        latest = float("-inf")
        for line in lines:
            if isinstance(line, dict) and isinstance(line.get("event"), str) and isinstance(line.get("time"), Number):
                latest = max(latest, line["time"])
                timed.append((latest, line))
    timed.sort(key=lambda pair: pair[0])
    return [line for _, line in timed]
