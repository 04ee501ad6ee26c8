"""Checkpoint storage in which each checkpoint is either complete or invisible.

In a folder (storage/files.py):
    <folder>/
      .step-00000200/          hidden: still being saved, or left by an interrupted save
      step-00000100/           visible and complete, renamed after its marker reached the disk
        rank-00000.safetensors ... index.json committed.json
      step-00000050.broken/    set aside for inspection after a resume found it damaged

A single rename makes each change, so a crash leaves every checkpoint either complete or hidden.

In S3 or on a compatible server:
    s3://bucket/prefix/<run>/
      step-00000100/committed.json         marker, written last and removed first; a step without
                                           a marker is not a checkpoint
      step-00000050.broken/committed.json  marker of a checkpoint that a resume found damaged
      parts-0 ... parts-f/step-00000100/   files, distributed by a hash of their names

S3 partitions its capacity by key prefix (3,500 writes per second each). The sixteen `parts-`
prefixes are the same for every save, so S3's partitions remain useful.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..run.run_folder import Run, step_name, sync_folder
from ..storage import s3
from ..storage.files import BucketFiles, Files, LocalFiles
from ..trust import untrusted_input
from ..trust.errors import InputError, RunError, S3Error
from .marker import BROKEN, MARKER, MARKER_BYTES, NAME, Broken, Commit, FileSum, parse

SPREAD = 16  # `parts-` prefixes
CHUNK = 2**20  # bytes per read
# Read errors of a damaged disk or file system. Others, such as ESTALE, come from a file server.
DAMAGED = "EIO", "EBADMSG", "ENODATA", "EUCLEAN"


@dataclass(frozen=True)
class ListedCheckpoint:
    """Listed checkpoint. `fault` is the error in its marker or file sizes, or "" if it looks
    valid.
    """

    step: int
    address: str
    commit: Commit | None
    fault: str


class CheckpointStore:
    """Checkpoints of a run, identified by their steps, in a folder or in S3."""

    def __init__(self, address: str | Path) -> None:
        in_bucket = isinstance(address, str) and address.startswith(s3.SCHEME)
        self.files: Files = BucketFiles(str(address)) if in_bucket else LocalFiles(Path(address))
        # In S3, files without a marker are not a checkpoint, so their folder needs no hidden name.
        self.dot = "" if in_bucket else "."
        self.places = [""] if self.dot else [f"parts-{number:x}/" for number in range(SPREAD)]

    def steps(self) -> list[int]:
        """Returns the steps of visible checkpoints, in ascending order. They may be damaged."""
        return self._numbers(NAME)

    def broken(self) -> list[int]:
        """Returns the steps of broken checkpoints that were set aside, in ascending order."""
        return self._numbers(BROKEN)

    def address(self, step: int) -> str:
        """Returns a checkpoint's path or address, for messages."""
        return self.files.describe(step_name(step))

    def marker(self, step: int) -> str | None:
        """Returns a marker's text, or None if the marker is missing."""
        try:
            with self.open(step, MARKER) as stream:
                return stream.read(MARKER_BYTES + 1).decode(errors="replace")
        except FileNotFoundError:
            return None

    def size(self, step: int, file: str) -> int | None:
        """Returns a file's size in bytes, or None if the file is missing."""
        try:
            with self.open(step, file) as stream:
                return stream.seek(0, os.SEEK_END)
        except FileNotFoundError:
            return None

    def open(self, step: int, file: str) -> BinaryIO:
        """Opens a file of a visible checkpoint as a seekable stream."""
        return self.files.open(self._name(step_name(step), file))

    def begin(self, step: int) -> None:
        """Creates an empty hidden checkpoint."""
        if not self.dot:
            self.remove(step)
            return
        self.abandon(step)
        (self.files.folder / self._hidden(step)).mkdir(parents=True)
        sync_folder(self.files.folder.parent)

    def create(self, step: int, file: str) -> AbstractContextManager[BinaryIO]:
        """Creates a file in the hidden checkpoint. It is durable once the context ends."""
        return self.files.create(self._name(self._hidden(step), file))

    def commit(self, step: int, marker: str) -> None:
        """Makes the hidden checkpoint visible and durable. Replaces a checkpoint of the
        same step.
        """
        with self.create(step, MARKER) as stream:
            stream.write(marker.encode())
        if self.dot:
            if step in self.steps():
                self.set_aside(step)
            self.files.rename(self._hidden(step), step_name(step))

    def abandon(self, step: int) -> None:
        """Discards a hidden checkpoint that will not be committed."""
        for place in self.places:
            self.files.remove_folder(f"{place}{self._hidden(step)}")

    def remove(self, step: int) -> None:
        """Removes a visible checkpoint."""
        if self.dot:
            self.files.rename(step_name(step), self._hidden(step))
        else:
            self.files.remove(f"{step_name(step)}/{MARKER}")
        self.abandon(step)

    def set_aside(self, step: int) -> None:
        """Hides a broken checkpoint from `steps`, but keeps its files."""
        if step in self.broken():
            self.remove_broken(step)
        self.files.rename(step_name(step), f"{step_name(step)}.broken")

    def remove_broken(self, step: int) -> None:
        """Removes a broken checkpoint that was set aside."""
        # In S3, a valid checkpoint of this step uses the same paths for its files.
        if step not in self.steps():
            self.abandon(step)
        self.files.remove_folder(f"{step_name(step)}.broken")

    def sweep(self) -> None:
        """Removes leftovers of interrupted saves and removals. Must not be called during a save."""
        if self.dot:
            for leftover in self.files.folder.glob(".step-*"):
                self.files.remove_folder(leftover.name)
            return
        s3.abort_uploads(self.files.describe(""))
        kept = {*self.steps(), *self.broken()}
        for name in {name for place in self.places for name in self.files.folders(place)}:
            match = NAME.fullmatch(name)
            # Read the marker too, because a compatible server's listing may be stale.
            if match and (step := int(match[1])) not in kept and self.marker(step) is None:
                self.abandon(step)

    def free(self) -> int | None:
        """Returns the free space in bytes, or None if it is unknown."""
        return shutil.disk_usage(self.files.folder).free if self.dot else None

    def read(self, step: int) -> Commit:
        """Reads a checkpoint's marker.

        Raises:
            Broken: the marker is missing or damaged.
            RunError: it was written by another version of trainfleet.
        """
        try:
            return believed(self.marker(step), step, self.address(step))
        except OSError as error:
            raise Broken(
                f"{MARKER} can't be read",
                where=self.address(step),
                why=error.strerror or str(error),
            ) from error

    def look(self) -> Iterator[ListedCheckpoint]:
        """Yields all visible checkpoints, oldest first, followed by the broken ones that were set
        aside.
        """
        for step in self.steps():
            yield self.look_at(step)
        for step in self.broken():
            yield ListedCheckpoint(
                step,
                f"{self.address(step)}.broken",
                None,
                "a resume found it damaged and set it aside",
            )

    def look_at(self, step: int) -> ListedCheckpoint:
        """Checks a checkpoint's marker and file sizes. The checkpoint may be missing."""
        commit = None
        try:
            commit = self.read(step)
            faults = [
                fault
                for name, file in commit.files.items()
                if (fault := self._resized(step, name, file))
            ]
            return ListedCheckpoint(step, self.address(step), commit, "; ".join(faults))
        except (RunError, InputError) as error:
            return ListedCheckpoint(step, self.address(step), commit, error.what)

    def damage(self, step: int, name: str, file: FileSum) -> str:
        """Describes the damage to a checkpoint's file, or returns "" if every byte is intact.

        Raises:
            OSError: the file can't be read now, but may be intact.
        """
        if fault := self._resized(step, name, file):
            return fault
        try:
            with self.open(step, name) as stream:
                found = checksum(stream)
        except OSError as error:
            if isinstance(error, S3Error) or errno.errorcode.get(error.errno or 0) not in DAMAGED:
                raise
            return f"{name} can't be read: {error.strerror or error}"
        if found == file:
            return ""
        sums = f"CRC-32 {found.crc32:08x}, not {file.crc32:08x}"
        return f"{name} does not match its checksum ({sums})"

    def retain(self, newest: int, keep: int, keep_every: int | None) -> None:
        """Applies the retention policy after `newest` was committed.

        Later steps are kept, because they belong to a different history. Broken checkpoints that
        were set aside are removed unless they are newer than `newest`.
        """
        steps = [step for step in self.steps() if step <= newest]
        for step in steps:
            if step not in stays(steps, keep, keep_every):
                self.remove(step)
        for step in self.broken():
            if step <= newest:
                self.remove_broken(step)

    def _resized(self, step: int, name: str, file: FileSum) -> str:
        size = self.size(step, name)
        if size is None:
            return f"{name} is missing"
        return "" if size == file.size else f"{name} has {size:,} bytes, not {file.size:,}"

    def _hidden(self, step: int) -> str:
        return f"{self.dot}{step_name(step)}"

    def _name(self, folder: str, file: str) -> str:
        """Returns the name of a checkpoint's file, relative to the store."""
        place = "" if file == MARKER else self.places[zlib.crc32(file.encode()) % len(self.places)]
        return f"{place}{folder}/{file}"

    def _numbers(self, name: re.Pattern[str]) -> list[int]:
        folder = self.files.folder
        if self.dot and folder.is_symlink() and untrusted_input.is_sealed(folder):
            raise RunError(
                "is a link",
                where=str(folder),
                why="links in a run's folder are not followed, because another user may have "
                "created the folder",
                next=f"run rm {folder}, rename the link's target to {folder.parent.name}, and set "
                "checkpoint.path to its parent folder",
            )
        return sorted(int(match[1]) for match in map(name.fullmatch, self.files.folders()) if match)


def store_of(run: Run, destination: str | None) -> CheckpointStore:
    """Returns a run's store, in `destination` (checkpoint.path) or in the run folder."""
    return CheckpointStore(
        run.checkpoints if destination is None else f"{destination.rstrip('/')}/{run.name}"
    )


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
