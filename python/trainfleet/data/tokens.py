"""Reads the tokens of many shards as one long row, from mapped files or from S3 by blocks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..trust import untrusted_input
from ..trust.errors import DataError
from .cache import BlockCache
from .dataset_store import BucketDataset, DatasetStore
from .manifest import BLOCK, Shard

OPEN_FILES = 512  # mapped files at a time, below the usual limit of 1024 descriptors
Tokenlike = npt.NDArray[Any]


class Tokens:
    """Reads any range of the concatenated shards."""

    def __init__(
        self, store: DatasetStore, shards: Sequence[Shard], dtype: str, cache: BlockCache | None
    ) -> None:
        self.store, self.shards, self.cache = store, shards, cache
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.starts = np.concatenate(
            [[0], np.cumsum([shard.tokens for shard in shards], dtype=np.int64)]
        ).astype(np.int64)
        self.mapped: Callable[[int], Tokenlike] = lru_cache(OPEN_FILES)(self._map)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, out: npt.NDArray[np.int64]) -> None:
        """Fills `out` with the tokens from `start` on."""
        for index, begin, end, at in self._parts(start, len(out)):
            out[at : at + end - begin] = (
                self._fetch(index, begin, end) if self.cache else self.mapped(index)[begin:end]
            )

    def expect(self, start: int, length: int) -> None:
        """Prefetches these tokens into the cache, if there is one."""
        for index, begin, end, _ in self._parts(start, length) if self.cache else ():
            for block in self._blocks(begin, end):
                self._cached(index, block)

    def _parts(self, start: int, length: int) -> list[tuple[int, int, int, int]]:
        """Returns shard, first and last token in it, and place in the row, for each stretch of a
        range.
        """
        index, at, parts = int(np.searchsorted(self.starts, start, side="right")) - 1, 0, []
        while at < length:
            begin = start + at - int(self.starts[index])
            end = min(begin + length - at, self.shards[index].tokens)
            parts.append((index, begin, end, at))
            index, at = index + 1, at + end - begin
        return parts

    def _map(self, index: int) -> Tokenlike:
        shard = self.shards[index]
        with open(
            self.store.describe(f"{shard.path}.bin"), "rb", opener=untrusted_input.opener
        ) as file:
            return np.memmap(file, self.dtype, "r", shape=(shard.tokens,))

    def _blocks(self, begin: int, end: int) -> range:
        width = self.dtype.itemsize
        return range(begin * width // BLOCK, (end * width - 1) // BLOCK + 1)

    def _fetch(self, index: int, begin: int, end: int) -> Tokenlike:
        blocks = self._blocks(begin, end)
        content = b"".join(self._cached(index, block)() for block in blocks)
        first = blocks[0] * BLOCK // self.dtype.itemsize
        return np.frombuffer(content, self.dtype)[begin - first : end - first]

    def _cached(self, index: int, block: int) -> Callable[[], bytes]:
        """Fetches a block of a shard in the background, if needed; call the result to wait for
        it.
        """
        assert self.cache is not None and isinstance(self.store, BucketDataset)
        shard, store = self.shards[index], self.store

        def fetch() -> bytes:
            content = store.read_range(
                f"{shard.path}.bin",
                block * BLOCK,
                min(shard.tokens * self.dtype.itemsize, (block + 1) * BLOCK),
            )
            check_block(content, shard, block, store)
            return content

        return self.cache.get(f"{shard.bin_sha256[:16]}-{block}", fetch)


def check_block(content: bytes | memoryview, shard: Shard, block: int, store: DatasetStore) -> None:
    """Raises DataError if a block of a shard is not as it was written."""
    if zlib.crc32(content) != shard.blocks[block]:
        why = f"the checksum of bytes {block * BLOCK} to {block * BLOCK + len(content)} differs"
        raise DataError(
            "is damaged", where=store.describe(f"{shard.path}.bin"), why=why, next=store.remake()
        )
