"""Stores checkpoints atomically: each is either complete or invisible.

In a folder:
    <folder>/
      .step-00000200/          hidden: still being saved, or left by an interrupted save
      step-00000100/           visible and complete, renamed after its marker reached the disk
        rank-00000.safetensors ... index.json committed.json
      step-00000050.broken/    set aside for inspection after a resume found it damaged

Each change is a single rename, so a crash leaves every checkpoint either complete or hidden.

In S3 or on a compatible server (storage/s3.py):
    s3://bucket/prefix/<run>/
      step-00000100/committed.json             marker, written last and removed first; a step
                                               without a marker is not a checkpoint
      step-00000050.broken/committed.json      marker of a checkpoint that a resume found damaged
      parts-0 ... parts-f/step-00000100/...    files, distributed by a hash of their names

S3 objects appear atomically, so hidden names are not needed. S3 partitions its capacity by key
prefix (3,500 writes per second each). The sixteen `parts-` prefixes are the same for every save, so
S3's partitions remain useful.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from ..run.run_folder import Run, step_name, sync_folder
from ..storage import s3, s3_streams
from ..trust import untrusted_input
from ..trust.errors import RunError
from .marker import BROKEN, MARKER, MARKER_BYTES, NAME

BUFFER = 2**20  # bytes of a file buffer, because a tensor's header alone needs several small writes

SPREAD = 16


class CheckpointStore(Protocol):
    """The checkpoints of a run, identified by their steps."""

    def steps(self) -> list[int]:
        """Returns the steps of visible checkpoints in ascending order. They may be damaged."""
        ...

    def broken(self) -> list[int]:
        """Returns the steps of broken checkpoints that were set aside, in ascending order."""
        ...

    def address(self, step: int) -> str:
        """Returns the address of a checkpoint for messages."""
        ...

    def marker(self, step: int) -> str | None:
        """Returns the text of a marker, or None if it is missing."""
        ...

    def size(self, step: int, file: str) -> int | None:
        """Returns the size of a file in bytes, or None if it is missing."""
        ...

    def open(self, step: int, file: str) -> BinaryIO:
        """Opens a file of a visible checkpoint as a seekable stream."""
        ...

    def begin(self, step: int) -> None:
        """Creates an empty hidden checkpoint."""
        ...

    def create(self, step: int, file: str) -> AbstractContextManager[BinaryIO]:
        """Creates a file in the hidden checkpoint. The file is durable once the context ends."""
        ...

    def commit(self, step: int, marker: str) -> None:
        """Makes the hidden checkpoint visible and durable. It replaces a checkpoint of the same
        step.
        """
        ...

    def abandon(self, step: int) -> None:
        """Discards a hidden checkpoint that will not be committed."""
        ...

    def remove(self, step: int) -> None:
        """Removes a visible checkpoint."""
        ...

    def set_aside(self, step: int) -> None:
        """Hides a broken checkpoint from `steps`, but keeps its files."""
        ...

    def remove_broken(self, step: int) -> None:
        """Removes a broken checkpoint that was set aside."""
        ...

    def sweep(self) -> None:
        """Removes leftovers of interrupted saves and removals. Must not be called during a save."""
        ...

    def free(self) -> int | None:
        """Returns the free space in bytes, or None if it is unknown."""
        ...


class FolderStore:
    """Stores checkpoints in a folder that all ranks can access."""

    def __init__(self, path: Path) -> None:
        untrusted_input.seal(path)
        self.path = path

    def steps(self) -> list[int]:
        return self._numbers(NAME)

    def broken(self) -> list[int]:
        return self._numbers(BROKEN)

    def address(self, step: int) -> str:
        return str(self._visible(step))

    def marker(self, step: int) -> str | None:
        try:
            with self.open(step, MARKER) as stream:
                return stream.read(MARKER_BYTES + 1).decode(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def size(self, step: int, file: str) -> int | None:
        try:
            with self.open(step, file) as stream:
                return os.fstat(stream.fileno()).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def open(self, step: int, file: str) -> BinaryIO:
        """Opens only plain files. A link could lead out of the checkpoint, and a pipe could
        block.
        """
        path = self._visible(step) / file
        try:
            descriptor = untrusted_input.opener(str(path), os.O_RDONLY)
        except OSError as error:
            raise (_no_file(path) if error.errno in (errno.ELOOP, errno.ENXIO) else error) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _no_file(path)
        return open(descriptor, "rb", buffering=BUFFER)

    def begin(self, step: int) -> None:
        self.abandon(step)
        if not self.path.exists():
            self.path.mkdir(parents=True)
            sync_folder(self.path.parent)
        self._hidden(step).mkdir()

    @contextmanager
    def create(self, step: int, file: str) -> Iterator[BinaryIO]:
        with open(
            self._hidden(step) / file, "xb", buffering=BUFFER, opener=untrusted_input.opener
        ) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    def commit(self, step: int, marker: str) -> None:
        hidden, visible = self._hidden(step), self._visible(step)
        sync_folder(hidden)  # The file names must be durable before the marker.
        with self.create(step, MARKER) as stream:
            stream.write(marker.encode())
        sync_folder(hidden)
        if visible.exists():
            self.set_aside(step)
        hidden.rename(visible)
        sync_folder(self.path)

    def abandon(self, step: int) -> None:
        if self._hidden(step).exists():
            shutil.rmtree(self._hidden(step))

    def remove(self, step: int) -> None:
        self._visible(step).rename(self._hidden(step))
        self.abandon(step)

    def set_aside(self, step: int) -> None:
        aside = self._aside(step)
        if aside.exists():
            self.remove_broken(step)
        self._visible(step).rename(aside)

    def remove_broken(self, step: int) -> None:
        shutil.rmtree(self._aside(step))

    def sweep(self) -> None:
        for folder in self.path.glob(".step-*"):
            shutil.rmtree(folder)

    def free(self) -> int | None:
        return shutil.disk_usage(self.path).free

    def _visible(self, step: int) -> Path:
        return self.path / step_name(step)

    def _hidden(self, step: int) -> Path:
        return self.path / f".{step_name(step)}"

    def _aside(self, step: int) -> Path:
        return self.path / f"{step_name(step)}.broken"

    def _numbers(self, name: re.Pattern[str]) -> list[int]:
        if self.path.is_symlink() and untrusted_input.is_sealed(self.path):
            why = (
                "links in a run's folder are not followed, because another user may have made "
                "the folder"
            )
            then = (
                f"run rm {self.path}, and set checkpoint.path to a folder in which "
                f"{self.path.parent.name}/ is the link's target"
            )
            raise RunError("is a link", where=str(self.path), why=why, next=then)
        names = (
            (entry.name for entry in self.path.iterdir() if entry.is_dir())
            if self.path.is_dir()
            else ()
        )
        return sorted(int(match[1]) for match in map(name.fullmatch, names) if match)


def _no_file(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "it is not a plain file", str(path))


def store_at(address: str) -> CheckpointStore:
    """Returns the store for the path of a folder or an s3:// address."""
    if address.startswith(s3.SCHEME):
        return BucketStore(address)
    return FolderStore(Path(address))


