"""Yields a unit's documents in order and in bounded memory, from any format (formats.py).

A document is a small text file, a JSON line or a table row. Plain texts longer than
sources.LARGEST_TEXT are cut at the first blank line after each multiple of sources.GRID, regardless
of unit boundaries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ..config.addresses import HUB
from ..config.tables import named
from ..storage.s3 import SCHEME
from ..trust.errors import DataError
from . import formats
from .bad_records import Skipped, alone
from .chat import BadTemplate, ChatTemplate
from .format_table import FORMATS, name_of
from .formats import Document, Item, Unread
from .source_files import check_unchanged, is_stdlib
from .sources import MEMORY, SourcePiece, Unit, is_long_text

# start of a line in a table of literals
LITERAL = re.compile(r"""\s*[bru]{0,2}['"0-9\\(\[{\])},-]""")
TABLE = 0.6  # fraction of literal lines above which a file counts as a table
BATCH_BYTES = 2**20  # batch size in bytes; small, because the tokenizer needs most of the memory


def read_unit(unit: Unit, text_field: str, skipped: Skipped | None = None) -> Iterator[Document]:
    """Yields a unit's non-empty documents in order. Raises DataError with file and line for a bad
    record, unless bad records are skipped.
    """
    for piece in unit.pieces:
        yield from read_piece(piece, text_field, skipped)


def read_piece(
    piece: SourcePiece, text_field: str, skipped: Skipped | None = None
) -> Iterator[Document]:
    """Yields the documents that start in one piece. Raises DataError if the file has changed since
    planning.
    """
    # Only files on disk need this check, because S3 requests specify the object version.
    on_disk = not piece.path.startswith((HUB, SCHEME))
    if on_disk:
        check_unchanged(piece.file)
    try:
        yield from _kept(_read(piece, text_field), skipped or Skipped(True))
    except MemoryError as error:
        why = f"a process that reads sources may use {MEMORY / 2**30:.0f} GiB"
        raise DataError(
            "needs too much memory to read",
            where=piece.path,
            why=why,
            next="download it again, or split it",
        ) from error
    if on_disk:
        check_unchanged(piece.file)


def _kept(items: Iterable[Item], skipped: Skipped) -> Iterator[Document]:
    """Yields the non-empty documents. For a bad record, raises the error or counts the record as
    skipped.
    """
    good = False
    for item in items:
        if isinstance(item, DataError):
            if skipped.stop:
                raise alone(item) if good else item
            skipped.add(item)
        elif isinstance(item, Unread):
            skipped.unread[item.kind] += 1
        elif item.size:
            good = True
            yield item


def rendered(
    documents: Iterable[Document], template: ChatTemplate, skipped: Skipped
) -> Iterator[Document]:
    """Renders conversations, with markers around the parts to learn (chat.py).

    If the template rejects a conversation, raises the error or counts the record as skipped.
    """
    for document in documents:
        if not document.where:
            raise DataError(
                "is plain text, not conversations",
                where="data.sources",
                next="remove plain text files",
            )
        try:
            text = template.text_of(document.text, document.where)
        except DataError as error:
            if skipped.stop or isinstance(error, BadTemplate):
                raise
            skipped.add(error)
        else:
            yield replace(document, text=text)


def in_batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yields batches of documents with about BATCH_BYTES of text each, so that memory use does not
    grow with the input.
    """
    batch, length = list[Document](), 0
    for document in documents:
        batch.append(document)
        length += document.size
        if length >= BATCH_BYTES:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _read(piece: SourcePiece, text_field: str) -> Iterator[Item]:
    """Yields every record of a piece, including empty ones, with the reader for the file's
    format.
    """
    path = piece.path
    if path.startswith(HUB):
        return formats.read_rows(piece, text_field)
    return READERS.get(name_of(path), read_plain)(piece, text_field)


def read_plain(piece: SourcePiece, text_field: str) -> Iterator[Item]:
    """Yields a plain text file as one document, or as several documents if it is long."""
    if is_long_text(piece.file):
        return formats.read_long_text(piece)
    return _library_text(piece) if is_stdlib(piece.path) else formats.read_text(piece)


def _library_text(piece: SourcePiece) -> Iterator[Item]:
    """Yields the document in a standard library file. Skips tables of literals and files that are
    not valid UTF-8.
    """
    for item in formats.read_text(piece):
        if isinstance(item, Document) and not is_table(item.text):
            yield item


def is_table(text: str) -> bool:
    """Returns whether most lines start with a string, number or bracket, as in encodings/cp437.py.
    A model can't learn Python from tables of literals.
    """
    lines = [line for line in text.splitlines() if line and not line.isspace()]
    return sum(map(bool, map(LITERAL.match, lines))) > TABLE * len(lines)


def left_out(unit: Unit, documents: int) -> tuple[str, ...]:
    """Returns a note for the unit's record if standard library files were skipped."""
    if not is_stdlib(unit.pieces[0].path) or documents == len(unit.pieces):
        return ()
    why = "a table of literals, empty, or not UTF-8"
    return (
        f"unit {unit.index}: {len(unit.pieces) - documents} of {len(unit.pieces)} files "
        f"skipped: {why}",
    )


# Maps a format name to its reader.
READERS: dict[str, Callable[[SourcePiece, str], Iterator[Item]]] = {
    row.name: named(row.read) for row in FORMATS.values()
}
