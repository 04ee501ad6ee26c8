"""Text readers that yield one document per file, JSON line (plain, gzip or zstd) or Parquet row, or
several documents from one long text.

A bad record yields its error, with file and line or row. Lines are counted only when an error needs
the number. Damage that makes later records unreadable is raised instead: a damaged file, or a line
longer than LONGEST bytes. Such a line usually means that the file has no line breaks, and parsing
it would take several times its size in memory.
"""

from __future__ import annotations

import codecs
import gzip
import importlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, BinaryIO

from ..config.types_train import CHAT
from ..process.install_paths import installing_package
from ..trust.errors import DataError
from ..trust.untrusted_input import converting, kind_of
from . import hub_datasets, sources
from .bad_records import (
    ELSE,
    BadText,
    OtherField,
    bad_line,
    chat_fields,
    half_a_pair,
    lacks_field,
    naming,
    not_text,
    not_utf8,
    texts_in,
    too_long,
)
from .chat import messages_of
from .sources import SourcePiece

# Bytes to search for a blank line before falling back to any line break
SEEK_BLANK = 2**16
# bytes to decompress at a time; small, because repetitive text can expand ten thousand times
PACKED_BLOCK = 2**13
LONGEST = sources.LARGEST_TEXT  # maximum bytes per record; longer plain texts are cut
# Arrow's text types, which may also be the value type of a dictionary
TEXT_TYPES = ("string", "large_string", "string_view", "null")
ROWS = 256  # maximum rows of a Parquet row group to load at a time


@dataclass(frozen=True, slots=True)
class Document:
    """Text with its size in UTF-8 bytes and its CRC-32.

    `consumed` is the number of bytes read from the file for this text, before decompression.

    A conversation's text is the JSON of its messages, and `where` is its file and line.
    """

    text: str
    size: int
    hash: int
    consumed: int
    where: str = ""


@dataclass(frozen=True, slots=True)
class Unread:
    """Archive member that is not read. `kind` is the reason, which warnings report with a count."""

    kind: str


Item = Document | DataError | Unread  # a record's document or error, or an Unread


def read_text(piece: SourcePiece) -> Iterator[Item]:
    """Yields the entire file as one document."""
    with piece.open() as stream:
        content = stream.read()
    yield attempted(decoded, content, piece, 0, len(content))


def read_long_text(piece: SourcePiece) -> Iterator[Item]:
    """Yields the documents of a long text that start in the piece."""
    grid = sources.GRID
    with piece.open() as stream:
        for start in range(piece.start, piece.end, grid):
            begin, end = _boundary(stream, start), _boundary(stream, start + grid)
            stream.seek(begin)
            yield attempted(
                decoded, stream.read(end - begin), piece, begin, min(grid, piece.end - start)
            )


def read_json_lines(piece: SourcePiece, text_field: str) -> Iterator[Item]:
    """Yields the `text_field` of each JSON line that starts in the piece. Skips blank lines."""
    return read_lines(piece, text_field, _lines(piece))


def read_packed_lines(piece: SourcePiece, text_field: str) -> Iterator[Item]:
    """Yields the `text_field` of each JSON line in a compressed file."""
    return read_lines(piece, text_field, _packed_lines(piece))


def read_lines(
    piece: SourcePiece, text_field: str, lines: Iterable[tuple[bytes, int]]
) -> Iterator[Item]:
    """Yields the `text_field` of each JSON line. `lines` provides each line with the number of
    bytes read for it. A null becomes an empty document.
    """
    for number, (line, consumed) in enumerate(lines, 1):
        if len(line) > LONGEST:
            raise too_long(f"{piece.path}:{_first_line(piece) + number}")
        if not line.strip():
            continue
        try:
            # Concatenated files may have a byte order mark in the middle.
            text = json.loads(line.decode("utf-8-sig"))[text_field]
            document: Item = encoded("" if text is None else text, consumed)
        except (KeyError, TypeError, AttributeError):
            yield attempted(
                document_of,
                json.loads(line),
                f"{piece.path}:{_first_line(piece) + number}",
                text_field,
            )
        except (ValueError, RecursionError) as error:
            yield bad_line(f"{piece.path}:{_first_line(piece) + number}", line, text_field, error)
        else:
            yield document


def read_parquet(piece: SourcePiece, text_field: str) -> Iterator[Item]:
    """Yields the `text_field` column of the row groups that start in the piece. Loads at most ROWS
    rows at a time.
    """
    arrow, parquet = (
        library("pyarrow", "pyarrow", piece),
        library("pyarrow.parquet", "pyarrow", piece),
    )
    with (
        piece.open() as stream,
        damage(piece, "Parquet", arrow.ArrowException, OSError, ValueError),
    ):
        table = parquet.ParquetFile(stream, pre_buffer=False)
        names = columns(
            table.schema_arrow.names, text_field, piece.path, texts_of(table.schema_arrow)
        )
        row = 0
        for group in range(table.num_row_groups):
            about, first = table.metadata.row_group(group), row
            row += about.num_rows
            if not piece.start <= _first_byte(about) < piece.end:
                continue
            at = first
            for batch in table.iter_batches(ROWS, row_groups=[group], columns=names):
                yield from cells(batch, piece.path, at, text_field)
                at += batch.num_rows


