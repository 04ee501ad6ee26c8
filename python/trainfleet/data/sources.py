"""Cuts the sources into units of work: a pure listing that opens no file.

A unit is what one process tokenizes at a time, commits whole and never does twice. Units follow
from the listing alone, so that every node, at every restart and in any number, sees the same ones.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import BinaryIO

from ..config.addresses import HUB
from ..config.types import Data, Source
from ..trust.errors import DataError, NoSource
from ..trust.untrusted_input import KIBIBYTE, MEBIBYTE
from .format_table import TEXTS, format_of, name_of
from .hub_datasets import list_shards
from .source_files import (
    Listing,
    SourceFile,
    is_remote,
    is_stdlib,
    list_files,
    open_file,
    told,
    unreadable,
)

POINTER = b"version https://git-lfs"
POINTERS = 100  # small files of a source in which one is looked for: if one is one, all are
# Bytes of private memory of a process that reads sources. A record has 64 MiB at most, its JSON ten
# times that as objects, an encoder's caches 200 MB, a page of Parquet 1 GiB.
MEMORY = 6144 * MEBIBYTE
# units aim at a multiple of it, and a large text is cut into documents of about this size
GRID = 4 * MEBIBYTE
LARGEST_UNIT = 64 * GRID
LARGEST_TEXT = 16 * GRID
FEW = 5  # whole texts for validation: where fewer are likely, each gives its last part
PROCESS_MB_PER_SECOND = 45.0  # of text, measured: tests/bench/LOG.md


@dataclass(frozen=True)
class SourcePiece:
    """Bytes [start, end) of a file; a line, a document or a row group belongs to the piece that
    holds its first byte.
    """

    file: SourceFile
    start: int
    end: int

    @property
    def path(self) -> str:
        return self.file.path

    @property
    def bytes(self) -> int:
        return self.end - self.start

    def open(self, start: int = 0) -> BinaryIO:
        """The bytes of its file from `start` on, as source_files.open_file gives them."""
        return open_file(self.file, start)


@dataclass(frozen=True)
class Unit:
    """The part of one source that a process tokenizes and commits at a time: small files, a file,
    or a range of a large one.
    """

    index: int
    source: int
    pieces: tuple[SourcePiece, ...]

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


@dataclass(frozen=True)
class UnitPlan:
    """All units in order. `identity` is the hash of the listing: paths, sizes and versions."""

    units: tuple[Unit, ...]
    files: int
    bytes: int
    identity: str
    warnings: tuple[str, ...]
    few: bool  # plain texts, of which each is divided between training and validation

    @property
    def notes(self) -> list[str]:
        """Says what is as it should be, and not as one may expect."""
        few = f"the last part of each text validates, as there are few ({self.files})"
        return [few] if self.few else []

    def seconds(self, processes: int) -> float:
        """Estimates how long tokenizing takes with that many processes."""
        return seconds_for(self.bytes, max(unit.bytes for unit in self.units), processes)


def seconds_for(total: int, largest: int, processes: int) -> float:
    """About how long that many bytes take, by the rate of one process and never less than for the
    largest unit.
    """
    return max(total / max(processes, 1), largest) / (PROCESS_MB_PER_SECOND * 1e6)


def plan_units(data: Data) -> UnitPlan:
    """The units that `data.sources` are cut into; the same listing gives the same units. DataError
    for a bad source.
    """
    if any(source.weight for source in data.mixture) and data.weights is None:
        raise DataError(
            "some sources have a weight and others do not",
            where="data.sources",
            next="give all a weight, or none",
        )
    paths = Counter(source.path for source in data.mixture)
    first = {source.path: number for number, source in reversed([*enumerate(data.mixture)])}
    listings = [
        _entry(number, source)
        for number, source in enumerate(data.mixture)
        if first[source.path] == number
    ]
    again, seen, listed = (
        [path for path, times in paths.items() if times > 1],
        set[str](),
        dict[int, list[SourceFile]](),
    )
    for number, (files, _) in zip(sorted(first.values()), listings, strict=True):
        again += [file.path for file in files if file.path in seen]
        listed[number] = [file for file in files if file.path not in seen]
        seen |= {file.path for file in files}
    warnings = [f"{path} is in data.sources more than once: it is read once" for path in again]
    warnings += [
        warning for files in listed.values() for file in files if (warning := _warning(file))
    ]
    warnings += [
        warning
        for path, listing in zip(paths, listings, strict=True)
        for warning in told(path, listing[1])
    ]
    found = [file for files in listed.values() for file in files]
    total, few = sum(file.size for file in found), _are_few(found, data.validation_fraction)
    aim, units = _aim(total), list[Unit]()
    for source, files in listed.items():
        units += _cut(files, aim, source, len(units))
    identity = hashlib.sha256(json.dumps([asdict(unit) for unit in units]).encode()).hexdigest()
    return UnitPlan(tuple(units), len(seen), total, identity, tuple(warnings), few)


def have_changed(data: Data, identity: str) -> bool:
    """Tells whether the sources on this machine have changed since the listing of that identity.
    Deleted ones don't count.
    """
    if any(is_remote(source.path) or source.path.startswith(HUB) for source in data.mixture):
        return False  # to list these takes requests
    try:
        return plan_units(data).identity != identity
    except DataError:
        return False


def _are_few(files: list[SourceFile], validation_fraction: float) -> bool:
    """Tells whether the files are plain texts, and so few that their hashes may leave validation or
    training without any.
    """
    texts = all(name_of(file.path) in TEXTS and not is_stdlib(file.path) for file in files)
    return texts and len(files) * validation_fraction < FEW


def is_long_text(file: SourceFile) -> bool:
    """Tells whether a file is plain text that is cut into documents; a smaller one is one."""
    return file.size > LARGEST_TEXT and (row := format_of(file.path)) is not None and row.cut


def _entry(number: int, source: Source) -> Listing:
    try:
        return _list(source)
    except DataError as error:
        raise NoSource(error, number) from error


def _list(source: Source) -> Listing:
    if source.path.startswith(HUB):
        return list_shards(source.path), Counter()
    files, unread = list_files(source.path)
    _refuse_pointers(files)
    return files, unread


def _refuse_pointers(files: Iterable[SourceFile]) -> None:
    """Refuses what git-lfs has left in place of a file, which is text that could be trained on. It
    has under 1 KiB.

    https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
    """
    for file in islice(
        (file for file in files if file.size < KIBIBYTE and not is_remote(file.path)), POINTERS
    ):
        with open_file(file) as stream:
            if stream.read(len(POINTER)) == POINTER:
                raise unreadable(
                    file.path,
                    "it is a pointer of Git LFS, and the file itself is not here: git lfs pull",
                )


def _aim(total: int) -> int:
    """Bytes for a unit: a 512th of all, so that hundreds of processes have work and one that dies
    loses little.
    """
    return min(-(-total // 512 // GRID) * GRID or GRID, LARGEST_UNIT)


def _cut(files: Iterable[SourceFile], aim: int, source: int, first: int) -> Iterator[Unit]:
    """Gathers small files and cuts large ones so that each unit has about `aim` bytes."""
    pieces, size = list[SourcePiece](), 0
    for piece in (piece for file in files for piece in _pieces(file, aim)):
        if pieces and size + piece.bytes > aim:
            yield Unit(first, source, tuple(pieces))
            first, pieces, size = first + 1, [], 0
        pieces.append(piece)
        size += piece.bytes
    if pieces:
        yield Unit(first, source, tuple(pieces))


def _pieces(file: SourceFile, aim: int) -> Iterator[SourcePiece]:
    step = aim if _can_split(file) else file.size
    return (
        SourcePiece(file, start, min(start + step, file.size))
        for start in range(0, file.size, step)
    )


def _can_split(file: SourceFile) -> bool:
    return ((row := format_of(file.path)) is not None and row.divided) or is_long_text(file)


def _warning(file: SourceFile) -> str:
    if is_long_text(file):
        return (
            f"{file.path} is one text of {file.size / 1e6:,.0f} MB: it is cut at blank lines "
            "into several documents"
        )
    if file.size > 4 * LARGEST_UNIT and not _can_split(file):
        return (
            f"{file.path} ({file.size / 1e9:.1f} GB) can't be split: one process reads all of "
            "it; smaller files would be faster"
        )
    return ""
