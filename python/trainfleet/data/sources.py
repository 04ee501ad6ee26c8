"""Where the text is, and how it is cut into units of work: a pure listing that opens no file.

A unit is what one process tokenizes at a time, commits whole and never does twice. Units follow from the listing alone, so that
every node, at every restart and in any number, sees the same ones.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from ..config.types import Data
from ..errors import DataError

STDLIB = "stdlib"
TEXT = (".txt", ".md", ".py")
JSON_LINES = (".jsonl", ".jsonl.gz")
SUFFIXES = TEXT + JSON_LINES
MEBIBYTE = 2**20
GRID = 4 * MEBIBYTE  # units aim at a multiple of it, and a large text is cut into documents of about this size
LARGEST_UNIT = 64 * GRID
LARGEST_TEXT = 16 * GRID


@dataclass(frozen=True)
class Piece:
    """Bytes [start, end) of a file of `size` bytes; a jsonl line belongs to the piece that holds its first byte."""

    path: str
    start: int
    end: int
    size: int

    @property
    def bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Unit:
    """What one process tokenizes and commits at a time: many small files, one file, or a range of a large one."""

    index: int
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


@dataclass(frozen=True)
class UnitPlan:
    """All units in order. `identity` is the hash of the listing (paths and sizes)."""

    units: tuple[Unit, ...]
    files: int
    bytes: int
    identity: str
    warnings: tuple[str, ...]


def plan_units(data: Data) -> UnitPlan:
    """The units that `data.sources` are cut into; the same listing gives the same units. DataError for a bad source."""
    files: dict[str, int] = {}
    warnings: list[str] = []
    for source in data.sources:
        for path, size in _list(source):
            if path in files:
                warnings.append(f"{path} is in data.sources twice: it is read once")
            files[path] = size
    total = sum(files.values())
    units = tuple(_cut(files, _aim(total)))
    warnings += [warning for path, size in files.items() if (warning := _warning(path, size))]
    listing = hashlib.sha256(json.dumps([asdict(unit) for unit in units]).encode()).hexdigest()
    return UnitPlan(units, len(files), total, listing, tuple(warnings))


def local_path(path: str) -> Path:
    """Where a planned file is on this machine: `stdlib:` paths are below the interpreter's own library."""
    return stdlib_folder() / path.removeprefix(f"{STDLIB}:") if is_stdlib(path) else Path(path)


def is_stdlib(path: str) -> bool:
    return path.startswith(f"{STDLIB}:")


def stdlib_folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _list(source: str) -> Iterator[tuple[str, int]]:
    """Path and size of the files of one source, sorted."""
    if source == STDLIB:
        found = [(f"{STDLIB}:{path}", size) for path, size in _walk(stdlib_folder(), (".py",))]
    elif Path(source).is_dir():
        found = [(str(Path(source) / path), size) for path, size in _walk(Path(source), SUFFIXES)]
        if not found:
            raise _no_text(source, f"the folder holds no {', '.join(SUFFIXES)} file")
    else:
        found = [(path, _size(path)) for path in _match(source)]
    if not any(size for _, size in found):
        raise _no_text(source, "it is empty")
    return ((path, size) for path, size in found if size)


def _walk(folder: Path, suffixes: tuple[str, ...]) -> list[tuple[str, int]]:
    """Relative path and size of the text files below a folder, without hidden ones and installed packages."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in ("site-packages", "dist-packages")
        )
        for name in names:
            path = Path(root, name)
            if name.endswith(suffixes) and not name.startswith(".") and path.is_file():
                found.append((path.relative_to(folder).as_posix(), _size(str(path))))
    return sorted(found)


def _match(source: str) -> list[str]:
    """The files that a path or a glob names."""
    if not glob.has_magic(source):
        if not Path(source).exists():
            raise _no_text(source, "there is no such file or folder")
        matches = [source]
    else:
        matches = sorted(path for path in glob.glob(source, recursive=True) if Path(path).is_file())  # noqa: PTH207  absolute patterns too
        if not matches:
            raise _no_text(source, "no file matches this pattern")
    for path in matches:
        if not path.endswith(SUFFIXES):
            raise _no_text(path, f"only {', '.join(SUFFIXES)} files are read")
    return matches


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError as error:
        raise _no_text(path, error.strerror or str(error)) from error


def _no_text(where: str, why: str) -> DataError:
    return DataError("can't be read as a source", where=where, why=why, next="correct data.sources in the config")


def _aim(total: int) -> int:
    """Bytes for a unit: a 512th of all, so that hundreds of processes have work and one that dies loses little."""
    return min(-(-total // 512 // GRID) * GRID or GRID, LARGEST_UNIT)


def _cut(files: dict[str, int], aim: int) -> Iterator[Unit]:
    """Gathers small files and cuts large ones so that each unit has about `aim` bytes."""
    index, pieces, size = 0, list[Piece](), 0
    for piece in (piece for path, length in files.items() for piece in _pieces(path, length, aim)):
        if pieces and size + piece.bytes > aim:
            yield Unit(index, tuple(pieces))
            index, pieces, size = index + 1, [], 0
        pieces.append(piece)
        size += piece.bytes
    yield Unit(index, tuple(pieces))


def _pieces(path: str, size: int, aim: int) -> Iterator[Piece]:
    step = aim if _can_split(path, size) else size
    return (Piece(path, start, min(start + step, size), size) for start in range(0, size, step))


def _can_split(path: str, size: int) -> bool:
    return path.endswith(".jsonl") or is_long_text(path, size)


def is_long_text(path: str, size: int) -> bool:
    """Whether a file is plain text that is cut into documents; a smaller one is one document."""
    return path.endswith(TEXT) and size > LARGEST_TEXT


def _warning(path: str, size: int) -> str:
    if is_long_text(path, size):
        return f"{path} is one text of {size / 1e6:,.0f} MB: it is cut at blank lines into several documents"
    if size > 4 * LARGEST_UNIT and not _can_split(path, size):
        return f"{path} ({size / 1e9:.1f} GB) can't be split: one process reads all of it; several smaller files would be faster"
    return ""
