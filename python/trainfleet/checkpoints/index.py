"""A checkpoint's index: which tensors it holds, and which file has each of their pieces.

    {name: {"dtype": "F32", "shape": [4, 6],
            "pieces": [["rank-00000.safetensors", [0, 0], [2, 6]], …]}, …}

A file's own header (`headers`) says where a piece lies in it; without the index, each rank would have
to read all headers. Every name, size and file is checked against the files that the marker lists, so
no more is allocated and read later than those files hold. It needs no torch: `make plan` looks at what
train.init_from names in this way, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

from ..trust import untrusted_input
from ..trust.errors import InputError
from . import headers
from .marker import Broken, Commit, FileSum
from .pieces import NAME, NUMBERS, WEIGHTS, ArchivePiece, CheckpointIndex, Key, PiecePlace, Sizes, Tensor, are_tiles, is_size
from .store import CheckpointStore
from .torch_saved import archive
from .torch_saved import index as torch_saved
from .torch_saved.archive import Stored

FILE = "index.json"
SUFFIX = ".safetensors"
LARGEST = 2**28  # bytes of an index: of two million pieces
LOOKED_AT = 256  # pieces of a checkpoint that are looked for in their files before a launch
FIELDS = {"dtype", "shape", "pieces"}


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}{SUFFIX}"


def render(found: CheckpointIndex) -> bytes:
    """The text of an index; `parse` takes exactly this."""
    files = {key: piece.file for key, piece in found.pieces.items()}
    content = {
        name: {
            "dtype": tensor.dtype,
            "shape": tensor.size,
            "pieces": [[files[name, offsets], offsets, sizes] for offsets, sizes in tensor.chunks],
        }
        for name, tensor in found.entries.items()
        if tensor
    }
    return json.dumps(content, separators=(",", ":")).encode()


def read(store: CheckpointStore, commit: Commit) -> CheckpointIndex:
    """The index of a checkpoint whose marker was read.

    Raises:
        Broken: it can't be read, or says what can't be so.
    """
    file, parser = (torch_saved.FILE, torch_saved.parse) if commit.torch_saved else (FILE, parse)
    with judged(store, commit.step), store.open(commit.step, file) as stream:
        data = stream.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise ValueError(f"its index has more than {LARGEST:,} bytes")
        return parser(data, commit.files)


class Places:
    """Finds pieces in the files of a checkpoint; each file's header is read once."""

    def __init__(self, files: Mapping[str, FileSum]) -> None:
        self.files = files
        self.headers: dict[str, dict[str, PiecePlace]] = {}

    def find(self, stream: BinaryIO, piece: ArchivePiece) -> PiecePlace:
        """Where a piece lies in the stream of its file.

        Raises:
            ValueError: it is not there, or has another size or number format than the index says.
        """
        if isinstance(piece, Stored):
            return archive.place_of(stream, piece)
        if piece.file not in self.headers:
            self.headers[piece.file] = headers.read(stream, self.files[piece.file].size, piece.file)
        place = self.headers[piece.file].get(piece.name)
        if place is None or (place.dtype, place.size) != (piece.dtype, piece.size):
            wanted = f"{piece.dtype} numbers of size {piece.size}"
            raise ValueError(f"{piece.file} does not hold {wanted} as {piece.name}")
        return place


def require_weights(store: CheckpointStore, commit: Commit, most: int) -> None:
    """Raises Broken where a checkpoint's index, or a header of its weights' files, can't be so.

    No weight is read. What is wrong with pieces beyond the first `most`, ranks find out.
    """
    pieces = read(store, commit).pieces.values()
    weights = [piece for piece in pieces if piece.dtype and piece.name.startswith(WEIGHTS)]
    places = Places(commit.files)
    for piece in weights[:most]:
        with judged(store, commit.step), store.open(commit.step, piece.file) as stream:
            places.find(stream, piece)


@contextmanager
def judged(store: CheckpointStore, step: int) -> Iterator[None]:
    """Raises Broken for a ValueError within `with`."""
    try:
        yield
    except ValueError as error:
        why = f"{error}: it was damaged before its checksums were taken, or made to do harm"
        raise Broken("can't be believed", where=store.address(step), why=why) from error


def parse(data: bytes, files: Mapping[str, FileSum]) -> CheckpointIndex:
    """What an index says.

    Raises:
        ValueError: what it says can't be so, given these files.
    """
    try:
        content = untrusted_input.parse_json(untrusted_input.decode(data, FILE), FILE)
    except InputError as error:
        raise ValueError(f"its index {error.what}") from error
    if not isinstance(content, dict):
        raise ValueError("its index has no table of what it holds")
    entries: dict[str, Tensor] = {}
    pieces: dict[Key, ArchivePiece] = {}
    for name, entry in content.items():
        entries[name], files_of = _entry(name, entry, files)
        for (offsets, sizes), file in zip(entries[name].chunks, files_of, strict=True):
            pieces[name, offsets] = ArchivePiece(name, file, sizes, entries[name].dtype)
    needed = sum(math.prod(tensor.size) * NUMBERS[tensor.dtype] for tensor in entries.values())
    if needed > sum(file.size for file in files.values()):
        raise ValueError(f"its index has tensors of {needed:,} bytes, which its files do not hold")
    return CheckpointIndex(entries, pieces)


def _entry(name: str, entry: Any, files: Mapping[str, FileSum]) -> tuple[Tensor, list[str]]:
    """A tensor, and the file of each of its pieces."""
    if not NAME.fullmatch(name):
        raise ValueError(f"its index has {name[:80]!r} for a name")
    if not isinstance(entry, dict) or entry.keys() != FIELDS:
        raise ValueError(f"its index does not say what {name} is")
    dtype, size, listed = entry["dtype"], entry["shape"], entry["pieces"]
    if not isinstance(dtype, str) or dtype not in NUMBERS:
        raise ValueError(f"its index has {name} in an unknown number format")
    if not is_size(size) or not isinstance(listed, list):
        raise ValueError(f"its index has no size, or no pieces, of {name}")
    found = [_piece(name, piece, files) for piece in listed]
    chunks = tuple((offsets, sizes) for _, offsets, sizes in found)
    files_of = [file for file, _, _ in found]
    if not are_tiles(tuple(size), chunks) or len(set(files_of)) < len(files_of):
        raise ValueError(f"its index does not have all of {name}, or has some of it twice")
    return Tensor(tuple(size), dtype, chunks), files_of


def _piece(name: str, listed: Any, files: Mapping[str, FileSum]) -> tuple[str, Sizes, Sizes]:
    match listed:
        case [str(file), offsets, sizes] if is_size(offsets) and is_size(sizes):
            pass
        case _:
            raise ValueError(f"its index has a piece of {name} that can't be")
    if file not in files or not file.endswith(SUFFIX):
        raise ValueError(f"its index looks for {name} in {file[:80]!r}, which is not a file of it")
    return file, tuple(offsets), tuple(sizes)
