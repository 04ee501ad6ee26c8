"""What the nodes have done so far: a small file a process, replaced several times a second, added up by whoever looks."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..runs import read_json
from .manifest import read_preparation

INTERVAL = 0.2  # seconds between two writes of one process


@dataclass(frozen=True)
class Progress:
    """Sums over all processes. `bytes` are those of the sources as they lie on disk; total 0: the plan is not made yet."""

    bytes_done: int
    bytes_total: int
    documents: int
    tokens: int
    units_done: int
    units_total: int

    @property
    def finished(self) -> bool:
        return self.units_total > 0 and self.units_done == self.units_total


@dataclass
class Counts:
    """What one process has done, and found done when it began."""

    bytes: int = 0
    documents: int = 0
    tokens: int = 0
    units: int = 0


class Meter:
    """Keeps the counts of one process in its progress file."""

    def __init__(self, folder: Path, node: int, worker: int) -> None:
        self.path = folder / "progress" / f"{node}-{worker}.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.counts, self.written = Counts(), 0.0

    def add(self, *, bytes: int = 0, documents: int = 0, tokens: int = 0, units: int = 0) -> None:
        counts = self.counts
        self.counts = Counts(counts.bytes + bytes, counts.documents + documents, counts.tokens + tokens, counts.units + units)
        if time.monotonic() - self.written > INTERVAL:
            self.write()

    def write(self) -> None:
        """Replaces the file; not synced to disk, since after a crash it is worth nothing."""
        temporary = self.path.with_suffix(".partial")
        temporary.write_text(json.dumps(asdict(self.counts)))
        temporary.replace(self.path)
        self.written = time.monotonic()


def read_progress(folder: Path) -> Progress:
    """The sums of all progress files of a dataset's folder; zeros before anything is there."""
    preparation = read_preparation(folder)
    done = [content for path in sorted(folder.glob("progress/*.json")) if (content := read_json(path))]
    bytes_, documents, tokens, units = (sum(content[field.name] for content in done) for field in fields(Counts))
    total, of = (preparation.bytes, preparation.units) if preparation else (0, 0)
    return Progress(bytes_, total, documents, tokens, units, of)


def clear(folder: Path, node: int, nodes: int) -> None:
    """Removes what an earlier job left: this node's files, and node 0 those of nodes that are no more."""
    for path in folder.glob("progress/*"):
        owner = int(path.name.split("-")[0])
        if owner == node or (node == 0 and owner >= nodes):
            path.unlink(missing_ok=True)