def read_rows(piece: SourcePiece, text_field: str) -> Iterator[Item]:
    """Yields the `text_field` of each row in one shard of a Hugging Face dataset, in order."""
    source, _, part = piece.path.rpartition("#")
    index, count = map(int, part.split("/"))
    for row, record in enumerate(hub_datasets.open_dataset(source).shard(count, index)):
        yield attempted(document_of, record, f"{piece.path}: row {row}", text_field)


def cells(batch: Any, where: str, row: int, text_field: str) -> Iterator[Item]:
    """Yields the items of an Arrow batch whose first row is number `row`. Raises DataError if the
    column is not text, and ArrowInvalid if it is not valid UTF-8.
    """
    if text_field == CHAT:
        make: Callable[..., Document] = document_of
    elif is_text(kind := batch.schema.field(text_field).type):
        make = cell
    else:
        other = naming(batch.schema.names, texts_of(batch.schema))
        raise DataError(
            f"the column `{text_field}` is not text",
            where=where,
            why=f"its type is {kind}",
            next=other,
        )
    batch.validate(full=True)  # Offsets in a damaged file can point anywhere in memory.
    values = batch.to_pylist() if text_field == CHAT else batch.column(text_field).to_pylist()
    for at, value in enumerate(values, row):
        yield attempted(make, value, f"{where}: row {at}", text_field)


def is_text(kind: Any) -> bool:
    """Returns whether an Arrow type is a text type."""
    return str(getattr(kind, "value_type", kind)) in TEXT_TYPES and "list" not in str(kind)


def texts_of(schema: Any) -> list[str]:
    """Returns the names of the text columns in an Arrow schema."""
    return [field.name for field in schema if is_text(field.type)]


def encoded(text: str, consumed: int) -> Document:
    """Builds a document from a string. Raises UnicodeEncodeError for an unpaired surrogate, which
    JSON can contain.
    """
    content = text.encode()
    return Document(text, len(content), zlib.crc32(content), consumed)


def attempted(make: Callable[..., Document], *words: Any) -> Item:
    """Returns the document that `make` builds from one record, or the DataError that `make`
    raises.
    """
    try:
        return make(*words)
    except DataError as error:
        return error


def document_of(record: object, where: str, text_field: str) -> Document:
    """Returns the document in a JSON record, or an empty document if the text is null. Raises
    DataError if the record has no text.
    """
    if not isinstance(record, dict):
        raise OtherField(
            "is not a JSON object", where=where, next=f'write {{"{text_field}": "the text"}}'
        )
    if text_field == CHAT and chat_fields(record):
        text = json.dumps(messages_of(record, where), ensure_ascii=False)
        return replace(cell(text, where, text_field), where=where)
    if text_field not in record:
        raise lacks_field(where, text_field, list(record), texts_in(record))
    if not isinstance(record[text_field], str | None):
        raise not_text(where, text_field, record)
    return cell(record[text_field], where, text_field)


def cell(text: str | None, where: str, text_field: str) -> Document:
    """Returns the document in a table cell, or an empty document if the cell is empty. Raises
    DataError if the cell is invalid.
    """
    if text and len(text) > LONGEST:
        raise too_long(where)
    try:
        return encoded(text or "", len(text or ""))
    except UnicodeEncodeError as error:
        raise half_a_pair(text_field, where, error) from error


def columns(
    names: list[str], text_field: str, where: str, readable: list[str] | None = None
) -> list[str]:
    """Returns the names of a table's columns to read. Raises DataError if the text column is
    missing or not unique. `readable` lists the text columns, and defaults to all columns.
    """
    if text_field == CHAT and (found := chat_fields(names)):
        return found
    if text_field not in names:
        raise lacks_field(where, text_field, names, names if readable is None else readable)
    if names.count(text_field) > 1:
        raise DataError(
            f"has {names.count(text_field)} columns named `{text_field}`",
            where=where,
            next="rename all except one",
        )
    return [text_field]


def _boundary(stream: BinaryIO, at: int) -> int:
    """Returns the first position at or after `at` where a text can be cut: after a blank line,
    otherwise after any line, otherwise between two characters.
    """
    if at == 0:
        return 0
    content = b""
    for sign, window in ((b"\n\n", SEEK_BLANK), (b"\n", sources.GRID - 4)):
        stream.seek(at)
        content = stream.read(window)
        if len(content) < 4:  # almost at the end of the file
            return at + len(content)
        if (found := content.find(sign)) >= 0:
            return at + found + len(sign)
    # a UTF-8 character has at most four bytes
    return at + next(i for i in range(4) if content[i] & 0xC0 != 0x80)


