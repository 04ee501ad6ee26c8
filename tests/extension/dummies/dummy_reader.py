"""What reads the dummies' data format; it loads no torch, as nothing does that reads sources."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from trainfleet.data.formats import Document, Item, attempted, decoded
from trainfleet.data.source_files import open_file
from trainfleet.data.sources import SourcePiece


def read_rot13(piece: SourcePiece, text_field: str) -> Iterator[Item]:
    with open_file(piece.file) as stream:
        yield attempted(_turned, stream.read(), piece)


def _turned(content: bytes, piece: SourcePiece) -> Document:
    return decoded(codecs.encode(content.decode(), "rot13").encode(), piece, 0, len(content))
