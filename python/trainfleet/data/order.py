"""Which sample is the g-th: a bijection that is computed, not stored.

Global sample g lies in epoch g // n at place g % n, and the epoch's permutation of [0, n) says which sample that is. The
permutation is a Feistel network on the next power of four, walked until it lands in [0, n) (Black and Rogaway 2002, "Ciphers with
arbitrary finite domains"): O(1) memory, and any place of any epoch is as quick as the first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.uint64]
ROUNDS = 6  # four make a pseudorandom permutation (Luby and Rackoff 1988); two more for a round function that is only a mixer


def permuted(places: npt.ArrayLike, n: int, seed: int, epoch: int) -> Index:
    """The images of `places`, each in [0, n), under the permutation of [0, n) that (seed, epoch) stands for."""
    values = np.array(places, np.uint64)
    half = max(1, -(-max(n - 1, 1).bit_length() // 2))
    keys = [mix(np.uint64(_key(seed, epoch, r))) for r in range(ROUNDS)]
    values = _feistel(values, half, keys)
    outside = np.flatnonzero(values >= n)
    while len(outside):
        values[outside] = _feistel(values[outside], half, keys)
        outside = outside[values[outside] >= n]
    return values


def mix(values: npt.ArrayLike) -> Index:
    """The finaliser of splitmix64: every bit of the input changes each bit of the output with probability one half."""
    z = np.asarray(values, np.uint64)
    with np.errstate(over="ignore"):
        z = z + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _feistel(values: Index, half: int, keys: list[Index]) -> Index:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << shift) | right


def _key(seed: int, epoch: int, round: int) -> int:
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xC2B2AE3D27D4EB4F + round * 0x165667B19E3779F9) % 2**64
