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

import os
import re
import shutil
import zlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from ..run.run_folder import Run, step_name, sync_folder
from ..storage import s3
from ..storage.files import BucketFiles, Files, LocalFiles
from ..trust import untrusted_input
from ..trust.errors import RunError
from .marker import BROKEN, MARKER, MARKER_BYTES, NAME

SPREAD = 16  # `parts-` prefixes


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
            if (match := NAME.fullmatch(name)) and (step := int(match[1])) not in kept:
                self.abandon(step)

    def free(self) -> int | None:
        """Returns the free space in bytes, or None if it is unknown."""
        return shutil.disk_usage(self.files.folder).free if self.dot else None

    def _hidden(self, step: int) -> str:
        return f"{self.dot}{step_name(step)}"

    def _name(self, folder: str, file: str) -> str:
        """Returns the name of a checkpoint's file, relative to the store."""
        place = "" if file == MARKER else self.places[zlib.crc32(file.encode()) % len(self.places)]
        return f"{place}{folder}/{file}"

    def _numbers(self, name: re.Pattern[str]) -> list[int]:
        folder = self.files.folder
        if self.dot and folder.is_symlink() and untrusted_input.is_sealed(folder):
            why = (
                "links in a run's folder are not followed, because another user may have created "
                "the folder"
            )
            then = (
                f"run rm {folder}, rename the link's target to {folder.parent.name}, and set "
                "checkpoint.path to its parent folder"
            )
            raise RunError("is a link", where=str(folder), why=why, next=then)
        return sorted(int(match[1]) for match in map(name.fullmatch, self.files.folders()) if match)


def store_of(run: Run, destination: str | None) -> CheckpointStore:
    """Returns a run's store, in `destination` (checkpoint.path) or in the run folder."""
    return CheckpointStore(
        run.checkpoints if destination is None else f"{destination.rstrip('/')}/{run.name}"
    )
