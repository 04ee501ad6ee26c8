"""Reader for sample batches from a finished dataset.

A split's tokens are the concatenated tokens of its shards. Sample k of length T is tokens [k·T, k·T
+ T], so inputs and targets are slices of one array, and adjacent samples share one token.
shuffling.py determines the order of samples in training.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.types import Data
from ..run import run_folder
from ..trust.errors import DataError
from ..trust.untrusted_input import MEBIBYTE
from .dataset_store import DatasetStore, open_store
from .manifest import ITEM_BYTES, SPLITS, TRAIN, VALIDATION, Manifest, find, read_manifest
from .sources import short_names

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from .manifest import Shard
    from .packing import Pack
    from .shards import BlockCache, Tokens
    from .shuffling import Order

__all__ = ["Dataset", "Manifest", "find"]

# Size of a contiguous block in the windowed order, large enough to read from disk or S3 at full
# throughput
BLOCK_BYTES = 8 * MEBIBYTE
REMOTE_WINDOW = 1024  # default shuffle window for datasets in S3, in MiB
AHEAD = 4  # number of batches to prefetch


class Dataset:
    """Reader for a dataset's samples. Opening it checks that the dataset is complete. Token files
    are mapped on first access.
    """

    def __init__(
        self,
        store: DatasetStore,
        manifest: Manifest,
        weights: tuple[float, ...] | None,
        window: int | None,
    ) -> None:
        self.store, self.manifest, self.weights, self.window = store, manifest, weights, window
        self.orders = cache(self._order)
        self.last: dict[str, int] = {}

    @classmethod
    def open(cls, folder: Path, data: Data | None = None) -> Dataset:
        """Opens the dataset in a folder. `data` specifies its store, source weights and shuffle
        window.

        Raises DataError if the dataset is unfinished, a file is missing, or the tokenizer or a
        sampled block does not match the manifest.
        """
        from .shards import check_opening

        mounted = os.environ.get(run_folder.MOUNTED)
        store = open_store(
            Path(mounted) if mounted else folder,
            data.tokenized_path if data and not mounted else None,
        )
        manifest = read_manifest(store)
        if manifest is None:
            raise DataError(
                "has no finished dataset", where=store.describe(""), next="make tokenize"
            )
        check_opening(store, manifest)
        window = data.shuffle_window_mib if data else None
        # A mounted dataset uses the same window as a dataset in S3, so both yield the same batches.
        if window is None and (store.remote or mounted):
            window = REMOTE_WINDOW
        kind = Conversations if manifest.settings.conversations else cls
        return kind(store, manifest, data.weights if data else None, window)

    @property
    def identity(self) -> str:
        """Hash of everything that determines a sample's tokens, other than its number, length and
        seed. It must not change during a run.
        """
        if self.weights is None and self.window is None:
            return self.manifest.identity
        return hashlib.sha256(
            f"{self.manifest.identity} {self.weights} {self.window}".encode()
        ).hexdigest()

    @property
    def end_of_document(self) -> int:
        """Token id that ends each document."""
        return self.manifest.end_of_document

    def notes(self, sequence_length: int) -> list[str]:
        """Returns notes for the user about the dataset and its samples."""
        return [*self.manifest.notes]

    @property
    def folder(self) -> Path:
        """Local folder that contains the tokenizer."""
        return self.store.folder

    def samples(self, split: str, sequence_length: int) -> int:
        """Returns the number of samples with `sequence_length` inputs in one epoch of a split."""
        return sum(self.counts(split, sequence_length))

    def counts(self, split: str, sequence_length: int) -> tuple[int, ...]:
        """Returns the number of samples from each of a split's sources."""
        return tuple(max(0, (len(tokens) - 1) // sequence_length) for tokens in self._splits[split])

    @cached_property
    def validation_parts(self) -> dict[str, list[Shard]]:
        """Parts of the validation split that are also validated separately, with their shards: one
        per source, or none if there is only one source.
        """
        names = short_names(self.manifest.settings.sources)
        found = self.manifest.by_source(VALIDATION).items()
        parts = {f"{VALIDATION}/{names[source]}": shards for source, shards in found}
        return parts if len(parts) > 1 else {}

    def learned(
        self, split: str, first: int, count: int, sequence_length: int, seed: int
    ) -> int | None:
        """Returns the number of loss targets in samples [first, first + count).

        None means that it is the same for all samples.
        """
        return None

    def batch(
        self, split: str, first: int, count: int, sequence_length: int, seed: int
    ) -> npt.NDArray[np.int64]:
        """Returns samples [first, first + count) of the global order as int64 [count,
        sequence_length + 1]. The result depends only on the arguments, not on the rank or on how
        samples are grouped into calls.

        `train` is reshuffled every epoch, and `validation` is read in order. Raises DataError if
        the split is shorter than one sample.
        """
        rows = self.rows(split, first, count, sequence_length, seed)
        if self._cache:
            self._expect(split, first, count, sequence_length, seed)
        return rows

    def rows(
        self, split: str, first: int, count: int, sequence_length: int, seed: int
    ) -> npt.NDArray[np.int64]:
        """Returns the same samples as `batch`, without prefetching the next ones."""
        import numpy as np

        rows, tokens = np.empty((count, sequence_length + 1), np.int64), self._splits[split]
        for row, source, position in zip(
            rows, *self.positions(split, first, count, sequence_length, seed), strict=True
        ):
            tokens[source].read(int(position) * sequence_length, row)
        return rows

    def positions(
        self, split: str, first: int, count: int, sequence_length: int, seed: int
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Returns the source of each global sample in [first, first + count), and the sample's
        position within that source, as uint64 [count] arrays.
        """
        import numpy as np

        order = self.orders(split, sequence_length, seed)
        if split == TRAIN:
            return order.at(first, count)
        positions = np.arange(first, first + count, dtype=np.uint64) % np.uint64(order.counts[0])
        return np.zeros_like(positions), positions

    def check_vocabulary(self, size: int) -> None:
        """Raises DataError if a token id is out of range for a model with `size` embeddings."""
        if (largest := max(shard.max_id for shard in self.manifest.shards)) >= size:
            why = f"its largest token id is {largest}, but the model has {size} embeddings"
            raise DataError(
                "does not fit the model",
                where=self.store.describe(""),
                why=why,
                next="raise model.vocab_size",
            )

    def _order(self, split: str, sequence_length: int, seed: int) -> Order:
        from .shuffling import Order

        tokens = self._splits[split]
        counts = self.counts(split, sequence_length)
        for source, count in zip(tokens, counts, strict=True):
            if not count:
                what = (
                    f"its {split} split has {len(source):,} tokens, fewer than one sample of "
                    f"{sequence_length}"
                )
                remedy = "lower train.sequence_length, or add text to data.sources"
                if split == VALIDATION:
                    remedy = (
                        "raise data.validation_fraction and change data.name, or "
                        "lower train.sequence_length"
                    )
                raise DataError(what, where=self.store.describe(""), next=remedy)
        weights = self.weights if split == TRAIN else None
        if not self.window:
            return Order(seed, counts, weights)
        block = max(1, BLOCK_BYTES // (sequence_length * ITEM_BYTES[self.manifest.dtype]))
        return Order(seed, counts, weights, block, max(1, self.window * MEBIBYTE // BLOCK_BYTES))

    @cached_property
    def _splits(self) -> dict[str, list[Tokens]]:
        """Token sequences of each split, and of each source's part of the validation split. If
        sources have weights, the training split has one sequence per source. Otherwise, each split
        is a single sequence.
        """
        from .shards import Tokens

        parts = {split: [self.manifest.split(split)] for split in SPLITS}
        if self.weights:
            sources = self.manifest.by_source(TRAIN)
            parts[TRAIN] = [(*sources[number],) for number in range(len(self.weights))]
        for name, shards in self.validation_parts.items():
            parts[name] = [(*shards,)]
        return {
            split: [Tokens(self.store, part, self.manifest.dtype, self._cache) for part in each]
            for split, each in parts.items()
        }

    @cached_property
    def _cache(self) -> BlockCache | None:
        from .shards import BlockCache

        # enough for the current and the next shuffle window
        limit = 2 * (self.window or REMOTE_WINDOW) * MEBIBYTE
        return BlockCache(self.store.folder / "cache", limit) if self.store.remote else None

    def _expect(self, split: str, first: int, count: int, sequence_length: int, seed: int) -> None:
        """Prefetches the next batches, assuming a constant stride between calls."""
        step, self.last[split] = first - self.last.get(split, first), first
        for ahead in range(first + step, first + AHEAD * step + 1, step) if step > 0 else ():
            sources, positions = self.positions(split, ahead, count, sequence_length, seed)
            for source, position in zip(sources, positions, strict=True):
                self._splits[split][source].expect(
                    int(position) * sequence_length, sequence_length + 1
                )


class Conversations(Dataset):
    """Dataset of conversations, with packed rows as samples (packing.py).

    A batch is int64 [count, T, 3]: input, target, and the conversation's index within the row.
    """

    @cached_property
    def packs(self) -> Callable[[str, int], list[Pack]]:
        """Maps a split and T to the packed rows of each source, with caching."""
        from .packing import read_pack

        return cache(
            lambda split, length: [
                read_pack(self.store, tokens, length) for tokens in self._splits[split]
            ]
        )

    def counts(self, split: str, sequence_length: int) -> tuple[int, ...]:
        counts = tuple(len(pack.learned) for pack in self.packs(split, sequence_length))
        if split == TRAIN and not all(counts):
            raise DataError(
                f"has a source without a conversation of {sequence_length} tokens or fewer",
                where=self.store.describe(""),
                next="raise train.sequence_length",
            )
        return counts

    def notes(self, sequence_length: int) -> list[str]:
        packs = [each for split in SPLITS for each in self.packs(split, sequence_length)]
        cut = sum(each.cut for each in packs)
        out = sum(len(each.lengths) - len(each.order) for each in packs)
        what = (
            f"{cut + out:,} conversations are longer than {sequence_length} tokens: {cut:,} are "
            f"cut after the last answer that fits, {out:,} are left out"
        )
        return [*super().notes(sequence_length), *([what] if cut + out else [])]

    def learned(
        self, split: str, first: int, count: int, sequence_length: int, seed: int
    ) -> int | None:
        packs = self.packs(split, sequence_length)
        places = zip(*self.positions(split, first, count, sequence_length, seed), strict=True)
        return sum(int(packs[source].learned[position]) for source, position in places)

    def batch(
        self, split: str, first: int, count: int, sequence_length: int, seed: int
    ) -> npt.NDArray[np.int64]:
        import numpy as np

        from .packing import IGNORED, fill

        packs, rows = self.packs(split, sequence_length), np.empty((count, sequence_length, 3), int)
        rows[:] = self.end_of_document, IGNORED, -1  # padding
        places = self.positions(split, first, count, sequence_length, seed)
        for row, source, position in zip(rows, *places, strict=True):
            fill(row, packs[source], self._splits[split][source], int(position))
        return rows
