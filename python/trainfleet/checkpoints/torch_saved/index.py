"""The index of a checkpoint of format 2: which tensors it holds, and where each of their pieces lies.

torch.distributed.checkpoint keeps it in `.metadata` as a pickle of its classes, and reads it with pickle.load, which executes
whatever it contains. Here it is read without that (`pickled`), and every name, size and offset in it is checked against the files
that the marker lists, so that no more is allocated and read later than those files hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..marker import FileSum
from ..pieces import NAME, NUMBERS, CheckpointIndex, Key, Sizes, Tensor, are_tiles, is_count, is_size
from . import pickled
from .archive import FORMATS, Stored
from .pickled import Made

FILE = ".metadata"
_CLASSES = "torch.distributed.checkpoint.metadata."


def parse(data: bytes, files: Mapping[str, FileSum]) -> CheckpointIndex:
    """What an index says.

    Raises:
        ValueError: what it says can't be so, given these files.
    """
    state = _state(pickled.read(data), f"{_CLASSES}Metadata")
    stored = _dict(state.get("storage_data"))
    found = dict(_piece(key, at, files) for key, at in stored.items())
    entries: dict[str, Tensor | None] = {}
    left = len(found)  # of pieces: one list of them may stand, in a few bytes, in many tensors
    for name, made in _dict(state.get("state_dict_metadata")).items():
        entries[_name(name)] = entry = _entry(made, left)
        for needed, size, dtype in _pieces(name, entry):
            piece = found.get(needed)
            if piece is None or piece.length < math.prod(size) * NUMBERS.get(dtype, 0):
                raise ValueError(f"its index has no place that is large enough for {name}")
            found[needed] = replace(piece, size=size, dtype=dtype)
            left -= 1
    if left or len(found) != len(stored):
        raise ValueError("its index does not have one place for each piece")
    if sum(piece.length for piece in found.values()) > sum(file.size for file in files.values()):
        raise ValueError("its index puts several pieces in one place")
    return CheckpointIndex(entries, found)


def _entry(made: Any, most: int) -> Tensor | None:
    """The entry of one name, of at most `most` pieces."""
    if isinstance(made, Made) and made.of == f"{_CLASSES}BytesStorageMetadata":
        return None
    state = _state(made, f"{_CLASSES}TensorStorageMetadata")
    properties = state.get("properties")
    fields = properties.state if isinstance(properties, Made) else None
    dtype = FORMATS.get(str(fields[0]), "") if isinstance(fields, tuple) and fields and isinstance(fields[0], str) else ""
    if not dtype:
        raise ValueError("its index has a tensor of no known number format")
    size = _sizes(state.get("size"))
    listed = _list(state.get("chunks"))
    chunks = [_chunk(chunk) for chunk in listed[: most + 1]]
    if not are_tiles(size, [chunk for chunk in chunks if all(chunk[1])]):
        raise ValueError(f"its index does not have all of a tensor of size {size}, or has some of it twice")
    return Tensor(size, dtype, tuple(chunks))


def _chunk(made: Any) -> tuple[Sizes, Sizes]:
    state = _state(made, f"{_CLASSES}ChunkStorageMetadata")
    return _sizes(state.get("offsets")), _sizes(state.get("sizes"))


def _pieces(name: str, entry: Tensor | None) -> Iterable[tuple[Key, Sizes, str]]:
    """The pieces under a name, each once."""
    if entry is None:
        return [((name, None), (), "")]
    return {offsets: ((name, offsets), sizes, entry.dtype) for offsets, sizes in entry.chunks}.values()


def _piece(key: Any, at: Any, files: Mapping[str, FileSum]) -> tuple[Key, Stored]:
    """Where one piece lies: inside a file of the checkpoint."""
    named = _state(key, f"{_CLASSES}MetadataIndex")
    name, offset = _name(named.get("fqn")), named.get("offset")
    state = _state(at, "torch.distributed.checkpoint.filesystem._StorageInfo")
    file, first, length = state.get("relative_path"), _count(state.get("offset")), _count(state.get("length"))
    if not isinstance(file, str) or file not in files or file == FILE:
        raise ValueError(f"its index looks for {name} in {str(file)[:80]!r}, which is no file of it")
    if state.get("transform_descriptors") or first + length > files[file].size:
        raise ValueError(f"its index looks for {name} behind the end of {file}")
    return (name, None if offset is None else _sizes(offset)), Stored(name, file, first=first, length=length)


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
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(f"its index has {str(value)[:80]!r} for a name")
    return value


def _count(value: Any) -> int:
    if not is_count(value):
        raise ValueError("its index has no number where there should be one")
    return int(value)


def _sizes(made: Any) -> Sizes:
    """A torch.Size."""
    arguments = made.arguments if isinstance(made, Made) and made.of == "torch.Size" else ()
    if len(arguments) != 1 or not is_size(arguments[0]):
        raise ValueError("its index has no size where there should be one")
    return tuple(arguments[0])
