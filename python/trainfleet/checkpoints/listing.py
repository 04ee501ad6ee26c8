"""Lists the valid and broken checkpoints of a store, and decides which ones to retain."""

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
    """A checkpoint and the fault found from its marker and file sizes. A valid one has no fault."""

    step: int
    address: str
    commit: Commit | None
    fault: str


def read(store: CheckpointStore, step: int) -> Commit:
    """Reads the marker of a checkpoint.

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
    """Parses the marker of a checkpoint and checks its step. Raises like `read`."""
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
    """Yields all visible checkpoints, oldest first, and then the broken ones that were set
    aside.
    """
    for step in store.steps():
        yield look_at(store, step)
    for step in store.broken():
        yield ListedCheckpoint(
            step,
            f"{store.address(step)}.broken",
            None,
            "set aside by a resume that found it damaged",
        )


def look_at(store: CheckpointStore, step: int) -> ListedCheckpoint:
    """Checks the marker and file sizes of a checkpoint, which may be missing."""
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
    """Returns a description of the damage to a file of a checkpoint, or "" if every byte is
    intact.
    """
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
        else f"{name} differs from the bytes that were written (CRC-32 {found.crc32:08x}, not "
        f"{file.crc32:08x})"
    )


def checksum(stream: BinaryIO) -> FileSum:
    """Returns the size and CRC-32 of a stream."""
    size = crc = 0
    while chunk := stream.read(CHUNK):
        size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return FileSum(size, crc)


def stays(steps: Sequence[int], keep: int, keep_every: int | None) -> set[int]:
    """Returns the steps to retain.

    They are the newest `keep`, and the first step at or after each multiple of `keep_every`.
    """
    chosen = set(steps[-keep:])
    if keep_every:
        first: dict[int, int] = {}
        for step in steps:
            first.setdefault(step // keep_every, step)
        chosen |= {step for multiple, step in first.items() if multiple > 0}
    return chosen


def retain(store: CheckpointStore, newest: int, keep: int, keep_every: int | None) -> None:
    """Removes the checkpoints that are no longer retained after `newest` was committed.

    Later steps are kept, because they belong to a different history. Broken checkpoints that were
    set aside are removed if they are not newer than `newest`.
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
