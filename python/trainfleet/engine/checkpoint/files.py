"""Reads and writes checkpoint files in safetensors format.

Each rank writes one file. torch.distributed.checkpoint plans which pieces each rank writes and
reads.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from functools import cached_property
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ...checkpoints import index
from ...checkpoints.index import CheckpointIndex, IndexedTensor, Sizes, TensorPiece, judged
from ...checkpoints.marker import Commit, FileSum
from ...checkpoints.store import CheckpointStore

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write(
    store: CheckpointStore, step: int, name: str, chunks: Iterable[bytes | memoryview]
) -> FileSum:
    """Durably writes a file of an uncommitted checkpoint.

    Returns the file's size and checksum, both computed in memory before the write.
    """
    size = crc = 0
    with store.create(step, name) as stream:
        for chunk in chunks:
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
            stream.write(chunk)
    return FileSum(size, crc)


def bytes_of(tensor: Tensor) -> memoryview | bytes:
    """Returns the bytes of a contiguous host tensor without copying them."""
    return tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else b""


def read_piece(stream: BinaryIO, dtype: torch.dtype, piece: TensorPiece) -> Tensor:
    """Reads a piece directly into a new tensor.

    Raises:
        ValueError: the file is too short.
    """
    found = torch.empty(math.prod(piece.shape) * dtype.itemsize, dtype=torch.uint8)
    stream.seek(piece.begins)
    if found.numel() and stream.readinto(found.numpy().data) != found.numel():  # type: ignore[attr-defined]
        raise ValueError(f"{piece.file} ends before byte {piece.begins + found.numel():,}")
    return found.view(dtype).view(piece.shape)


class Reader(FileSystemReader):
    """Reader for a committed checkpoint with a verified marker.

    The files are untrusted data, so nothing in them is ever executed.
    """

    def __init__(self, store: CheckpointStore, commit: Commit) -> None:
        super().__init__("/")
        self.store = store
        self.step = commit.step
        self.commit = commit

    @cached_property
    def index(self) -> CheckpointIndex:
        """The checkpoint's index.

        Raises:
            Broken: the index is unreadable or inconsistent.
        """
        return index.read(self.store, self.commit)

    @cached_property
    def pieces(self) -> dict[tuple[str, Sizes], TensorPiece]:
        """Pieces, keyed by tensor name and offset within the tensor."""
        return {
            (name, piece.offsets): piece
            for name, tensor in self.index.items()
            for piece in tensor.pieces
        }

    def room(self, name: str) -> Tensor | None:
        """Returns an uninitialized tensor with the shape and dtype stored in the checkpoint.

        Returns None if the checkpoint has no tensor of that name.
        """
        found = self.index.get(name)
        return None if found is None else torch.empty(found.shape, dtype=DTYPES[found.dtype])

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _entry(tensor) for name, tensor in self.index.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
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
        tensor = read_piece(
            stream, DTYPES[self.index[item.storage_index.fqn].dtype], self._piece(item)
        )
        for axis, (first, length) in enumerate(
            zip(item.storage_offsets, item.lengths, strict=True)
        ):
            tensor = tensor.narrow(axis, first, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    def _piece(self, item: ReadItem) -> TensorPiece:
        at = item.storage_index
        return self.pieces[at.fqn, tuple(at.offset or ())]


def _entry(tensor: IndexedTensor) -> TensorStorageMetadata:
    """Converts an index entry to the type that torch's planner expects."""
    chunks = [
        ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape))
        for piece in tensor.pieces
    ]
    return TensorStorageMetadata(
        TensorProperties(dtype=DTYPES[tensor.dtype]), torch.Size(tensor.shape), chunks
    )
