"""Reads packed files: one compressed text, or the texts in a tar, as in WebDataset shards."""

from __future__ import annotations

import gzip
import json
import lzma
import tarfile
import zlib
from collections.abc import Iterator

from ..door import printable, shortened
from ..errors import DataError
from .formats import LONGEST, Document, bad_line, cell, damage, decoded, too_long, unpacked
from .source_files import open_file
from .sources import TAR_TEXT, Piece


def read_packed_text(piece: Piece) -> Iterator[Document]:
    """The whole of a compressed text as one document."""
    parts, length = list[bytes](), 0
    with open_file(piece.file) as raw, damage(piece, "compressed", EOFError, zlib.error, gzip.BadGzipFile):
        for line in unpacked(raw, piece):
            parts.append(line)
            length += len(line)
            if length > LONGEST:
                raise too_long(piece.path)
    yield decoded(b"".join(parts), piece, 0, piece.bytes)


def read_tar(piece: Piece, text_field: str) -> Iterator[Document]:
    """Each text file in a tar, and `text_field` of each .json in it, in their order; other members are left out.

    It is read from front to back and nothing of it is written anywhere, so names and links in it lead nowhere.
    """
    errors = (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, OSError, ArithmeticError, ValueError)
    with open_file(piece.file) as raw, damage(piece, "tar", *errors), tarfile.open(fileobj=raw, mode="r|*") as archive:
        for member in archive:
            if not member.isreg() or not member.name.endswith((*TAR_TEXT, ".json")):
                continue
            where = f"{piece.path}: {shortened(printable(member.name), 255)}"
            stream = archive.extractfile(member)
            content = stream.read(LONGEST + 1) if stream else b""
            if len(content) > LONGEST:
                raise too_long(where)
            yield _json(content, where, text_field) if member.name.endswith(".json") else _text(content, where)


def _text(content: bytes, where: str) -> Document:
    try:
        return cell(content.decode(), where, "text")
    except UnicodeDecodeError as error:
        raise DataError("is not UTF-8", where=where, why=error.reason, next="leave it out of the tar") from error


def _json(content: bytes, where: str, text_field: str) -> Document:
    try:
        return cell(json.loads(content)[text_field], where, text_field)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise bad_line(where, content, text_field, error) from error
