"""The pieces that the tensors of a checkpoint were cut into, and where each lies, in any format."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NUMBERS = {  # number format, by safetensors' name → bytes of a number
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
DIMENSIONS = 8  # of a tensor, at most
LARGEST = 2**60  # no size, offset or count is as large
NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f]{1,500}")
WEIGHTS = "model."  # what the names of a model's weights begin with
Sizes = tuple[int, ...]
Key = tuple[str, Sizes | None]  # of a piece: a name, and where it begins; None: it is not a tensor's


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint: its size and number format; of each piece the offsets and the size."""

    size: Sizes
    dtype: str
    chunks: tuple[tuple[Sizes, Sizes], ...]


@dataclass(frozen=True)
class ArchivePiece:
    """A piece of a tensor, and its file; without a number format it is a text or a number."""

    name: str
    file: str
    size: Sizes = ()
    dtype: str = ""


@dataclass(frozen=True)
class PiecePlace:
    """Where a tensor lies in a file: a view, by strides, of `count` numbers from byte `first` on.

    The view begins at number `skipped`.
    """

    first: int
    count: int
    dtype: str
    size: Sizes
    strides: Sizes
    skipped: int = 0

    @property
    def length(self) -> int:
        """In bytes."""
        return self.count * NUMBERS[self.dtype]


@dataclass(frozen=True)
class CheckpointIndex:
    """The entries of a checkpoint by name (None: a text or a number), and the piece at each key."""

    entries: Mapping[str, Tensor | None]
    pieces: Mapping[Key, ArchivePiece]


def is_size(value: object) -> bool:
    """Whether a value is a list of counts, as many as a tensor may have dimensions."""
    return isinstance(value, list | tuple) and len(value) <= DIMENSIONS and all(map(is_count, value))


def is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def are_tiles(size: Sizes, chunks: Sequence[tuple[Sizes, Sizes]]) -> bool:
    """Whether pieces cover a tensor once, cut along each dimension into the same intervals."""
    if any(len(offsets) != len(size) or len(sizes) != len(size) for offsets, sizes in chunks):
        return False
    axes = range(len(size))
    cuts = [sorted({(offsets[axis], sizes[axis]) for offsets, sizes in chunks}) for axis in axes]
    for intervals, length in zip(cuts, size, strict=True):
        ends = [0, *(offset + extent for offset, extent in intervals)]
        if ends[:-1] != [offset for offset, _ in intervals] or ends[-1] != length:
            return not all(size) and not chunks
    return len({offsets for offsets, _ in chunks}) == len(chunks) == math.prod(map(len, cuts))
