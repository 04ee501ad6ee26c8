"""The texts of a unit, read in order and in bounded memory.

A small text file is one document, a .jsonl line is one, and a plain text over sources.LARGEST_TEXT is cut at the first blank
line after every multiple of sources.GRID, wherever the units' bounds are.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import DataError
from .sources import GRID, JSON_LINES, Piece, Unit, is_long_text, is_stdlib, local_path

SEEK_BLANK = 2**16  # bytes in which a blank line is looked for before the end of any line is good enough
BATCH_BYTES = 2**22


@dataclass(frozen=True)
class Document:
    """One text, and how many bytes of its file it took to read (compressed ones where the file is)."""

    text: str
    consumed: int


def read_unit(unit: Unit, text_field: str) -> Iterator[Document]:
    """The documents of a unit in order, without empty ones. DataError names the file and line of a bad one."""
    for piece in unit.pieces:
        yield from read_piece(piece, text_field)


def read_piece(piece: Piece, text_field: str) -> Iterator[Document]:
    """The documents that begin in one piece."""
    path = local_path(piece.path)
    try:
        if piece.path.endswith(JSON_LINES):
            yield from _read_json_lines(piece, path, text_field)
        elif is_long_text(piece.path, piece.size):
            yield from _read_long_text(piece, path)
        else:
            yield from _read_text(piece, path)
        if path.stat().st_size != piece.size:
            raise _changed(piece.path)
    except OSError as error:
        raise DataError("can't be read", where=piece.path, why=error.strerror or str(error)) from error


def in_batches(documents: Iterable[Document], size: int = BATCH_BYTES) -> Iterator[list[Document]]:
    """Lists of documents with about `size` characters each, so that memory does not grow with the input."""
    batch, length = list[Document](), 0
    for document in documents:
        batch.append(document)
        length += len(document.text)
        if length >= size:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _read_text(piece: Piece, path: Path) -> Iterator[Document]:
    content = path.read_bytes()
    if is_stdlib(piece.path) and not _is_utf8(content):
        return  # the library's own tests hold deliberately broken files
    yield from _document(content, piece, path, 0, len(content))


def _read_long_text(piece: Piece, path: Path) -> Iterator[Document]:
    with open(path, "rb") as file:
        for start in range(piece.start, piece.end, GRID):
            begin, end = (_boundary(file, at, piece.end) for at in (start, start + GRID))
            file.seek(begin)
            yield from _document(file.read(end - begin), piece, path, begin, min(GRID, piece.end - start))


def _boundary(file: BinaryIO, at: int, piece_end: int) -> int:
    """The first good place to cut a long text at or after `at`: after a blank line, any line, or else any character."""
    if at == 0:
        return 0
    file.seek(at)
    for sign, window in ((b"\n\n", SEEK_BLANK), (b"\n", GRID - 4)):
        file.seek(at)
        content = file.read(window)
        if len(content) < 4:  # nearly at the end of the file
            return at + len(content)
        if (found := content.find(sign)) >= 0:
            return at + found + len(sign)
    return at + next(i for i in range(4) if content[i] & 0xC0 != 0x80)


def _document(content: bytes, piece: Piece, path: Path, offset: int, consumed: int) -> Iterator[Document]:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = _lines_before(path, offset) + content.count(b"\n", 0, error.start) + 1
        raise _not_utf8(f"{piece.path}:{line}", error, offset) from error
    if text:
        yield Document(text, consumed)


def _read_json_lines(piece: Piece, path: Path, text_field: str) -> Iterator[Document]:
    lines = _gzip_lines(piece, path) if path.suffix == ".gz" else _lines(piece, path)
    for number, (line, consumed) in enumerate(lines, 1):
        try:
            text = _text_of(line, text_field)
        except (ValueError, KeyError, TypeError) as error:
            before = _lines_before(path, piece.start - 1) + 1 if piece.start else 0
            where = f"{piece.path}:{before + number}"
            raise _bad_line(where, line, text_field, error) from error
        if text:
            yield Document(text, consumed)


def _text_of(line: bytes, text_field: str) -> str:
    """The text in one line, "" for a blank line. ValueError, KeyError or TypeError for what is no record with a text."""
    if line.isspace():
        return ""
    text = json.loads(line.decode())[text_field]
    if not isinstance(text, str):
        raise TypeError(f"is {type(text).__name__}, not a string")
    text.encode()  # an escaped half of a surrogate pair is no text: refused here, where the line is known
    return text


def _lines(piece: Piece, path: Path) -> Iterator[tuple[bytes, int]]:
    """The lines whose first byte is in the piece, each with its length."""
    with open(path, "rb") as file:
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()  # its first byte is in the piece before
        at = file.tell()
        for line in file:
            if at >= piece.end:
                return
            at += len(line)
            yield line, len(line)


def _gzip_lines(piece: Piece, path: Path) -> Iterator[tuple[bytes, int]]:
    """All lines, each with the compressed bytes that were read for it (mostly none)."""
    with open(path, "rb") as raw, gzip.GzipFile(fileobj=raw) as file:
        at, number = 0, 0
        try:
            for number, line in enumerate(file, 1):  # noqa: B007
                before, at = at, raw.tell()
                yield line, at - before
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                "is a damaged gzip file",
                where=f"{piece.path}:{number + 1}",
                why=str(error),
                next=f"get the file again; gzip -t {path}",
            ) from error


def _lines_before(path: Path, offset: int) -> int:
    """How many lines end before a byte of a file: read again only when there is an error to report."""
    if path.suffix == ".gz":
        return 0
    with open(path, "rb") as file:
        return sum(file.read(min(GRID, offset - at)).count(b"\n") for at in range(0, offset, GRID))


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _bad_line(where: str, line: bytes, text_field: str, error: Exception) -> DataError:
    if isinstance(error, UnicodeDecodeError):
        return _not_utf8(where, error, 0)
    if isinstance(error, UnicodeEncodeError):
        return DataError(
            f"`{text_field}` holds half of a surrogate pair", where=where, why=str(error), next="correct or remove the line"
        )
    if isinstance(error, json.JSONDecodeError):
        return DataError("is no JSON", where=where, why=error.args[0], next="correct or remove the line")
    record = json.loads(line)
    if not isinstance(record, dict):
        return DataError("is no JSON object", where=where, next=f'write {{"{text_field}": "the text"}}')
    if text_field in record:
        return DataError(f"`{text_field}` {error}", where=where, next="correct or remove the line")
    return DataError(
        f"lacks the field `{text_field}`",
        where=where,
        why=f"it has {', '.join(record) or 'no field'}",
        next="set data.text_field",
    )


def _not_utf8(where: str, error: UnicodeDecodeError, offset: int) -> DataError:
    why = f"{error.reason} {error.object[error.start]:#04x} at byte {offset + error.start}"
    return DataError(
        "is not UTF-8", where=where, why=why, next="convert it (iconv -f latin1 -t utf-8), or leave it out of data.sources"
    )


def _changed(path: str) -> DataError:
    return DataError(
        "changed since the work was planned",
        where=path,
        why="its size is another one",
        next="let it rest, then run make tokenize again",
    )
