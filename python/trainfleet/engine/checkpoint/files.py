"""Reads and writes torch.distributed.checkpoint's files in a store; the format is torch's, so its tools read our checkpoints."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ...checkpoints import index as indexes
from ...checkpoints.archive import Piece
from ...checkpoints.index import judged
from ...checkpoints.marker import Commit, File
from ...checkpoints.store import Store
from .tensors import DTYPES, read_plain, read_tensor


class Writer(FileSystemWriter):
    """Writes one rank's part of a checkpoint that `begin` made room for. `written` grows by every file, with its checksum."""

    def __init__(self, store: Store, step: int) -> None:
        super().__init__(
            "/", sync_files=False, per_thread_copy_ahead=0
        )  # the store syncs; what is written is on the host already
        self.written: dict[str, File] = {}
        self.fs = Streams(store, step, self.written)  # type: ignore[assignment]


class Reader(FileSystemReader):
    """Reads a committed checkpoint whose marker was verified. Nothing in its files is executed or trusted."""

    def __init__(self, store: Store, commit: Commit) -> None:
        super().__init__("/")
        self.store, self.step, self.commit = store, commit.step, commit

    @cached_property
    def index(self) -> Metadata:
        """What the checkpoint holds.

        Raises:
            Broken: its index can't be read, or says what can't be so.
        """
        return metadata_of(self.found)

    @cached_property
    def found(self) -> indexes.Index:
        return indexes.read(self.store, self.commit)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._piece(item).file, []).append(item)
        for name, items in by_file.items():
            with judged(self.store, self.step), self.store.open(self.step, name) as stream:
                for item in items:
                    self._read(stream, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, stream: BinaryIO, item: ReadItem, planner: LoadPlanner) -> None:
        piece = self._piece(item)
        if not piece.dtype:
            planner.load_bytes(item, saved(read_plain(stream, piece)))
            return
        tensor = read_tensor(stream, piece)
        for axis, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(axis, first, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    def _piece(self, item: ReadItem) -> Piece:
        at = item.storage_index
        return self.found.pieces[at.fqn, None if at.offset is None else tuple(at.offset)]


def metadata_of(found: indexes.Index) -> Metadata:
    """What an index says, in the words of torch's planner."""
    return Metadata({name: _entry(entry) for name, entry in found.entries.items()})


def _entry(entry: indexes.Tensor | None) -> TensorStorageMetadata | BytesStorageMetadata:
    if entry is None:
        return BytesStorageMetadata()
    pieces = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[entry.dtype]), torch.Size(entry.size), pieces)


def saved(value: object) -> io.BytesIO:
    """A plain value as bytes for torch's planner, which unpickles what it is given: so it is never given a file's bytes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


class Streams:
    """The file system that torch's reader and writer see: paths are names, and nothing is visible before the commit.

    So `.metadata` is written in its place at once: the rename by which torch makes it appear has nothing to hide here.
    """

    def __init__(self, store: Store, step: int, written: dict[str, File]) -> None:
        self.store, self.step, self.written = store, step, written

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[Any]:
        name = path.name.removesuffix(".tmp")
        if mode == "rb":
            with self.store.open(self.step, name) as stream:
                yield stream
        else:
            with self.store.create(self.step, name) as stream:
                yield (tally := Tally(stream))
                self.written[name] = File(tally.size, tally.crc)

    def concat_path(self, path: Path, suffix: str) -> Path:
        return path / suffix

    def rename(self, path: Path, new_path: Path) -> None:
        pass

    def exists(self, path: Path) -> bool:
        return False


class Tally(io.RawIOBase):
    """Passes bytes on and computes their size and CRC-32 before any disk has them."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.size, self.crc = stream, 0, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with memoryview(data).cast("B") as view:
            self.crc = zlib.crc32(view, self.crc)
            self.size += len(view)
            self.stream.write(view)
            return len(view)

    def tell(self) -> int:
        return self.size
