"""Valid and broken checkpoints of a store, and the retention policy."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from ..trust.errors import InputError, RunError
from .marker import MARKER, Broken, Commit, FileSum, parse
from .store import CheckpointStore

CHUNK = 2**20  # bytes per read


@dataclass(frozen=True)
class ListedCheckpoint:
    """Checkpoint with the fault that its marker and file sizes reveal, "" if valid."""

    step: int
    address: str
    commit: Commit | None
    fault: str


def read(store: CheckpointStore, step: int) -> Commit:
    """Reads a checkpoint's marker.

    Raises:
        Broken: the marker is missing or damaged.
        RunError: another version of trainfleet wrote it.
    """
    try:
        return believed(store.marker(step), step, store.address(step))
    except OSError as error:
        raise Broken(
            f"{MARKER} can't be read", where=store.address(step), why=error.strerror or str(error)
        ) from error


def believed(text: str | None, step: int, address: str) -> Commit:
    """Parses a checkpoint's marker and checks its step. Raises as `read` does."""
    if text is None:
        raise Broken(
            f"has no {MARKER}", where=address, why="without this file a folder is not a checkpoint"
        )
    commit = parse(text, address)
    if commit.step != step:
        raise Broken(
            f"{MARKER} belongs to step {commit.step:,}",
            where=address,
            why="its folder was renamed or assembled by hand",
        )
    return commit


def look(store: CheckpointStore) -> Iterator[ListedCheckpoint]:
    """Yields all visible checkpoints, oldest first, followed by the broken ones that were set
    aside.
    """
    for step in store.steps():
        yield look_at(store, step)
    for step in store.broken():
        yield ListedCheckpoint(
            step,
            f"{store.address(step)}.broken",
            None,
            "a resume found it damaged and set it aside",
        )


def look_at(store: CheckpointStore, step: int) -> ListedCheckpoint:
    """Checks a checkpoint's marker and file sizes. The checkpoint may be missing."""
    commit = None
    try:
        commit = read(store, step)
        faults = [
            fault
            for name, file in commit.files.items()
            if (fault := _resized(store, step, name, file))
        ]
        return ListedCheckpoint(step, store.address(step), commit, "; ".join(faults))
    except (RunError, InputError) as error:
        return ListedCheckpoint(step, store.address(step), commit, error.what)


def damage(store: CheckpointStore, step: int, name: str, file: FileSum) -> str:
    """Describes the damage to a checkpoint's file, or returns "" if every byte is intact."""
    if fault := _resized(store, step, name, file):
        return fault
    try:
        with store.open(step, name) as stream:
            found = checksum(stream)
    except OSError as error:
        return f"{name} can't be read: {error.strerror or error}"
    return (
        ""
        if found == file
        else f"{name} does not match its checksum (CRC-32 {found.crc32:08x}, not {file.crc32:08x})"
    )


def checksum(stream: BinaryIO) -> FileSum:
    """Returns the size and CRC-32 of a stream."""
    size = crc = 0
    while chunk := stream.read(CHUNK):
        size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return FileSum(size, crc)


def stays(steps: Sequence[int], keep: int, keep_every: int | None) -> set[int]:
    """Returns the steps to retain: the newest `keep`, and the first step at or after each multiple
    of `keep_every`.
    """
    chosen = set(steps[-keep:])
    if keep_every:
        first: dict[int, int] = {}
        for step in steps:
            first.setdefault(step // keep_every, step)
        chosen |= {step for multiple, step in first.items() if multiple > 0}
    return chosen


def retain(store: CheckpointStore, newest: int, keep: int, keep_every: int | None) -> None:
    """Applies the retention policy after `newest` was committed.

    Later steps are kept, because they belong to a different history. Broken checkpoints that were
    set aside are removed unless they are newer than `newest`.
    """
    steps = [step for step in store.steps() if step <= newest]
    for step in steps:
        if step not in stays(steps, keep, keep_every):
            store.remove(step)
    for step in store.broken():
        if step <= newest:
            store.remove_broken(step)


def _resized(store: CheckpointStore, step: int, name: str, file: FileSum) -> str:
    size = store.size(step, name)
    if size is None:
        return f"{name} is missing"
    return "" if size == file.size else f"{name} has {size:,} bytes, not {file.size:,}"
