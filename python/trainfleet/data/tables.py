"""Texts in the cells of tables that can't be split: JSON arrays, comma- and tab-separated values, Arrow."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import TextIO

from ..trust.errors import DataError
from ..trust.untrusted_input import converting
from .bad_records import LINE, bad_line, too_long
from .formats import LONGEST, Item, attempted, cell, column, damage, decoded, document_of, library, texts, texts_of
from .source_files import open_file
from .sources import SourcePiece

TAB = (".tsv", ".tab")


def read_json(piece: SourcePiece, text_field: str) -> Iterator[Item]:
    """`text_field` of a JSON object, of each in an array, or of each line, whichever the file holds."""
    with open_file(piece.file) as stream:
        content = stream.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise DataError(
            "is too large to be read whole", where=piece.path, why=f"it has more than {LONGEST / 2**20:.0f} MiB",
            next=f"write a line for each text: jq -c '.[]' {piece.path} > texts.jsonl",
        )  # fmt: skip
    text = decoded(content, piece, 0, 0).text.removeprefix("\ufeff")
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise DataError("is nested too deeply", where=piece.path, next="leave it out of data.sources") from error
    except ValueError:
        yield from _json_lines(piece, text, text_field)
        return
    for number, record in enumerate(found if isinstance(found, list) else [found]):
        yield attempted(document_of, record, f"{piece.path}: entry {number}", text_field)


def _json_lines(piece: SourcePiece, text: str, text_field: str) -> Iterator[Item]:
    for number, line in enumerate(text.split("\n"), 1):  # a text may hold U+2028 and other ends of line as they are
        if not line.strip():
            continue
        where = f"{piece.path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield bad_line(where, line.encode(), text_field, error)
        else:
            yield attempted(document_of, record, where, text_field)


def read_separated(piece: SourcePiece, text_field: str) -> Iterator[Item]:
    """The column `text_field` of a table of comma- or tab-separated values, whose first row names the columns."""
    csv.field_size_limit(LONGEST)
    with open_file(piece.file) as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as stream:
        rows = csv.reader(_lines(stream, piece), "excel-tab" if piece.path.endswith(TAB) else "excel", strict=True)
        try:
            names = next(rows, [])
            index = column(names, text_field, piece.path)
            for row in rows:
                if row:  # a blank line is none
                    where = f"{piece.path}:{rows.line_num}"
                    if index >= len(row) or any(row[len(names) :]):  # more: a text that was cut at its comma
                        yield DataError(f"has {len(row)} cells of {len(names)}", where=where, next=LINE)
                    else:
                        yield attempted(cell, row[index], where, text_field)
        except UnicodeDecodeError as error:
            why = f"{error.reason}, after line {rows.line_num}"
            raise DataError("is not UTF-8", where=piece.path, why=why, next=converting(error.object, error.start)) from error
        except csv.Error as error:
            where = f"{piece.path}:{rows.line_num}"
            if "field larger" in str(error):
                raise too_long(where) from error
            raise DataError("is no row of a table", where=where, why=str(error), next="correct or remove it") from error


def _lines(stream: TextIO, piece: SourcePiece) -> Iterator[str]:
    """The lines of a text, none of them longer than a document may be."""
    number = 0
    while line := stream.readline(LONGEST + 1):
        number += 1
        if len(line) > LONGEST:
            raise too_long(f"{piece.path}:{number}")
        yield line


def read_arrow(piece: SourcePiece, text_field: str) -> Iterator[Item]:
    """The column `text_field` of an Arrow file or stream (also Feather), a batch at a time."""
    arrow, ipc = library("pyarrow", "pyarrow", piece), library("pyarrow.ipc", "pyarrow", piece)
    with open_file(piece.file) as stream, damage(piece, "Arrow", arrow.ArrowException, OSError, ValueError):
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        reader = ipc.open_file(stream) if is_file else ipc.open_stream(stream)
        index = column(reader.schema.names, text_field, piece.path, texts_of(reader.schema))
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches)) if is_file else iter(reader)
        row = 0
        for batch in batches:
            for text in texts(batch, index, piece.path, text_field):
                yield attempted(cell, text, f"{piece.path}: row {row}", text_field)
                row += 1
