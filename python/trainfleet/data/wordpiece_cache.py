"""Encodes BERT's WordPiece with a cache of words: the reference encodes each word once.

BERT's splitter ends a word at every ASCII space, line end and punctuation sign. Its normalizer
reads no character beyond them: a combining mark reaches back to the sign at most, which stays the
same. So a text's ids are those of its stretches in between, one after another. `tokenizers` itself
encodes 1 to 2 MB per second this way; no faster library is exact for WordPiece.
"""

from __future__ import annotations

import json
import re
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]

WORD = re.compile(r"[^ \t\n\r!-/:-@\[-`{-~]+|[!-/:-@\[-`{-~]")
KEPT = 2**18  # words: some 50 MB
KEPT_IDS = 2**21


class Reference(Protocol):
    """The library that encodes every word once."""

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]: ...


class Words:
    """WordPiece by the reference and a table of words. Raises ValueError for any other kind of
    tokenizer.
    """

    name, package = "tokenizers by words", "tokenizers"

    def __init__(self, definition: str, reference: Reference) -> None:
        content = json.loads(definition)
        kinds = [
            (content.get(part) or {}).get("type")
            for part in ("model", "pre_tokenizer", "normalizer")
        ]
        if kinds != ["WordPiece", "BertPreTokenizer", "BertNormalizer"]:
            raise ValueError("it is not BERT's WordPiece")
        if not all(token["special"] for token in content.get("added_tokens", [])):
            raise ValueError("it has added tokens that are found in plain text")
        self.reference = reference
        self.rows: dict[str, int]
        self.bounds: Offsets
        self.ids: Ids
        self._forget()

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]:
        found = [WORD.findall(text) for text in texts]
        words = list(chain.from_iterable(found))
        self._learn(words)
        rows = np.fromiter(map(self.rows.__getitem__, words), np.int64, len(words))
        starts, lengths = self.bounds[rows], self.bounds[rows + 1] - self.bounds[rows]
        ends = np.concatenate([[0], np.cumsum(lengths)])  # position in the result after each word
        indices = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)
        return self.ids[indices], ends[
            np.concatenate([[0], np.cumsum([len(part) for part in found], dtype=np.int64)])
        ]

    def _learn(self, words: list[str]) -> None:
        """Adds these words to the table."""
        if len(self.rows) > KEPT or len(self.ids) > KEPT_IDS:
            self._forget()
        if new := [word for word in dict.fromkeys(words) if word not in self.rows]:
            ids, offsets = self.reference.encode(new)
            self.rows.update(
                zip(new, range(len(self.rows), len(self.rows) + len(new)), strict=True)
            )
            self.bounds = np.concatenate([self.bounds, len(self.ids) + offsets[1:]])
            self.ids = np.concatenate([self.ids, ids])

    def _forget(self) -> None:
        self.rows, self.bounds, self.ids = {}, np.zeros(1, np.int64), np.zeros(0, np.uint32)
