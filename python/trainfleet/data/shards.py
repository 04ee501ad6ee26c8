"""Writes token files in Megatron's format: raw little-endian ids in .bin, document bounds in .idx
(MMIDIDX, version 1).

Layout of .idx, as Megatron-LM reads it (megatron/core/datasets/indexed_dataset.py): magic, u64
version, u8 type code, u64 number of sequences, u64 number of document bounds, then i32 sequence
lengths, i64 byte offsets of the sequences, i64 document bounds. Here every document is one sequence
that ends with the end-of-document id. No document can be too long for 31 bits (formats.LONGEST).
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from types import TracebackType

import numpy as np
import numpy.typing as npt

from ..run.run_folder import unwritable
from ..trust import untrusted_input
from .dataset_store import DatasetStore
from .manifest import BLOCK, LENGTHS, Shard

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TYPE_CODES = {"int32": 4, "uint16": 8}  # codes of Megatron's DType; it has no uint32


class ShardWriter:
    """Writes one pair of files under temporary names until `commit`; leaving the block removes
    uncommitted files.
    """

    def __init__(self, store: DatasetStore, path: str, dtype: str, end_of_document: int) -> None:
        self.store, self.path, self.dtype, self.end = (
            store,
            path,
            np.dtype(dtype).newbyteorder("<"),
            end_of_document,
        )
        # named after this process, in case two jobs meet
        self.partial = store.folder / f"{path}.{os.getpid()}.partial"
        self.lengths: list[npt.NDArray[np.int32]] = []
        self.begun = 0  # tokens of a document that has not ended yet
        self.min_id, self.max_id = end_of_document, end_of_document
        self.sha256, self.blocks, self.crc, self.filled = hashlib.sha256(), list[int](), 0, 0

    def __enter__(self) -> ShardWriter:
        try:
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.partial, "wb", buffering=0, opener=untrusted_input.opener)
        except OSError as error:
            raise unwritable(self.partial, error) from error
        return self

    def begin(self, ids: npt.NDArray[np.uint32]) -> int:
        """Appends a part of a document that continues with the next call. Returns the tokens
        written.
        """
        self._see(ids)
        self.begun += len(ids)
        self._write(ids.astype(self.dtype).data.cast("B"))
        return len(ids)

    def add(self, ids: npt.NDArray[np.uint32], offsets: npt.NDArray[np.int64]) -> int:
        """Appends documents (flat ids and their bounds), each with an end-of-document id. Returns
        the tokens written.
        """
        lengths = np.diff(offsets) + 1
        tokens = np.empty(len(ids) + len(lengths), self.dtype)
        inside = np.ones(len(tokens), np.bool_)
        inside[np.cumsum(lengths) - 1] = False
        tokens[inside] = ids
        tokens[~inside] = self.end
        self._see(ids)
        lengths[0], self.begun = lengths[0] + self.begun, 0
        self.lengths.append(lengths.astype(np.int32))
        self._write(tokens.data.cast("B"))
        return len(tokens)

    def commit(self, source: int) -> Shard | None:
        """Makes both files durable and visible and returns their record; None, and no files,
        without a document.
        """
        lengths = np.concatenate(self.lengths) if self.lengths else np.empty(0, np.int32)
        if not len(lengths):
            return None
        index = index_bytes(lengths, self.dtype)
        try:
            os.fsync(self.file.fileno())
            self.store.publish(f"{self.path}.bin", self.partial)
            with open(self.partial, "wb", opener=untrusted_input.opener) as file:
                file.write(index)
                file.flush()
                os.fsync(file.fileno())
            self.store.publish(f"{self.path}.idx", self.partial)
        except OSError as error:
            raise unwritable(self.partial, error) from error
        return Shard(
            path=self.path,
            source=source,
            tokens=int(lengths.sum(dtype=np.int64)),
            documents=len(lengths),
            min_id=self.min_id,
            max_id=self.max_id,
            longest=int(lengths.max()),
            lengths=tuple(np.bincount(np.frexp(lengths)[1] - 1, minlength=LENGTHS).tolist()),
            bin_sha256=self.sha256.hexdigest(),
            idx_sha256=hashlib.sha256(index).hexdigest(),
            blocks=(*self.blocks, self.crc) if self.filled else tuple(self.blocks),
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.file.close()
        self.partial.unlink(missing_ok=True)

    def _see(self, ids: npt.NDArray[np.uint32]) -> None:
        if len(ids):
            self.min_id, self.max_id = (
                min(self.min_id, int(ids.min())),
                max(self.max_id, int(ids.max())),
            )

    def _write(self, content: memoryview) -> None:
        self.sha256.update(content)
        try:
            for start in range(0, len(content), BLOCK):
                self._write_all(content[start : start + BLOCK])
        except OSError as error:
            raise unwritable(self.partial, error) from error
        while content:
            part = content[: BLOCK - self.filled]
            self.crc, self.filled = zlib.crc32(part, self.crc), self.filled + len(part)
            if self.filled == BLOCK:
                self.blocks.append(self.crc)
                self.crc = self.filled = 0
            content = content[len(part) :]

    def _write_all(self, content: memoryview) -> None:
        while content:  # a write may be short (a signal, a disk that is nearly full)
            content = content[self.file.write(content) :]


def index_bytes(lengths: npt.NDArray[np.int32], dtype: npt.DTypeLike) -> bytes:
    """Returns the content of an .idx file for documents of these lengths."""
    count, size = len(lengths), np.dtype(dtype).itemsize
    pointers = np.zeros(count, np.int64)
    np.cumsum(lengths[:-1], out=pointers[1:], dtype=np.int64)
    header = HEADER.pack(MAGIC, 1, TYPE_CODES[np.dtype(dtype).name], count, count + 1)
    parts = (
        lengths.astype("<i4"),
        (pointers * size).astype("<i8"),
        np.arange(count + 1, dtype="<i8"),
    )
    return header + b"".join(part.tobytes() for part in parts)
