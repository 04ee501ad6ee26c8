"""Readers for tables that can't be split into pieces: JSON arrays, CSV, TSV and Arrow files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import TextIO

from ..config.types_train import CHAT
from ..trust.errors import DataError
from ..trust.untrusted_input import converting
from .bad_records import LINE, too_long
from .formats import (
    LONGEST,
    Document,
    Item,
    attempted,
    cell,
    cells,
    columns,
    damage,
    decoded,
    document_of,
    library,
    read_lines,
    texts_of,
)
from .sources import SourcePiece

TAB = (".tsv", ".tab")
QUOTED = (  # suggested fix for TSV files written by the csv module, a spreadsheet or pandas
    f"{LINE}; if its cells have quotes, convert it to CSV: "
    'python3 -c "import csv, sys; csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, '
    "'excel-tab'))\" < a.tsv > a.csv"
)


def read_json(piece: SourcePiece, text_field: str) -> Iterator[Item]:
    """Yields the `text_field` of a JSON object, of each object in an array, or of each line,
    depending on the file's content.
    """
    with piece.open() as stream:
        content = stream.read(LONGEST + 1)
    if len(content) > LONGEST:
        raise DataError(
            "is too large to read at once",
            where=piece.path,
            why=f"it is larger than {LONGEST / 2**20:.0f} MiB",
            next=f"write one line per text; with jq installed: jq -c '.[]' {piece.path} > "
            "texts.jsonl",
        )
    text = decoded(content, piece, 0, 0).text
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise DataError(
            "is nested too deeply", where=piece.path, next="remove it from data.sources"
        ) from error
    except ValueError:
        yield from read_lines(piece, text_field, ((line, 0) for line in content.split(b"\n")))
        return
    for number, record in enumerate(found if isinstance(found, list) else [found]):
        yield attempted(document_of, record, f"{piece.path}: entry {number}", text_field)


def read_separated(piece: SourcePiece, text_field: str) -> Iterator[Item]:
    """Yields the `text_field` column of a CSV or TSV table. The first row contains the column
    names, and all other rows have the same number of cells.

    CSV follows RFC 4180, with quotes. TSV has no quotes, and each line is a row:
    https://www.iana.org/assignments/media-types/text/tab-separated-values
    """
    tabs, at = piece.path.endswith(TAB), 0
    with (
        piece.open() as raw,
        io.TextIOWrapper(raw, "utf-8-sig", newline="\n" if tabs else "") as stream,
    ):
        rows = (
            _tabbed(_lines(stream, piece)) if tabs else _quoted(_lines(stream, piece), piece.path)
        )
        try:
            at, names = next(rows, (1, []))
            make, pick = _picking(names, text_field, piece.path)
            for at, row in rows:
                where = f"{piece.path}:{at}"
                # The row was split by a comma, tab or line break inside a text.
                if len(row) < len(names) or any(row[len(names) :]):
                    yield DataError(
                        f"has {len(row)} cells, not {len(names)}",
                        where=where,
                        next=QUOTED if tabs else LINE,
                    )
                else:
                    yield attempted(make, pick(row), where, text_field)
        except UnicodeDecodeError as error:
            why = f"{error.reason}, after line {at}"
            raise DataError(
                "is not valid UTF-8",
                where=piece.path,
                why=why,
                next=converting(error.object, error.start),
            ) from error


def _picking(
    names: list[str], text_field: str, where: str
) -> tuple[Callable[..., Document], Callable[[list[str]], object]]:
    """Returns a function that builds a document from a value, and one that gets the value from a
    row.
    """
    found = columns(names, text_field, where)
    if text_field == CHAT:
        return document_of, lambda row: dict(zip(names, row, strict=False))
    return cell, itemgetter(names.index(found[0]))


def _tabbed(lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """Yields the line number and the cells of each non-blank line."""
    for number, line in enumerate(lines, 1):
        if text := line.removesuffix("\n").removesuffix("\r"):
            yield number, text.split("\t")


def _quoted(lines: Iterator[str], path: str) -> Iterator[tuple[int, list[str]]]:
    """Yields each non-blank CSV row with the number of the row's last line."""
    csv.field_size_limit(LONGEST)
    rows = csv.reader(lines, "excel", strict=True)
    try:
        yield from ((rows.line_num, row) for row in rows if row)
    except csv.Error as error:
        where = f"{path}:{rows.line_num}"
        if "field larger" in str(error):
            raise too_long(where) from error
        raise DataError(
            "is not a valid CSV row", where=where, why=str(error), next="correct or remove the row"
        ) from error


def _lines(stream: TextIO, piece: SourcePiece) -> Iterator[str]:
    """Yields the lines of a text. Raises DataError if a line exceeds the maximum document size."""
    number = 0
    while line := stream.readline(LONGEST + 1):
        number += 1
        if len(line) > LONGEST:
            raise too_long(f"{piece.path}:{number}")
        yield line


def read_arrow(piece: SourcePiece, text_field: str) -> Iterator[Item]:
    """Yields the `text_field` column of an Arrow file or stream (including Feather), one batch at a
    time.
    """
    arrow, ipc = library("pyarrow", "pyarrow", piece), library("pyarrow.ipc", "pyarrow", piece)
    with piece.open() as stream, damage(piece, "Arrow", arrow.ArrowException, OSError, ValueError):
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        reader = ipc.open_file(stream) if is_file else ipc.open_stream(stream)
        names = columns(reader.schema.names, text_field, piece.path, texts_of(reader.schema))
        batches = (
            (reader.get_batch(number) for number in range(reader.num_record_batches))
            if is_file
            else iter(reader)
        )
        row = 0
        for batch in batches:
            yield from cells(batch.select(names), piece.path, row, text_field)
            row += batch.num_rows
