"""Reads packed files: one compressed text, or the texts in a tar, as in WebDataset shards."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from ..trust.errors import DataError
from ..trust.untrusted_input import KIBIBYTE, MEBIBYTE, printable, shortened
from .bad_records import ELSE, bad_line, too_long
from .formats import LONGEST, Document, Item, attempted, cell, damage, decoded, document_of, unpacked
from .source_files import open_file
from .sources import JSON, TEXT, SourcePiece

PACKED: dict[bytes, Callable[[Any], Any]] = {  # how a compressed tar begins -> what unpacks it
    b"\x1f\x8b": lambda raw: gzip.GzipFile(fileobj=raw), b"BZh": bz2.BZ2File, b"\xfd7zXZ": lzma.LZMAFile,
}  # fmt: skip


def read_packed_text(piece: SourcePiece, text_field: str) -> Iterator[Item]:
    """The whole of a compressed text as one document."""
    parts, length = list[bytes](), 0
    with open_file(piece.file) as raw, damage(piece, "compressed", EOFError, zlib.error, gzip.BadGzipFile):
        for line in unpacked(raw, piece):
            parts.append(line)
            length += len(line)
            if length > LONGEST:
                raise too_long(piece.path)
    yield attempted(decoded, b"".join(parts), piece, 0, piece.bytes)


def read_tar(piece: SourcePiece, text_field: str) -> Iterator[Item]:
    """Each text file in a tar, and `text_field` of each .json in it, in their order; other members are left out.

    It is read from front to back and nothing of it is written anywhere, so names and links in it lead nowhere.
    """
    errors = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError, ArithmeticError, ValueError, RecursionError)
    with open_file(piece.file) as raw, damage(piece, "tar", *errors):
        for name, stream in _members(Headers(_unpacked(raw))):
            if not name.endswith(TEXT + JSON):
                continue
            where = f"{piece.path}: {shortened(printable(name), 255)}"
            content = stream.read(LONGEST + 1)
            if len(content) > LONGEST:
                yield too_long(where)
            elif name.endswith(JSON):
                yield attempted(_json, content, where, text_field)
            else:
                yield attempted(_text, content, where)


class Headers:
    """A stream for tarfile, which goes forward only and gives at most MOST bytes between two calls of `renew`.

    tarfile reads the headers before a member whole, whatever size they claim: long names, PAX records, maps of sparse files.
    """

    MOST = MEBIBYTE

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.left = stream, self.MOST

    def renew(self, most: int = MOST) -> None:
        self.left = most

    def read(self, size: int) -> bytes:
        self.left -= size
        if self.left < 0:
            raise tarfile.TarError(f"a header in it is longer than {self.MOST // KIBIBYTE:,} KiB")
        return self.stream.read(size)

    def seek(self, position: int) -> None:
        if position < self.stream.tell():  # a negative size leads there, and from there for ever to itself
            raise tarfile.TarError("a header in it points back")
        self.stream.seek(position)

    def tell(self) -> int:
        return self.stream.tell()


def _members(headers: Headers) -> Iterator[tuple[str, BinaryIO]]:
    """Name and content of each regular file. What tarfile would remember of them, and of headers for all, is bounded."""
    with tarfile.open(fileobj=cast(BinaryIO, headers), mode="r:") as archive:
        while (member := archive.next()) is not None:
            if member.isreg() and (stream := archive.extractfile(member)):
                headers.renew(LONGEST + tarfile.RECORDSIZE)
                yield member.name, cast(BinaryIO, stream)
            if sum(map(len, archive.pax_headers.values())) > headers.MOST:
                raise tarfile.TarError(f"its headers are longer than {headers.MOST // KIBIBYTE:,} KiB in all")
            archive.members.clear()  # type: ignore[attr-defined]
            headers.renew()


def _unpacked(raw: BinaryIO) -> BinaryIO:
    """The stream that a compressed one holds, by how it begins; any other as it is."""
    begin = raw.read(6)
    raw.seek(0)
    for magic, opened in PACKED.items():
        if begin.startswith(magic):
            return cast(BinaryIO, opened(raw))
    return raw


def _text(content: bytes, where: str) -> Document:
    try:
        return cell(content.decode(), where, "text")
    except UnicodeDecodeError as error:
        raise DataError("is not UTF-8", where=where, why=error.reason, next=f"leave it out of the tar{ELSE}") from error


def _json(content: bytes, where: str, text_field: str) -> Document:
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise bad_line(where, content, text_field, error) from error
    return document_of(record, where, text_field)
