"""A checkpoint's index: which tensors it holds, and where each of their pieces lies. It is read as data, and then checked.

torch.distributed.checkpoint keeps it in `.metadata` as a pickle of its classes, and reads it with pickle.load, which executes
whatever it contains. Here it is read without that (`pickled`), and every name, size and offset in it is checked against the files
that the marker lists, so that no more is allocated and read later than those files hold. torch is not needed for it: `make plan`
looks at what train.init_from names in this way, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from . import pickled
from .archive import ITEMS, Piece, require_tensor
from .marker import Broken, Commit, File
from .pickled import Made
from .store import Store

FILE = ".metadata"
LARGEST = 2**28  # bytes of an index: of a million pieces
_CLASSES = "torch.distributed.checkpoint.metadata."
_NAME = re.compile(r"[^\x00-\x1f\x7f-\x9f]{1,500}")
WEIGHTS = "model."  # what the names of a model's weights begin with
Sizes = tuple[int, ...]
Key = tuple[str, Sizes | None]  # of a piece: a name, and where in the tensor it begins; None: it is of no tensor


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint: its size, its number format, and where its pieces begin and how large they are."""

    size: Sizes
    dtype: str
    chunks: tuple[tuple[Sizes, Sizes], ...]


@dataclass(frozen=True)
class Index:
    """The entries of a checkpoint by name (None: a text or a number), and where each piece lies."""

    entries: Mapping[str, Tensor | None]
    pieces: Mapping[Key, Piece]


def read(store: Store, commit: Commit) -> Index:
    """The index of a checkpoint whose marker was read.

    Raises:
        Broken: it can't be read, or says what can't be so.
    """
    with judged(store, commit.step), store.open(commit.step, FILE) as stream:
        data = stream.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise ValueError(f"its index has more than {LARGEST:,} bytes")
        return parse(data, commit.files)


def require_weights(store: Store, commit: Commit, most: int) -> None:
    """Raises Broken where a checkpoint's index, or what its weights' pieces say of themselves, can't be so.

    No weight is read. What is wrong with pieces beyond the first `most`, ranks find out.
    """
    weights = [piece for piece in read(store, commit).pieces.values() if piece.dtype and piece.name.startswith(WEIGHTS)]
    for piece in weights[:most]:
        with judged(store, commit.step), store.open(commit.step, piece.file) as stream:
            require_tensor(stream, piece)


@contextmanager
def judged(store: Store, step: int) -> Iterator[None]:
    """Raises Broken for a ValueError within `with`."""
    try:
        yield
    except ValueError as error:
        why = f"{error}: it was damaged before its checksums were taken, or made to do harm"
        raise Broken("can't be believed", where=store.address(step), why=why) from error


def parse(data: bytes, files: Mapping[str, File]) -> Index:
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
            if piece is None or piece.length < math.prod(size) * ITEMS.get(dtype, 0):
                raise ValueError(f"its index has no place that is large enough for {name}")
            found[needed] = replace(piece, size=size, dtype=dtype)
            left -= 1
    if left or len(found) != len(stored):
        raise ValueError("its index does not have one place for each piece")
    if sum(piece.length for piece in found.values()) > sum(file.size for file in files.values()):
        raise ValueError("its index puts several pieces in one place")
    return Index(entries, found)


def _entry(made: Any, most: int) -> Tensor | None:
    """The entry of one name, of at most `most` pieces."""
    if isinstance(made, Made) and made.of == f"{_CLASSES}BytesStorageMetadata":
        return None
    state = _state(made, f"{_CLASSES}TensorStorageMetadata")
    properties = state.get("properties")
    fields = properties.state if isinstance(properties, Made) else None
    dtype = str(fields[0]) if isinstance(fields, tuple) and fields and isinstance(fields[0], str) else ""
    if dtype not in ITEMS:
        raise ValueError("its index has a tensor of no known number format")
    size = _sizes(state.get("size"))
    listed = _list(state.get("chunks"))
    chunks = [_chunk(chunk) for chunk in listed[: most + 1]]
    if not _tiled(size, [chunk for chunk in chunks if all(chunk[1])]):
        raise ValueError(f"its index does not have all of a tensor of size {size}, or has some of it twice")
    return Tensor(size, dtype, tuple(chunks))


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


def _pieces(name: str, entry: Tensor | None) -> Iterable[tuple[Key, Sizes, str]]:
    """The pieces under a name, each once."""
    if entry is None:
        return [((name, None), (), "")]
    return {offsets: ((name, offsets), sizes, entry.dtype) for offsets, sizes in entry.chunks}.values()


def _piece(key: Any, at: Any, files: Mapping[str, File]) -> tuple[Key, Piece]:
    """Where one piece lies: inside a file of the checkpoint."""
    named = _state(key, f"{_CLASSES}MetadataIndex")
    name, offset = _name(named.get("fqn")), named.get("offset")
    state = _state(at, "torch.distributed.checkpoint.filesystem._StorageInfo")
    file, first, length = state.get("relative_path"), _count(state.get("offset")), _count(state.get("length"))
    if not isinstance(file, str) or file not in files or file == FILE:
        raise ValueError(f"its index looks for {name} in {str(file)[:80]!r}, which is no file of it")
    if state.get("transform_descriptors") or first + length > files[file].size:
        raise ValueError(f"its index looks for {name} behind the end of {file}")
    return (name, None if offset is None else _sizes(offset)), Piece(name, file, first, length)


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