def store_of(run: Run, destination: str | None) -> CheckpointStore:
    """Returns the store of a run, in `destination` (checkpoint.path) or in the run folder."""
    return (
        FolderStore(run.checkpoints)
        if destination is None
        else store_at(f"{destination.rstrip('/')}/{run.name}")
    )


class BucketStore:
    """Stores checkpoints below an s3:// address."""

    def __init__(self, address: str) -> None:
        self.prefix = f"{address.rstrip('/')}/"

    def steps(self) -> list[int]:
        return self._numbers(NAME)

    def broken(self) -> list[int]:
        return self._numbers(BROKEN)

    def address(self, step: int) -> str:
        return f"{self.prefix}{step_name(step)}"

    def marker(self, step: int) -> str | None:
        found = s3.read(self._marker(step), MARKER_BYTES)
        return None if found is None else found.decode(errors="replace")

    def size(self, step: int, file: str) -> int | None:
        found = s3.stat(self._part(step, file))
        return None if found is None else found.size

    def open(self, step: int, file: str) -> BinaryIO:
        """Downloads the file to a temporary file, because readers need to seek."""
        return s3.download(self._part(step, file))

    def begin(self, step: int) -> None:
        self.remove(step)

    def create(self, step: int, file: str) -> AbstractContextManager[BinaryIO]:
        return s3_streams.create(self._part(step, file))

    def commit(self, step: int, marker: str) -> None:
        s3.write(self._marker(step), marker.encode())

    def abandon(self, step: int) -> None:
        for parts in self._spread():
            s3.remove_all(found.address for found in s3.list_objects(f"{parts}{step_name(step)}/"))

    def remove(self, step: int) -> None:
        s3.remove(self._marker(step))
        self.abandon(step)

    def set_aside(self, step: int) -> None:
        s3.copy(self._marker(step), self._aside(step))
        s3.remove(self._marker(step))

    def remove_broken(self, step: int) -> None:
        # A valid checkpoint of that step uses the same paths for its files.
        if step not in self.steps():
            self.abandon(step)
        s3.remove(self._aside(step))

    def sweep(self) -> None:
        begun = set[str]()
        for parts in self._spread():
            s3.abort_uploads(parts)
            begun |= set(s3.list_folders(parts))
        for name in begun - {step_name(step) for step in (*self.steps(), *self.broken())}:
            if match := NAME.fullmatch(name):
                self.abandon(int(match[1]))

    def free(self) -> int | None:
        return None

    def _marker(self, step: int) -> str:
        return f"{self.address(step)}/{MARKER}"

    def _aside(self, step: int) -> str:
        return f"{self.address(step)}.broken/{MARKER}"

    def _part(self, step: int, file: str) -> str:
        return f"{self.prefix}parts-{zlib.crc32(file.encode()) % SPREAD:x}/{step_name(step)}/{file}"

    def _spread(self) -> list[str]:
        return [f"{self.prefix}parts-{number:x}/" for number in range(SPREAD)]

    def _numbers(self, name: re.Pattern[str]) -> list[int]:
        return sorted(
            int(match[1]) for match in map(name.fullmatch, s3.list_folders(self.prefix)) if match
        )
