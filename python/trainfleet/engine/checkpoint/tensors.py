"""A piece of a checkpoint as a tensor: what checkpoints/archive.py found, read straight into the tensor's memory."""

from __future__ import annotations

import math
from typing import BinaryIO

import torch
from torch import Tensor

from ...checkpoints.archive import ITEMS, Archive, Numbers, Piece, require_tensor

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name.removeprefix("torch.")) for name in ITEMS}


def read_plain(stream: BinaryIO, piece: Piece) -> str | int | float | None:
    """The text or number that a piece holds. ValueError when it holds something else."""
    value = Archive(stream, piece).content()
    if value is not None and type(value) not in (str, int, float, bool):
        raise ValueError(f"{piece.name} is neither text nor a number")
    return value  # type: ignore[no-any-return]


def read_tensor(stream: BinaryIO, piece: Piece) -> Tensor:
    """The tensor that a piece holds. ValueError when it is not all there, or of another size or number format."""
    return tensor(*require_tensor(stream, piece))


def tensor(archive: Archive, numbers: Numbers) -> Tensor:
    """A tensor of an archive. ValueError when its numbers are not all there."""
    dtype = DTYPES[numbers.dtype]
    if not math.prod(numbers.size):
        return torch.empty(numbers.size, dtype=dtype)
    archive.require(numbers)  # before memory is taken
    found = torch.empty(numbers.count * dtype.itemsize, dtype=torch.uint8)
    archive.read_into(numbers, found.numpy().data)
    return found.view(dtype).as_strided(numbers.size, numbers.strides, numbers.first)
