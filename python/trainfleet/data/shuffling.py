"""Shuffled sample order, computed with bijections instead of a stored index.

The weights map global sample g to a source. The sample's number within the source determines its
epoch and its position in that epoch. The epoch's permutation then maps the position to a sample. A
permutation of [0, n) is a Feistel network on the next power of four, repeated until the result is
in [0, n) (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). It needs O(1) memory,
and all lookups are equally fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.uint64]
# Four rounds make a pseudorandom permutation (Luby and Rackoff 1988). Two more are added because
# the round function is only a mixer.
ROUNDS = 6
MIX = 4096  # number of consecutive samples over which every source gets exactly its share
WORD = 2**64 - 1
EPOCH, BLOCKS, WINDOW, TAIL, SHARE = range(5)  # keys that separate permutations by purpose


@dataclass(frozen=True)
class Order:
    """Infinite sample order over one or more sources. `counts` is each source's number of samples
    per epoch. `weights` may be omitted for a single source.
    """

    seed: int
    counts: tuple[int, ...]
    weights: tuple[float, ...] | None = None
    block: int = 0  # consecutive samples per block; 0 shuffles each source as a whole
    window: int = 0  # blocks that are shuffled together

    def at(self, first: int, count: int) -> tuple[Index, Index]:
        """Returns the source and the sample index of the global samples [first, first + count), as
        two uint64 arrays.
        """
        numbers = np.arange(first, first + count, dtype=np.uint64)
        sources, numbers = self._sources(numbers)
        positions = np.empty_like(numbers)
        for source in np.unique(sources):
            mine = sources == source
            epochs, within = np.divmod(numbers[mine], np.uint64(self.counts[int(source)]))
            for epoch in np.unique(epochs):
                within[epochs == epoch] = self._shuffled(
                    within[epochs == epoch], int(source), int(epoch)
                )
            positions[mine] = within
        return sources, positions

    def _sources(self, numbers: Index) -> tuple[Index, Index]:
        """Returns the source of each global sample, and the sample's number within that source."""
        if self.weights is None:
            return np.zeros_like(numbers), numbers
        shares = apportion(self.weights, MIX)
        starts = np.concatenate([[0], np.cumsum(shares)]).astype(np.uint64)
        rounds, within = np.divmod(numbers, np.uint64(MIX))
        for number in np.unique(rounds):
            within[rounds == number] = permuted(
                within[rounds == number], MIX, self.seed, SHARE, int(number)
            )
        sources = np.searchsorted(starts, within, side="right").astype(np.uint64) - np.uint64(1)
        return sources, rounds * np.array(shares, np.uint64)[sources] + within - starts[sources]

    def _shuffled(self, positions: Index, source: int, epoch: int) -> Index:
        n, key = self.counts[source], (self.seed, source, epoch)
        return (
            windowed(positions, n, self.block, self.window, *key)
            if self.block
            else permuted(positions, n, *key, EPOCH)
        )


def permuted(positions: npt.ArrayLike, n: int, *key: int) -> Index:
    """Returns the images of `positions`, all in [0, n), under the permutation of [0, n) that `key`
    selects.
    """
    values = np.array(positions, np.uint64)
    half = max(1, -(-max(n - 1, 1).bit_length() // 2))
    keys = [np.uint64(fold(*key, number)) for number in range(ROUNDS)]
    values = _feistel(values, half, keys)
    while len(outside := np.flatnonzero(values >= n)):
        values[outside] = _feistel(values[outside], half, keys)
    return values


def windowed(positions: Index, n: int, block: int, window: int, *key: int) -> Index:
    """Permutes [0, n) in windows of `window` random blocks, each with `block` consecutive samples.
    All samples of a window precede those of the next one.

    The last n % block samples come last. Reads stay within blocks that fit in a cache, and each
    block is read once per epoch.
    """
    blocks = n // block
    body, span = blocks * block, window * block
    image = np.empty_like(positions)
    tail = positions >= body
    image[tail] = body + permuted(positions[tail] - np.uint64(body), max(n - body, 1), *key, TAIL)
    for number in np.unique(positions[~tail] // np.uint64(span)):
        mine = ~tail & (positions // np.uint64(span) == number)
        size = min(window, blocks - int(number) * window) * block
        within = permuted(positions[mine] % np.uint64(span), size, *key, WINDOW, int(number))
        slots, offsets = np.divmod(within, np.uint64(block))
        image[mine] = (
            permuted(slots + number * np.uint64(window), blocks, *key, BLOCKS) * np.uint64(block)
            + offsets
        )
    return image


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Splits `total` into integers of at least one that are as proportional to the weights as
    possible (largest remainder method).
    """
    exact = [max(weight / sum(weights) * (total - len(weights)), 0) + 1 for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return shares


def mix(values: npt.ArrayLike) -> Index:
    """Applies splitmix64's finalizer, in which each input bit flips each output bit with
    probability 1/2.
    """
    z = np.asarray(values, np.uint64)
    with np.errstate(over="ignore"):
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def fold(*parts: int) -> int:
    """Combines numbers into one 64-bit key that depends on their values and order."""
    key = 0
    # Same as `mix`, but on Python integers, which is ten times faster for a single number.
    for part in parts:
        key = ((key ^ part) + 0x9E3779B97F4A7C15) & WORD
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & WORD
        key ^= key >> 31
    return key


def _feistel(values: Index, half: int, keys: list[np.uint64]) -> Index:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << shift) | right
