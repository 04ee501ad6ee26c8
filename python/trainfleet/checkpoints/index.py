"""Checkpoint index: a JSON file that locates every tensor's pieces.

Format:
    {name: {"dtype": "F32", "shape": [4, 6],
            "pieces": [{"file": "rank-00000.safetensors", "begins": 1032, "offsets": [0, 0],
                        "shape": [2, 6]}, …]}, …}

A piece starts at byte `begins` of its file, and at `offsets` in the tensor. Its values are in
row-major order. Each file also has a safetensors header for other tools. `make plan` reads the
index of the checkpoint in train.init_from, so this module does not use torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

from ..trust import untrusted_input
from ..trust.errors import InputError
from ..trust.validation import Name, fit
from .marker import Broken, Commit, FileSum
from .store import CheckpointStore

FILE = "index.json"
SUFFIX = ".safetensors"
LARGEST = 2**31  # maximum index size in bytes, enough for 20 million pieces
DIMENSIONS = 8  # maximum number of dimensions of a tensor
NUMBERS = {  # safetensors dtype → bytes per element
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
# size in bytes of the header length field; headers are padded to a multiple of it:
# https://huggingface.co/docs/safetensors
LENGTH = 8
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class TensorPiece:
    """Part of a tensor: its file, its first byte in the file, its offsets in the tensor, and its
    shape.
    """

    file: str
    begins: int
    offsets: Sizes
    shape: Sizes


@dataclass(frozen=True)
class IndexedTensor:
    """Tensor in a checkpoint: its dtype, shape and pieces."""

    dtype: str
    shape: Sizes
    pieces: tuple[TensorPiece, ...]

    def bytes_of(self, shape: Sizes) -> int:
        """Returns a piece's size in bytes, given its shape."""
        return math.prod(shape) * NUMBERS[self.dtype]


CheckpointIndex = Mapping[str, IndexedTensor]


def file_of(rank: int) -> str:
    """Returns the name of a rank's file."""
    return f"rank-{rank:05d}{SUFFIX}"


def render(found: CheckpointIndex) -> bytes:
    """Serializes an index as JSON for `parse`.

    Raises:
        ValueError: the index is too large for `read`.
    """
    return _bounded(json.dumps(found, default=vars, separators=(",", ":")).encode())


def _bounded(data: bytes) -> bytes:
    if len(data) > LARGEST:
        raise ValueError(f"its index has more than {LARGEST:,} bytes")
    return data


def header(parts: CheckpointIndex) -> bytes:
    """Returns the safetensors header of a file that contains one piece of each tensor, in this
    order.

    `__metadata__` contains each piece's offsets in the format of torch's HuggingFaceStorageWriter,
    so torch's reader can load the file.
    """
    ends = [0, *accumulate(part.bytes_of(part.pieces[0].shape) for part in parts.values())]
    begins = {name: {"saved_offsets": part.pieces[0].offsets} for name, part in parts.items()}
    content: dict[str, object] = {
        name: {
            "dtype": part.dtype,
            "shape": part.pieces[0].shape,
            "data_offsets": ends[number : number + 2],
        }
        for number, (name, part) in enumerate(parts.items())
    }
    sharding = {"DCP_SHARDING_INFO": json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"}
    text = json.dumps({"__metadata__": sharding} | content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH)
    return len(text).to_bytes(LENGTH, "little") + text


def placed(parts: CheckpointIndex) -> dict[str, IndexedTensor]:
    """Returns the parts of a file with the first byte of each piece filled in."""
    at, found = len(header(parts)), dict[str, IndexedTensor]()
    for name, part in parts.items():
        found[name] = replace(part, pieces=(replace(part.pieces[0], begins=at),))
        at += part.bytes_of(part.pieces[0].shape)
    return found


def read(store: CheckpointStore, commit: Commit) -> CheckpointIndex:
    """Reads a checkpoint's index.

    Raises:
        Broken: the index can't be read, or is inconsistent.
    """
    with judged(store, commit.step), store.open(commit.step, FILE) as stream:
        return parse(_bounded(stream.read(LARGEST + 1)), commit.files)


@contextmanager
def judged(store: CheckpointStore, step: int) -> Iterator[None]:
    """Converts a ValueError inside the `with` block to Broken."""
    try:
        yield
    except ValueError as error:
        raise Broken(
            "can't be trusted",
            where=store.address(step),
            why=f"{error}: it was damaged before its checksums were computed, or was tampered with",
        ) from error


def parse(data: bytes, files: Mapping[str, FileSum]) -> CheckpointIndex:
    """Parses an index and checks it against the marker's list of files.

    Readers therefore never allocate or read more bytes than those files contain.

    Raises:
        ValueError: the content is invalid or inconsistent.
    """
    try:
        content = untrusted_input.parse_json(untrusted_input.decode(data, FILE), FILE)
        found = fit(dict[Name, IndexedTensor], content, FILE)
    except InputError as error:
        raise ValueError(f"{error.where}: {error.key[:80]} {error.what}") from error
    for name, tensor in found.items():
        if why := _fault(tensor, files):
            raise ValueError(f"{FILE}: {name[:80]} {why}")
    # Count a dimension of 0 as 1, because torch fails if an empty tensor's other dimension is huge.
    needed = sum(
        tensor.bytes_of(tuple(max(extent, 1) for extent in tensor.shape))
        for tensor in found.values()
    )
    if needed > sum(file.size for name, file in files.items() if name.endswith(SUFFIX)):
        raise ValueError(f"{FILE}: its tensors need {needed:,} bytes, more than the files have")
    return found


def _fault(tensor: IndexedTensor, files: Mapping[str, FileSum]) -> str:
    """Returns why an index entry is invalid, or "" if it is valid."""
    if tensor.dtype not in NUMBERS:
        return "has an unknown dtype"
    if len(tensor.shape) > DIMENSIONS or not are_tiles(tensor.shape, tensor.pieces):
        return "is incomplete or stored more than once"
    for piece in tensor.pieces:
        if piece.file not in files or not piece.file.endswith(SUFFIX):
            return f"is in {piece.file[:80]!r}, which is not a weights file of this checkpoint"
        if not 0 <= piece.begins <= files[piece.file].size - tensor.bytes_of(piece.shape):
            return f"is outside {piece.file}"
    return ""


def are_tiles(shape: Sizes, pieces: Sequence[TensorPiece]) -> bool:
    """Returns whether pieces form a grid that covers a tensor exactly once."""
    if any(not len(piece.offsets) == len(piece.shape) == len(shape) for piece in pieces):
        return False
    cuts = [
        sorted({(piece.offsets[axis], piece.shape[axis]) for piece in pieces})
        for axis in range(len(shape))
    ]
    starts = {piece.offsets for piece in pieces}
    return all(map(_covers, cuts, shape)) and len(starts) == len(pieces) == math.prod(
        map(len, cuts)
    )


def _covers(intervals: Sequence[tuple[int, int]], length: int) -> bool:
    """Returns whether intervals (start, extent) cover 0 to `length` without gaps or overlaps."""
    ends = [*accumulate((extent for _, extent in intervals), initial=0)]
    return ends == sorted(ends) == [*(start for start, _ in intervals), length]
