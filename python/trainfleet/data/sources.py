"""Divides the sources into units of work, based on a listing of their files.

A process tokenizes one unit at a time, commits it as a whole and never repeats it. Units depend
only on the listing, so they are the same on every node and after every restart, for any node count.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from os.path import commonprefix
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
# number of small files to check per source; in a clone without Git LFS, all are pointers
POINTERS = 100
# Limit on the private memory of a process that reads sources, in bytes. A record can take 64 MiB,
# and its parsed JSON ten times as much. An encoder's caches take 200 MB, and a Parquet page can
# take 1 GiB.
MEMORY = 6144 * MEBIBYTE
# Unit sizes are multiples of GRID, and large texts are cut into documents of about this size.
GRID = 4 * MEBIBYTE
LARGEST_UNIT = 64 * GRID
LARGEST_TEXT = 16 * GRID
# Minimum number of texts to expect in the validation split. If there would be fewer, validation
# uses the last part of each text instead.
FEW = 5
LISTED = 5  # maximum sources that a note lists
# Epochs over a text up to which repeating it works about as well as new text
# (arxiv.org/abs/2305.16264)
REPEATS = 4
PROCESS_MB_PER_SECOND = 45.0  # text throughput per process, as measured in tests/bench/LOG.md


@dataclass(frozen=True)
class SourcePiece:
    """Bytes [start, end) of a file. A line, document or row group belongs to the piece that
    contains its first byte.
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
        """Opens a stream of the file's bytes, starting at `start` (source_files.open_file)."""
        return open_file(self.file, start)


@dataclass(frozen=True)
class Unit:
    """Part of one source that a process tokenizes and commits as a whole: several small files, one
    file, or a range of a large file.
    """

    index: int
    source: int
    pieces: tuple[SourcePiece, ...]

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)


@dataclass(frozen=True)
class UnitPlan:
    """All units in order. `identity` is a hash of their paths, sizes, versions and ranges."""

    units: tuple[Unit, ...]
    files: int
    bytes: int
    identity: str
    warnings: tuple[str, ...]
    few: bool  # Each text is divided between training and validation.

    @property
    def notes(self) -> list[str]:
        """Notes about intended behavior that may surprise a user."""
        few = f"there are few texts ({self.files}), so the last part of each is used for validation"
        return [few] if self.few else []

    def seconds(self, processes: int) -> float:
        """Estimates the tokenization time in seconds for a number of processes."""
        return seconds_for(self.bytes, max(unit.bytes for unit in self.units), processes)


def seconds_for(total: int, largest: int, processes: int) -> float:
    """Estimates the seconds to tokenize `total` bytes at the measured throughput per process, but
    at least the time for the largest unit.
    """
    return max(total / max(processes, 1), largest) / (PROCESS_MB_PER_SECOND * 1e6)


def plan_units(data: Data) -> UnitPlan:
    """Divides `data.sources` into units. Equal listings produce equal units. Raises DataError if a
    source is unusable.
    """
    if any(source.weight for source in data.mixture) and data.weights is None:
        raise DataError(
            "some sources have a weight and others do not",
            where="data.sources",
            next="give every source a weight, or remove all weights",
        )
    listed, warnings = _list_once(data.mixture)
    found = [*chain.from_iterable(listed.values())]
    total, few = sum(file.size for file in found), _are_few(found, data.validation_fraction)
    aim, units = _aim(total), list[Unit]()
    for source, files in listed.items():
        units += _cut(files, aim, source, len(units))
    identity = hashlib.sha256(json.dumps([asdict(unit) for unit in units]).encode()).hexdigest()
    return UnitPlan(tuple(units), len(found), total, identity, tuple(warnings), few)


def _list_once(sources: Iterable[Source]) -> tuple[dict[int, list[SourceFile]], list[str]]:
    """Returns each source's files by source index, and warnings.

    A file belongs to the first source that contains it.
    """
    listed, unread = dict[int, list[SourceFile]](), list[str]()
    seen, numbers, again = set[str](), dict[str, int](), dict[str, None]()
    for number, source in enumerate(sources):
        if numbers.setdefault(source.path, number) != number:
            again[source.path] = None
            continue
        files, skipped = _entry(number, source)
        again |= dict.fromkeys(file.path for file in files if file.path in seen)
        listed[number] = [file for file in files if file.path not in seen]
        seen |= {file.path for file in files}
        unread += told(source.path, skipped)
    twice = [f"{path} is in data.sources more than once; it is read once" for path in again]
    large = filter(None, map(_warning, chain.from_iterable(listed.values())))
    return listed, [*twice, *large, *unread]


