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
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ...checkpoints.marker import Broken, Commit, File
from ...checkpoints.store import Store
from . import index
from .archive import Piece, read_plain, read_tensor


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
        self.store, self.step, self.files = store, commit.step, commit.files
        self.pieces: dict[MetadataIndex, Piece] = {}

    @cached_property
    def index(self) -> Metadata:
        """What the checkpoint holds.

        Raises:
            Broken: its index can't be read, or says what can't be so.
        """
        with self._judged(), self.store.open(self.step, index.FILE) as stream:
            data = stream.read(index.LARGEST + 1)
            if len(data) > index.LARGEST:
                raise ValueError(f"its index has more than {index.LARGEST:,} bytes")
            metadata, self.pieces = index.parse(data, self.files)
        return metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.pieces[item.storage_index].file, []).append(item)
        for name, items in by_file.items():
            with self._judged(), self.store.open(self.step, name) as stream:
                for item in items:
                    self._read(stream, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, stream: BinaryIO, item: ReadItem, planner: LoadPlanner) -> None:
        piece = self.pieces[item.storage_index]
        if piece.dtype is None:
            planner.load_bytes(item, saved(read_plain(stream, piece)))
            return
        tensor = read_tensor(stream, piece)
        for axis, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(axis, first, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    @contextmanager
    def _judged(self) -> Iterator[None]:
        """Raises Broken for a ValueError within `with`."""
        try:
            yield
        except ValueError as error:
            why = f"{error}: it was damaged before its checksums were taken, or made to do harm"
            raise Broken("can't be believed", where=self.store.address(self.step), why=why) from error


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
