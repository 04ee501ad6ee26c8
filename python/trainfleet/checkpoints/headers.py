"""The header of a file of safetensors: the tensors in it by name, and where their numbers lie.

    8 bytes                 the header's length
    JSON                    name → dtype, shape, data_offsets; `__metadata__`: texts
    numbers                 of all tensors, without gaps; offsets count from here

`__metadata__` says where in the whole tensor each piece begins, as torch's HuggingFaceStorageWriter
does, so torch's own reader reads these files, too. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, BinaryIO

from ..trust import untrusted_input
from ..trust.errors import InputError
from .pieces import NAME, NUMBERS, PiecePlace, Sizes, Tensor, is_count, is_size

LENGTH = 8  # bytes of the header's length; the header is filled up to a multiple of it
LARGEST = 2**26  # bytes of a header: of several hundred thousand tensors
METADATA, FIELDS = "__metadata__", {"dtype", "shape", "data_offsets"}


def render(pieces: Mapping[str, Tensor]) -> bytes:
    """The header of a file of pieces, each of one tensor; their numbers follow in this order."""
    at, begins = 0, {name: {"saved_offsets": piece.chunks[0][0]} for name, piece in pieces.items()}
    sharding = {"DCP_SHARDING_INFO": json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"}
    content: dict[str, Any] = {METADATA: sharding}
    for name, piece in pieces.items():
        size = piece.chunks[0][1]
        end = at + math.prod(size) * NUMBERS[piece.dtype]
        content[name] = {"dtype": piece.dtype, "shape": size, "data_offsets": [at, end]}
        at = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH)
    return len(text).to_bytes(LENGTH, "little") + text


def read(stream: BinaryIO, size: int, file: str) -> dict[str, PiecePlace]:
    """Where each tensor of a file of `size` bytes lies, by name.

    Raises:
        ValueError: the header can't be read, or says what can't be so.
    """
    stream.seek(0)
    length = int.from_bytes(stream.read(LENGTH), "little")
    if not 2 <= length <= min(LARGEST, size - LENGTH):
        raise ValueError(f"{file} has {size:,} bytes, and says that its header has {length:,}")
    try:
        content = untrusted_input.parse_json(untrusted_input.decode(stream.read(length), file), file)
    except InputError as error:
        raise ValueError(f"the header of {file} {error.what}") from error
    if not isinstance(content, dict):
        raise ValueError(f"the header of {file} is not a table of tensors")
    content.pop(METADATA, None)
    found = {name: _place(name, entry, LENGTH + length, file) for name, entry in content.items()}
    at = LENGTH + length
    for place in sorted(found.values(), key=lambda place: (place.first, place.length)):
        if place.first != at:
            raise ValueError(f"the header of {file} puts two tensors in one place, or leaves a gap")
        at += place.length
    if at != size:
        raise ValueError(f"the header of {file} accounts for {at:,} bytes, and it has {size:,}")
    return found


def _place(name: str, entry: Any, start: int, file: str) -> PiecePlace:
    wrong = ValueError(f"the header of {file} has no place for {name[:80]!r} that can be")
    if not NAME.fullmatch(name) or not isinstance(entry, dict) or entry.keys() != FIELDS:
        raise wrong
    dtype, size, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in NUMBERS or not is_size(size):
        raise wrong
    if not is_size(offsets) or len(offsets) != 2:
        raise wrong
    count = math.prod(size)
    if not is_count(count) or offsets[1] - offsets[0] != count * NUMBERS[dtype]:
        raise wrong
    return PiecePlace(start + offsets[0], count, dtype, tuple(size), strides_of(size))


def strides_of(size: Sizes) -> Sizes:
    """Of a tensor whose numbers lie row by row."""
    return tuple(math.prod(size[axis + 1 :]) for axis in range(len(size)))
