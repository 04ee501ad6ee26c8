"""A checkpoint's index: which tensors it holds, and where each of their pieces lies. It is read as data, and then checked.

torch.distributed.checkpoint keeps it in `.metadata` as a pickle of its classes, and reads it with pickle.load, which executes
whatever it contains. Here it is read without that (`pickled`), and every name, size and offset in it is checked against the files
that the marker lists, so that no more is allocated and read later than those files hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ...checkpoints.marker import File
from . import pickled
from .archive import DTYPES, Piece
from .pickled import Made

FILE = ".metadata"
LARGEST = 2**28  # bytes of an index: of a million pieces
_CLASSES = "torch.distributed.checkpoint.metadata."
_NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f]{1,500}")
Sizes = tuple[int, ...]
Entry = TensorStorageMetadata | BytesStorageMetadata


def parse(data: bytes, files: Mapping[str, File]) -> tuple[Metadata, dict[MetadataIndex, Piece]]:
    """What an index says: the tensors for torch's planner, and where each piece is.

    Raises:
        ValueError: what it says can't be so, given these files.
    """
    state = _state(pickled.read(data), f"{_CLASSES}Metadata")
    stored = _dict(state.get("storage_data"))
    found = dict(_piece(key, at, files) for key, at in stored.items())
    tensors: dict[str, Entry] = {}
    left = len(found)  # of pieces: one list of them may stand, in a few bytes, in many tensors
    for name, made in _dict(state.get("state_dict_metadata")).items():
        tensors[_name(name)] = entry = _entry(made, left)
        for needed, size, dtype in _pieces(name, entry):
            piece = found.get(needed)
            if piece is None or piece.length < math.prod(size) * (dtype.itemsize if dtype else 0):
                raise ValueError(f"its index has no place that is large enough for {name}")
            found[needed] = replace(piece, size=size, dtype=dtype)
            left -= 1
    if left or len(found) != len(stored):
        raise ValueError("its index does not have one place for each piece")
    if sum(piece.length for piece in found.values()) > sum(file.size for file in files.values()):
        raise ValueError("its index puts several pieces in one place")
    return Metadata(dict(tensors)), found


def _entry(made: Any, most: int) -> Entry:
    """The entry of one name, of at most `most` pieces."""
    if isinstance(made, Made) and made.of == f"{_CLASSES}BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(made, f"{_CLASSES}TensorStorageMetadata")
    properties = state.get("properties")
    fields = properties.state if isinstance(properties, Made) else None
    dtype = DTYPES.get(fields[0]) if isinstance(fields, tuple) and fields and isinstance(fields[0], str) else None
    if dtype is None:
        raise ValueError("its index has a tensor of no known number format")
    size = _sizes(state.get("size"))
    listed = _list(state.get("chunks"))
    chunks = [_chunk(chunk) for chunk in listed[: most + 1]]
    if not _tiled(size, [chunk for chunk in chunks if all(chunk[1])]):
        raise ValueError(f"its index does not have all of a tensor of size {size}, or has some of it twice")
    pieces = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(size), pieces)


def _chunk(made: Any) -> tuple[Sizes, Sizes]:
    state = _state(made, f"{_CLASSES}ChunkStorageMetadata")
    return _sizes(state.get("offsets")), _sizes(state.get("sizes"))


def _tiled(size: Sizes, chunks: list[tuple[Sizes, Sizes]]) -> bool:
    """Whether pieces cover a tensor once, as all layouts cut it: along each dimension into the same intervals."""
    if any(len(offsets) != len(size) or len(sizes) != len(size) for offsets, sizes in chunks):
        return False
    cuts = [sorted({(offsets[axis], sizes[axis]) for offsets, sizes in chunks}) for axis in range(len(size))]
    for intervals, length in zip(cuts, size, strict=True):
        ends = [0, *(offset + extent for offset, extent in intervals)]
        if ends[:-1] != [offset for offset, _ in intervals] or ends[-1] != length:
            return not all(size) and not chunks
    return len({offsets for offsets, _ in chunks}) == len(chunks) == math.prod(map(len, cuts))


def _pieces(name: str, entry: Entry) -> Iterable[tuple[MetadataIndex, torch.Size, torch.dtype | None]]:
    """The pieces under a name, each once."""
    if isinstance(entry, BytesStorageMetadata):
        return [(MetadataIndex(name), torch.Size(), None)]
    return {
        chunk.offsets: (MetadataIndex(name, chunk.offsets), chunk.sizes, entry.properties.dtype) for chunk in entry.chunks
    }.values()


def _piece(key: Any, at: Any, files: Mapping[str, File]) -> tuple[MetadataIndex, Piece]:
    """Where one piece lies: inside a file of the checkpoint."""
    named = _state(key, f"{_CLASSES}MetadataIndex")
    name, offset = _name(named.get("fqn")), named.get("offset")
    index = MetadataIndex(name, None if offset is None else _sizes(offset))
    state = _state(at, "torch.distributed.checkpoint.filesystem._StorageInfo")
    file, first, length = state.get("relative_path"), _count(state.get("offset")), _count(state.get("length"))
    if not isinstance(file, str) or file not in files or file == FILE:
        raise ValueError(f"its index looks for {name} in {str(file)[:80]!r}, which is no file of it")
    if state.get("transform_descriptors") or first + length > files[file].size:
        raise ValueError(f"its index looks for {name} behind the end of {file}")
    return index, Piece(name, file, first, length)


def _state(made: Any, of: str) -> Mapping[str, Any]:
    """What an object of that class has in its fields."""
    if not isinstance(made, Made) or made.of != of or not isinstance(made.state, dict):
        raise ValueError(f"its index has something else where there should be a {of.rpartition('.')[2]}")
    return made.state


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError("its index has no table of what it holds")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("its index has no list of a tensor's pieces")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"its index has {str(value)[:80]!r} for a name")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**60:
        raise ValueError("its index has no number where there should be one")
    return value


def _sizes(made: Any) -> Sizes:
    """A torch.Size."""
    arguments = made.arguments if isinstance(made, Made) and made.of == "torch.Size" else ()
    if len(arguments) != 1 or not isinstance(arguments[0], tuple) or len(arguments[0]) > 8:
        raise ValueError("its index has no size where there should be one")
    return tuple(_count(value) for value in arguments[0])
