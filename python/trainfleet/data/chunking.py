"""Cuts long documents into parts that are encoded one by one, to the same ids as the whole.

A tokenizer's splitter decides from a few characters around a position whether a word ends there. So a cut is made only where
encoding its surroundings in two parts gives the same ids as in one; a tokenizer for which that never holds (SentencePiece puts a
space before every text) gets the whole document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from .encoders import TextEncoder

LONG = 2**24  # characters: below it a document is encoded whole
PART = 2**20
AROUND = 256  # characters on each side that decide
SEARCHED = 2**16
TRIED = 8
WORD_END = re.compile(r"(?<=\S)\n(?=[^\W\d_])|(?<=[^\W\d_])(?= [^\W\d_])")


def parts(text: str, encoder: TextEncoder) -> Iterator[str]:
    """The text in parts of about PART characters; joined they are the text, and so are their ids."""
    start = 0
    while len(text) - start > 2 * PART and (cut := _find_cut(text, start + PART, encoder)):
        yield text[start:cut]
        start = cut
    yield text[start:]


def _find_cut(text: str, at: int, encoder: TextEncoder) -> int | None:
    """The first good place from `at` on; None when the first that look good are none."""
    for number, found in enumerate(WORD_END.finditer(text, at, at + SEARCHED)):
        if number == TRIED:
            break
        if _can_cut(text[found.end() - AROUND : found.end()], text[found.end() : found.end() + AROUND], encoder):
            return found.end()
    return None


def _can_cut(before: str, after: str, encoder: TextEncoder) -> bool:
    ids, offsets = encoder.encode([before, after, before + after])
    return np.array_equal(ids[: offsets[2]], ids[offsets[2] :])
