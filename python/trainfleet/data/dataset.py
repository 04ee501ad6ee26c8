"""A finished dataset: found by its config, opened once, and read as batches of samples.

The tokens of a split are those of its shards one after another. Sample k of length T is tokens [k·T, k·T + T], so that inputs and
targets come from one row and neighbours share one token. Which sample is the g-th of the training says order.py.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import DataError
from .manifest import SPLITS, TRAIN, Manifest, find, read_manifest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .tokens import Tokens

__all__ = ["Dataset", "Manifest", "find"]


class Dataset:
    """Samples of a dataset's splits. Opening it reads the manifest; token files are mapped when they are first read."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest

    @classmethod
    def open(cls, folder: Path) -> Dataset:
        """The dataset in a folder. DataError when it is not finished."""
        manifest = read_manifest(folder)
        if manifest is None:
            raise DataError("holds no finished dataset", where=str(folder), next="make tokenize")
        return cls(folder, manifest)

    def samples(self, split: str, sequence_length: int) -> int:
        """How many samples of `sequence_length` inputs one epoch of a split has."""
        return max(0, (self._split(split).tokens - 1) // sequence_length)

    def batch(self, split: str, first: int, count: int, sequence_length: int, seed: int) -> npt.NDArray[np.int64]:
        """Samples [first, first + count) of the global order: int64 [count, sequence_length + 1].

        A pure function of its arguments: which rank asks, and for how many at a time, changes nothing. `train` is shuffled anew
        every epoch; `validation` is read in order. DataError when the split is shorter than one sample.
        """
        import numpy as np

        tokens = self._split(split)
        places = self.positions(split, first, count, sequence_length, seed)
        rows = np.empty((count, sequence_length + 1), np.int64)
        for row, place in zip(rows, places, strict=True):
            tokens.read(int(place) * sequence_length, row)
        return rows

    def positions(self, split: str, first: int, count: int, sequence_length: int, seed: int) -> npt.NDArray[np.uint64]:
        """Which samples the global samples [first, first + count) are: uint64 [count]."""
        import numpy as np

        from .order import permuted

        n = self.samples(split, sequence_length)
        if n == 0:
            raise DataError(
                f"its {split} split has {self._split(split).tokens:,} tokens: not one sample of {sequence_length}",
                where=str(self.folder),
                next="lower train.sequence_length, or add text to data.sources",
            )
        epochs, places = np.divmod(np.arange(first, first + count, dtype=np.uint64), np.uint64(n))
        if split == TRAIN:
            for epoch in np.unique(epochs):
                places[epochs == epoch] = permuted(places[epochs == epoch], n, seed, int(epoch))
        return places

    def _split(self, name: str) -> Tokens:
        return self._splits[name]

    @cached_property
    def _splits(self) -> dict[str, Tokens]:
        from .tokens import Tokens

        return {split: Tokens(self.folder, self.manifest.split(split), self.manifest.dtype) for split in SPLITS}
