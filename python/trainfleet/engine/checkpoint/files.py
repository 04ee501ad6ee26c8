"""Reads and writes the files of a checkpoint in a store: safetensors, which many tools read.

A rank writes one file; torch.distributed.checkpoint plans who writes and reads what. Files of format
2, which torch.save wrote, are read too, as data (checkpoints/torch_saved).
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ...checkpoints import headers, pieces
from ...checkpoints import index as indexes
from ...checkpoints.index import judged
from ...checkpoints.marker import Commit, FileSum
from ...checkpoints.pieces import ArchivePiece, CheckpointIndex
from ...checkpoints.store import CheckpointStore
from .tensors import DTYPES, bytes_of, read_plain, read_tensor

Pieces = Mapping[str, tuple[pieces.Tensor, Tensor]]  # by name: which piece of it, and its numbers


def write(store: CheckpointStore, step: int, name: str, chunks: Iterable[bytes | memoryview]) -> FileSum:
    """Writes a file of the checkpoint that was begun; it is durable when this returns.

    Returns its size and checksum, of the bytes as they were before any disk had them.
    """
    size = crc = 0
    with store.create(step, name) as stream:
        for chunk in chunks:
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
            stream.write(chunk)
    return FileSum(size, crc)


def write_tensors(store: CheckpointStore, step: int, name: str, found: Pieces) -> FileSum:
    """Writes a file of pieces of tensors, each under the name of the whole, as `write` does."""
    header = headers.render({key: piece for key, (piece, _) in found.items()})
    return write(store, step, name, (header, *(bytes_of(tensor) for _, tensor in found.values())))


class Reader(FileSystemReader):
    """Reads a committed checkpoint whose marker was verified. Nothing in its files is executed or trusted."""

    def __init__(self, store: CheckpointStore, commit: Commit) -> None:
        super().__init__("/")
        self.store, self.step, self.commit = store, commit.step, commit
        self.places = indexes.Places(commit.files)

    @cached_property
    def index(self) -> Metadata:
        """What the checkpoint holds.

        Raises:
            Broken: its index can't be read, or says what can't be so.
        """
        return metadata_of(self.found)

    @cached_property
    def found(self) -> CheckpointIndex:
        return indexes.read(self.store, self.commit)

    def room(self, name: str) -> Tensor | None:
        """An empty tensor as large as one of the checkpoint; None where it is not a tensor."""
        entry = self.found.entries.get(name)
        return None if entry is None else torch.empty(entry.size, dtype=DTYPES[entry.dtype])

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
        tensor = read_tensor(stream, self.places.find(stream, piece))
        for axis, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(axis, first, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    def _piece(self, item: ReadItem) -> ArchivePiece:
        at = item.storage_index
        return self.found.pieces[at.fqn, None if at.offset is None else tuple(at.offset)]


def metadata_of(found: CheckpointIndex) -> Metadata:
    """What an index says, in the words of torch's planner."""
    return Metadata({name: _entry(entry) for name, entry in found.entries.items()})


def _entry(entry: pieces.Tensor | None) -> TensorStorageMetadata | BytesStorageMetadata:
    if entry is None:
        return BytesStorageMetadata()
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[entry.dtype]), torch.Size(entry.size), chunks)


def saved(value: object) -> io.BytesIO:
    """A text of a checkpoint of format 2, for torch's planner.

    The planner unpickles what it is given, so it is never given a file's bytes.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer
