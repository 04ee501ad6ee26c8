"""Tokenization progress across all nodes. Each process regularly replaces a small file, and readers
sum up these files.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..trust import untrusted_input
from ..trust.errors import InputError
from ..trust.validation import fit
from .dataset_store import DatasetStore, open_store, read_all
from .manifest import read_preparation

# Minimum seconds between writes to a folder, and to S3, which bills every request
NOTE_EVERY = (0.2, 5.0)


@dataclass(frozen=True)
class TokenizingProgress:
    """Combined progress of all processes. Byte counts refer to source files. A total of 0 means
    that the units have not been planned yet.
    """

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
    """Amount of work completed, either by one process or before the job started."""

    bytes: int = 0
    documents: int = 0
    tokens: int = 0
    units: int = 0


class Meter:
    """Counter that writes one process's completed work to its progress file."""

    def __init__(self, store: DatasetStore, node: int, worker: int) -> None:
        self.store, self.name = store, f"progress/{node}-{worker}.json"
        self.counts, self.written = Counts(), 0.0

    def add(self, *, bytes_: int = 0, documents: int = 0, tokens: int = 0, units: int = 0) -> None:
        counts = self.counts
        self.counts = Counts(
            counts.bytes + bytes_,
            counts.documents + documents,
            counts.tokens + tokens,
            counts.units + units,
        )
        if time.monotonic() - self.written > NOTE_EVERY[self.store.remote]:
            self.write()

    def write(self) -> None:
        self.store.write(self.name, json.dumps(asdict(self.counts)).encode(), durable=False)
        self.written = time.monotonic()


def read_progress(folder: Path, address: str | None = None) -> TokenizingProgress:
    """Sums all progress files of a dataset in its folder or in S3. Returns zeros if there are no
    files yet.
    """
    store = open_store(folder, address)
    preparation = read_preparation(store)
    found = [
        counts
        for content in read_all(store, store.sizes("progress"))
        if content and (counts := _counts(content))
    ]
    bytes_, documents, tokens, units = (
        sum(getattr(counts, field.name) for counts in found) for field in fields(Counts)
    )
    total, of = (preparation.bytes, preparation.units) if preparation else (0, 0)
    return TokenizingProgress(bytes_, total, documents, tokens, units, of)


def _counts(content: bytes) -> Counts | None:
    """Parses a progress file. Returns None if the file is damaged, because a progress file must
    never stop the job.
    """
    with suppress(InputError):
        return fit(Counts, untrusted_input.parse_line(content, ""))
    return None


def clear(store: DatasetStore, node: int, nodes: int) -> None:
    """Removes an earlier job's progress files: those of this node and, on node 0, those of nodes
    beyond this job's node count.
    """
    for name in store.sizes("progress"):
        owner, _, _ = Path(name).name.partition("-")
        if (number := untrusted_input.whole(owner)) is None:
            continue  # not a progress file
        if number == node or (node == 0 and number >= nodes):
            store.remove(name)