def titles(data: Data) -> tuple[str, ...]:
    """Returns the path of each source, with its text field if it has a separate one."""
    return tuple(
        f"{source.path} ({source.text_field})" if source.text_field else source.path
        for source in data.mixture
    )


def short_names(paths: Sequence[str]) -> list[str]:
    """Returns the paths without the folders that all of them share."""
    shared = commonprefix(paths)  # noqa: RUF071 - cut after a slash below
    start = shared.rfind("/") + 1 if len(paths) > 1 else 0
    return [path[start:].rstrip("/") or path for path in paths]


def epochs(data: Data, tokens: Mapping[int, int], taken: float) -> dict[str, float]:
    """Returns the epochs over each source when training on `taken` tokens, most epochs first.

    `tokens` maps each source that has any training tokens to their number.
    """
    shares = dict(enumerate(data.weights)) if data.weights else tokens
    names, total = short_names(titles(data)), sum(shares.values())
    found = {
        names[source]: taken * shares[source] / total / count
        for source, count in tokens.items()
        if count
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def repeated(epochs: Mapping[str, float]) -> list[str]:
    """Returns a note that names the sources with more than REPEATS epochs, if there are any."""
    many = [f"{name} ({count:.0f} epochs)" for name, count in epochs.items() if count > REPEATS]
    more = f" and {len(many) - LISTED} more" if len(many) > LISTED else ""
    why = f"more than {REPEATS} epochs teach less than new text"
    return [f"training repeats {', '.join(many[:LISTED])}{more}; {why}"] if many else []


def have_changed(data: Data, identity: str) -> bool:
    """Returns whether the sources have changed since the listing with this identity. Returns False
    for remote sources, and for sources that can no longer be listed.
    """
    if any(is_remote(source.path) or source.path.startswith(HUB) for source in data.mixture):
        return False  # Listing remote sources would cost requests.
    try:
        return plan_units(data).identity != identity
    except DataError:
        return False


def _are_few(files: list[SourceFile], validation_fraction: float) -> bool:
    """Returns whether all files are plain texts, and too few for a hash-based split: training or
    validation might be left empty.
    """
    texts = all(name_of(file.path) in TEXTS and not is_stdlib(file.path) for file in files)
    return texts and len(files) * validation_fraction < FEW


def is_long_text(file: SourceFile) -> bool:
    """Returns whether a file is a plain text larger than LARGEST_TEXT, which is cut into several
    documents.
    """
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
    """Raises DataError if a file is a Git LFS pointer. Pointers are small text files, so training
    on them would go unnoticed.

    https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
    """
    for file in islice(
        (file for file in files if file.size < KIBIBYTE and not is_remote(file.path)), POINTERS
    ):
        with open_file(file) as stream:
            if stream.read(len(POINTER)) == POINTER:
                raise unreadable(
                    file.path,
                    "it is a Git LFS pointer, not the file itself; run git lfs pull",
                )


def _aim(total: int) -> int:
    """Returns the target size of a unit in bytes: 1/512 of the total, so that hundreds of processes
    have work and a crash loses little of it.
    """
    return min(-(-total // 512 // GRID) * GRID or GRID, LARGEST_UNIT)


def _cut(files: Iterable[SourceFile], aim: int, source: int, first: int) -> Iterator[Unit]:
    """Groups small files and splits large ones, so that each unit has about `aim` bytes."""
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
            f"{file.path} is one text of {file.size / 1e6:,.0f} MB; it is cut at blank lines "
            "into several documents"
        )
    if file.size > 4 * LARGEST_UNIT and not _can_split(file):
        return (
            f"{file.path} ({file.size / 1e9:.1f} GB) can't be split, so one process reads "
            "all of it; smaller files are faster"
        )
    return ""
