"""The files of a run's events, and their one order. The events and their fields are in
events.yaml.

events/<writer>.jsonl holds a line per event: its time (unix), its name and its fields. A file has
one writer, because appending is not atomic over NFS:

launcher-<host>    the launcher on that host; after a takeover another host has another file
node-<i>-<attempt> the ranks of one node in one attempt; they share a kernel, so their appends are
atomic

Readers merge the files by time (`merge`), with `events.jsonl`, the one file of a run that began
before format 2.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from typing import Any

FORMAT = 2  # of the run folder: 1 had events.jsonl and heartbeats/rank-<r>.json


def launcher() -> str:
    """The writer's name of a launcher on this host."""
    return f"launcher-{re.sub(r'[^A-Za-z0-9.-]', '-', platform.node()) or 'here'}"


def node(number: int, attempt: int) -> str:
    """The writer's name of a node's ranks."""
    return f"node-{number}-{attempt}"


def merge(files: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The events of all files by time. One writer's events keep their order, even if its clock was
    set back.

    Records without a name or a time are left out.
    """
    timed: list[tuple[float, dict[str, Any]]] = []
    for lines in files:
        latest = float("-inf")
        for line in lines:
            if (
                isinstance(line, dict)
                and isinstance(line.get("event"), str)
                and isinstance(line.get("time"), int | float)
            ):
                latest = max(latest, line["time"])
                timed.append((latest, line))
    timed.sort(key=lambda pair: pair[0])
    return [line for _, line in timed]
