"""Readers for compressed text files and for tar archives such as WebDataset shards. Files in a tar
are treated like files in a folder.
"""

from __future__ import annotations

import gzip
import importlib
import io
import shlex
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import BinaryIO, cast

from ..config.tables import named
from ..config.types import Data
from ..trust.errors import DataError
from ..trust.untrusted_input import KIBIBYTE, MEBIBYTE, printable
from .bad_records import STOP, too_long
from .format_table import JSON, TAR, TEXT, format_of, is_record, is_sidecar, name_of, why_unread
from .formats import LONGEST, Document, Item, Unread, attempted, damage, decoded, unpacked
from .source_files import EMPTY, SourceFile, told
from .sources import SourcePiece, Unit

# Magic number of each compression format, with the Python module and the command that decompress
# it. Not every Python build includes all of these modules.
PACKED = {b"\x1f\x8b": ("gzip", "gzip"), b"BZh": ("bz2", "bzip2"), b"\xfd7zXZ": ("lzma", "xz")}
# Maximum number of sidecars to buffer while no record has been found. Beyond that, sidecars are
# read as texts.
HELD = 16
LOOKED = 200  # maximum number of files that `make plan` reads per source, all from one tar
SIDECAR = ".md, README or licence files next to records"


@dataclass(frozen=True)
class Member(SourcePiece):
    """File in an archive, held in memory."""

    content: bytes = field(repr=False, compare=False)

    def open(self, start: int = 0) -> BinaryIO:
        return io.BytesIO(self.content[start:])


Found = Member | Unread | DataError


def read_packed_text(piece: SourcePiece, text_field: str) -> Iterator[Item]:
    """Yields a compressed text file as a single document."""
    parts, length = list[bytes](), 0
    with piece.open() as raw, damage(piece, "compressed", EOFError, zlib.error, gzip.BadGzipFile):
        for line in unpacked(raw, piece):
            parts.append(line)
            length += len(line)
            if length > LONGEST:
                raise too_long(piece.path)
    yield attempted(decoded, b"".join(parts), piece, 0, piece.bytes)


def read_tar(piece: SourcePiece, text_field: str) -> Iterator[Item]:
    """Yields the records of a tar's files, which may have any format supported for folders.

    The tar is read sequentially and never extracted, so names and links in the tar can't point
    outside it.
    """
    errors = (
        tarfile.TarError,
        EOFError,
        zlib.error,
        OSError,
        ArithmeticError,
        ValueError,
        RecursionError,
    )
    with piece.open() as raw:
        stream, broken = _unpacked(raw, piece)
        with damage(piece, "tar", *errors, broken):
            yield from _records(_described(_members(Headers(stream), piece)), text_field)


def look_into(units: Iterable[Unit], data: Data) -> Iterator[str]:
    """Yields a warning for each source with unread files among the first LOOKED files in its tar.
    Raises DataError if one of these files would make tokenization fail.
    """
    tars = {
        unit.source: piece for unit in units for piece in unit.pieces if name_of(piece.path) == TAR
    }
    for source, piece in tars.items():
        kinds = list[str]()
        for item in islice(read_tar(piece, data.text_field_of(source)), LOOKED):
            if isinstance(item, DataError) and data.on_bad_record == STOP:
                raise item
            kinds.append(getattr(item, "kind", ""))
        yield from told(f"{piece.path} (first {len(kinds):,} files)", Counter(filter(None, kinds)))


def _records(members: Iterable[Found], text_field: str) -> Iterator[Item]:
    """Yields the records of all members in order. Adjacent text and .json members with the same
    stem form one record.
    """
    held: Member | None = None
    for member in members:
        if not isinstance(member, Member):
            yield member
        elif held and (_are_one(held, member) or _are_one(member, held)):
            yield from _either(held, member, text_field)
            held = None
        else:
            yield from _read(held, text_field)
            held = member
    yield from _read(held, text_field)


def _are_one(text: Member, record: Member) -> bool:
    return text.path.endswith(TEXT) and record.path == text.path.rpartition(".")[0] + JSON


def _either(text: Member, record: Member, text_field: str) -> Iterator[Item]:
    """Yields the records of a text and a .json file with the same stem, in either order. Prefers
    the .json file if all its records contain text.
    """
    if text.path.endswith(JSON):
        text, record = record, text
    items = list(_read(record, text_field))
    whole = all(isinstance(item, Document) and item.size for item in items)
    yield from items if items and whole else _read(text, text_field)
    yield Unread("unused text or .json file of a pair with one name")