def _lines(piece: SourcePiece) -> Iterator[tuple[bytes, int]]:
    """Yields each line that starts in the piece, with its length in bytes."""
    with piece.open(max(piece.start - 1, 0)) as stream:
        if piece.start:
            # Skip the rest of a line that starts in an earlier piece.
            rest = stream.readline(min(piece.end - piece.start, LONGEST + 1))
            if not rest.endswith(b"\n"):
                # Either the line ends in a later piece, or it is too long and the piece where it
                # starts raises the error.
                return
        at = stream.tell()
        while line := stream.readline(LONGEST + 1):
            if at >= piece.end:
                return
            at += len(line)
            yield line, len(line)


def _packed_lines(piece: SourcePiece) -> Iterator[tuple[bytes, int]]:
    """Yields each line of a compressed file, with the number of compressed bytes read for it
    (usually 0).
    """
    with (
        piece.open() as raw,
        damage(piece, "compressed", EOFError, zlib.error, gzip.BadGzipFile) as line_number,
    ):
        at = 0
        for line in unpacked(raw, piece):
            line_number[0] += 1
            before, at = at, raw.tell()
            yield line, at - before


def unpacked(raw: BinaryIO, piece: SourcePiece) -> Iterator[bytes]:
    """Yields the lines of a gzip or zstd file, cutting off overlong ones. Raises EOFError if the
    file is truncated.
    """
    if not piece.path.endswith(".gz"):
        return _joined(_unpacked_zstd(raw, piece))
    stream = gzip.GzipFile(fileobj=raw)
    return iter(lambda: stream.readline(LONGEST + 1), b"")


def _unpacked_zstd(raw: BinaryIO, piece: SourcePiece) -> Iterator[bytes]:
    """Yields the decompressed blocks of all frames. Checks that the last frame is complete, because
    the library's own streams accept truncated files.
    """
    zstandard = library("zstandard", "zstandard", piece)
    frame = None
    while block := raw.read(PACKED_BLOCK):
        while block:
            if frame is None or frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(block)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            block = frame.unused_data
    if frame is not None and not frame.eof:
        raise EOFError("it ends in the middle of a frame")


def _joined(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yields the lines of a text that arrives in blocks."""
    rest, length = list[bytes](), 0
    for block in blocks:
        first, *more = block.split(b"\n")
        rest.append(first)
        length = len(more[-1]) if more else length + len(first)
        if length > LONGEST:
            break
        for part in more:
            yield b"".join(rest) + b"\n"
            rest = [part]
    if last := b"".join(rest):
        yield last


@contextmanager
def damage(piece: SourcePiece, kind: str, *errors: type[Exception]) -> Iterator[list[int]]:
    """Converts a library's errors about damaged content into a DataError that names the file, and
    the line if the caller counts lines in the yielded list.
    """
    line = [0]
    try:
        yield line
    except errors as error:
        where = f"{piece.path}:{line[0] + 1}" if line[0] else piece.path
        raise DataError(
            f"is a damaged {kind} file", where=where, why=str(error), next="download the file again"
        ) from error


def library(module: str, package: str, piece: SourcePiece) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"can't be read without the package {package}"
        raise DataError(
            what, where=piece.path, why=str(error), next=installing_package(package)
        ) from error


def _first_byte(row_group: Any) -> int:
    """Returns the file offset of a row group's first page."""
    column = row_group.column(0)
    return int(
        column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
    )


@lru_cache(maxsize=8)
def _first_line(piece: SourcePiece) -> int:
    """Counts the lines before a piece. Called only for error messages, because it rereads
    the file.
    """
    return _line_at(piece, piece.start - 1) if piece.start else 0


def decoded(content: bytes, piece: SourcePiece, offset: int, consumed: int) -> Document:
    """Decodes the bytes at `offset` in a file into a document, without a byte order mark. Raises
    BadText if they are not valid UTF-8.
    """
    if offset == 0 and content.startswith(codecs.BOM_UTF8):
        content, offset = content[3:], 3
    zeros, kind = content.count(0), kind_of(content)
    if zeros > len(content) / 4 or (zeros and kind):
        why = f"{zeros:,} of its {len(content):,} bytes are 0{'' if kind else ', as in UTF-16'}"
        raise BadText(
            "is not text", where=piece.path, why=why, next=f"{converting(content, 0)}{ELSE}"
        )
    try:
        return Document(content.decode(), len(content), zlib.crc32(content), consumed)
    except UnicodeDecodeError as error:
        line = _line_at(piece, offset) + content.count(b"\n", 0, error.start)
        raise not_utf8(f"{piece.path}:{line}", error, offset) from error


def _line_at(piece: SourcePiece, offset: int) -> int:
    with piece.open() as stream:
        return 1 + sum(
            stream.read(min(2**20, offset - at)).count(b"\n") for at in range(0, offset, 2**20)
        )
