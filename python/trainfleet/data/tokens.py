"""The tokens of a split as one long row over many mapped files."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .manifest import ITEM_BYTES, Shard, size_of

OPEN_FILES = 512  # mapped at a time, below the usual limit of 1024 descriptors


class Tokens:
    """Reads any range of the concatenated shards; a missing or shortened file is refused when it is first needed."""

    def __init__(self, folder: Path, shards: tuple[Shard, ...], dtype: str) -> None:
        self.folder, self.shards, self.dtype = folder, shards, np.dtype(dtype).newbyteorder("<")
        self.starts = np.concatenate([[0], np.cumsum([shard.tokens for shard in shards], dtype=np.int64)]).astype(np.int64)
        self.mapped = lru_cache(OPEN_FILES)(self._map)

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, out: npt.NDArray[np.int64]) -> None:
        """Fills `out` with the tokens from `start` on."""
        index, filled = int(np.searchsorted(self.starts, start, side="right")) - 1, 0
        while filled < len(out):
            begin = start + filled - int(self.starts[index])
            part = self.mapped(index)[begin : begin + len(out) - filled]
            out[filled : filled + len(part)] = part
            index, filled = index + 1, filled + len(part)

    def _map(self, index: int) -> npt.NDArray[np.generic]:
        shard = self.shards[index]
        if size_of(self.folder, shard) != shard.tokens * ITEM_BYTES[self.dtype.name]:
            raise DataError(
                "is missing or not as long as the manifest says",
                where=str(self.folder / f"{shard.path}.bin"),
                next="make clean PURGE=1, then make tokenize",
            )
        return np.memmap(self.folder / f"{shard.path}.bin", self.dtype, "r", shape=(shard.tokens,))