def _read(member: Member | None, text_field: str) -> Iterator[Item]:
    """Yields one member's records. A damaged member yields an error instead of raising it, so that
    the other members are still read.
    """
    try:
        if member and (row := format_of(member.path)):
            yield from named(row.read)(member, text_field)
    except DataError as error:
        yield error


def _described(members: Iterable[Found]) -> Iterator[Found]:
    """Drops sidecars, which only describe records. Buffers them until the first record is found,
    and yields them as texts if the archive has no records.
    """
    held, records = list[Member](), False
    for member in members:
        if isinstance(member, Member) and is_sidecar(member.path):
            held.append(member)
        else:
            records = records or (isinstance(member, Member) and is_record(member.path))
            yield member
        if records or len(held) > HELD:
            yield from (Unread(SIDECAR) for _ in held) if records else held
            held.clear()
    yield from held


class Headers:
    """Forward-only stream for tarfile that returns at most MOST bytes between calls to `renew`.

    tarfile loads all headers before a member into memory, regardless of their declared size: long
    names, PAX records, sparse-file maps.
    """

    MOST = MEBIBYTE

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.left = stream, self.MOST

    def renew(self, most: int = MOST) -> None:
        self.left = most

    def read(self, size: int) -> bytes:
        self.left -= size
        if self.left < 0:
            raise tarfile.TarError(f"a header is longer than {self.MOST // KIBIBYTE:,} KiB")
        return self.stream.read(size)

    def seek(self, position: int) -> None:
        # A member with a negative size would make tarfile reread the same header forever.
        if position < self.stream.tell():
            raise tarfile.TarError("a header points backwards")
        self.stream.seek(position)

    def tell(self) -> int:
        return self.stream.tell()


def _members(headers: Headers, piece: SourcePiece) -> Iterator[Found]:
    """Yields each regular file in a tar, and an Unread for each link or device. Bounds the memory
    that tarfile uses for its member list and global headers.
    """
    with tarfile.open(fileobj=cast(BinaryIO, headers), mode="r:") as archive:
        while (member := archive.next()) is not None:
            if member.isreg() and (stream := archive.extractfile(member)):
                headers.renew(LONGEST + tarfile.RECORDSIZE)
                yield _member(member, cast(BinaryIO, stream), piece)
            elif not member.isdir():
                yield Unread("link or device")
            if sum(map(len, archive.pax_headers.values())) > headers.MOST:
                raise tarfile.TarError(
                    f"its headers exceed {headers.MOST // KIBIBYTE:,} KiB in total"
                )
            archive.members.clear()  # type: ignore[attr-defined]
            headers.renew()


def _member(about: tarfile.TarInfo, stream: BinaryIO, piece: SourcePiece) -> Found:
    """Returns a file in a tar with its content, or an Unread with the reason why it is skipped."""
    why = why_unread(about.name) or (
        "tar inside a tar" if name_of(about.name) == TAR else "" if about.size else EMPTY
    )
    if why:
        return Unread(why)
    path = f"{piece.path}: {printable(about.name)[-255:]}"
    content = stream.read(LONGEST + 1)
    if len(content) > LONGEST:
        return too_long(path)
    return Member(SourceFile(path, len(content), piece.file.version), 0, len(content), content)


def _unpacked(raw: BinaryIO, piece: SourcePiece) -> tuple[BinaryIO, type[Exception]]:
    """Detects compression by magic number. Returns the decompressed stream, or `raw` if it is not
    compressed, and the exception class that signals damaged content.
    """
    begin = raw.read(6)
    raw.seek(0)
    for magic, (module, program) in PACKED.items():
        if begin.startswith(magic):
            try:
                found = importlib.import_module(module)
            except ImportError as error:
                raise DataError(
                    f"is compressed with {program}, but this Python has no module {module}",
                    where=piece.path,
                    why=str(error),
                    next=f"run {program} -dc {shlex.quote(piece.path)} > a.tar, or use "
                    "another Python",
                ) from error
            return cast(BinaryIO, found.open(raw)), getattr(found, "LZMAError", EOFError)
    return raw, EOFError
