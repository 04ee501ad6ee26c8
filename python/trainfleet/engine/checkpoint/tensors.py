"""Tensors as bytes and back: files are read straight into a tensor's memory."""

from __future__ import annotations

import math
from typing import BinaryIO

import torch
from torch import Tensor

from ...checkpoints.pieces import ArchivePiece, PiecePlace
from ...checkpoints.torch_saved.archive import Archive, Stored

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def bytes_of(tensor: Tensor) -> memoryview | bytes:
    """The memory of a contiguous tensor of the host."""
    return tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else b""


def read_tensor(stream: BinaryIO, place: PiecePlace) -> Tensor:
    """The tensor that lies there. ValueError when its numbers are not all there."""
    dtype = DTYPES[place.dtype]
    if not math.prod(place.size):
        return torch.empty(place.size, dtype=dtype)
    found = torch.empty(place.length, dtype=torch.uint8)
    stream.seek(place.first)
    if stream.readinto(found.numpy().data) != place.length:  # type: ignore[attr-defined]
        raise ValueError(f"its file ends before byte {place.first + place.length:,}")
    return found.view(dtype).as_strided(place.size, place.strides, place.skipped)


def read_plain(stream: BinaryIO, piece: ArchivePiece) -> str | int | float | None:
    """The text or number that a piece of a checkpoint of format 2 holds; ValueError for anything else."""
    assert isinstance(piece, Stored)
    value = Archive(stream, piece).content()
    if value is not None and type(value) not in (str, int, float, bool):
        raise ValueError(f"{piece.name} is neither text nor a number")
    return value  # type: ignore[no-any-return]
