"""Sample reader for masked language models with dynamic masking, either RoBERTa's packed sentences
or BERT's sentence pairs.

The masked tokens of global sample g depend only on (seed, g), because random draws use a counter
instead of a stateful generator. Masks are therefore the same for every world size and after every
resume, but differ between epochs. Every row is full, so no compute is spent on padding. All rows
have the same number of targets, so a batch's mean loss is the average of its micro-batches' mean
losses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..config.vocabulary import SPECIALS
from ..trust.errors import DataError
from .dataset import Dataset
from .packing import IGNORED, Rows
from .shuffling import fold, mix
from .tokenizer import Tokenizer, load

SELECT, REPLACE, WORD, PAIR, CUT = range(5)  # keys that separate random streams by purpose
# Fractions of the selected tokens that are masked and that stay unchanged. The rest are replaced by
# another word (Devlin et al. 2018, section 3.1).
MASKED, KEPT = (0.8, 0.1)
SENTENCE_ENDS = (".", "!", "?", "。", "！", "？", "\n")


@dataclass(frozen=True)
class Specials:
    """Token ids that a masked model needs: its special tokens, the words that may replace a token,
    and the tokens that end a sentence.
    """

    start: int
    separator: int
    mask: int
    padding: int
    words: npt.NDArray[np.int64]
    sentence_ends: npt.NDArray[np.int64]


class Masked:
    """Reader for masked samples: BERT's sentence pairs if `pairs`, otherwise RoBERTa's packed
    sentences. `guesses` returns the number of tokens to predict in a sample of a given length.
    """

    def __init__(self, dataset: Dataset, pairs: bool, guesses: Callable[[int], int]) -> None:
        self.dataset, self.pairs, self.guesses = dataset, pairs, guesses
        self.specials = specials_of(load(dataset.folder))
        self.added = 3 if pairs else 2  # special tokens per row

    @property
    def end_of_document(self) -> int:
        return self.dataset.end_of_document

    @property
    def validation_parts(self) -> Collection[str]:
        return self.dataset.validation_parts

    def samples(self, split: str, sequence_length: int) -> int:
        """Returns the number of samples of `sequence_length` tokens in one epoch of a split."""
        return self.dataset.samples(split, sequence_length - self.added)

    def learned(self, split: str, first: int, count: int, sequence_length: int, seed: int) -> None:
        """Returns None, because all samples have the same number of targets."""

    def batch(self, split: str, first: int, count: int, sequence_length: int, seed: int) -> Rows:
        """Returns samples [first, first + count) of the global order as [count, sequence_length, 2
        or 3]: token, target and, for pairs, segment.

        The first token of a pair is never masked. Its target is 1 if B does not follow A in the
        text.
        """
        make = self._pairs if self.pairs else self._packed
        tokens, *segments, labels = make(split, first, count, sequence_length, seed)
        hidden, targets = self._hide(tokens, first, seed)
        if self.pairs:
            targets[:, 0] = labels
        return np.stack([hidden, targets, *segments], axis=2)

    def _packed(
        self, split: str, first: int, count: int, length: int, seed: int
    ) -> tuple[Rows, ...]:
        """Builds RoBERTa's FULL-SENTENCES rows, which span documents separated by an
        end-of-document token (Liu et al. 2019, section 4.2).
        """
        rows = self.dataset.batch(split, first, count, length - 2, seed)[:, : length - 2]
        edges = np.ones((count, 1), np.int64)
        tokens = np.concatenate(
            [edges * self.specials.start, rows, edges * self.specials.separator], axis=1
        )
        return tokens, edges[:, 0]

    def _pairs(
        self, split: str, first: int, count: int, length: int, seed: int
    ) -> tuple[Rows, ...]:
        """Builds BERT's [CLS] A [SEP] B [SEP] rows and returns tokens, segments and labels. In half
        of the rows (label 1), B is taken from half an epoch later.

        If possible, A ends at a sentence boundary in the middle half of the row (Devlin et al.
        2018, section 3.1).
        """
        room, dataset = length - 3, self.dataset
        rows = dataset.batch(split, first, count, room, seed)
        others = dataset.rows(split, first + dataset.samples(split, room) // 2, count, room, seed)
        tokens, segments = np.zeros((2, count, length), np.int64)
        labels = np.zeros(count, int)
        start, end = [self.specials.start], [self.specials.separator]
        for row, text in enumerate(rows[:, :room]):
            labels[row] = _uniform(seed, PAIR, first + row) < 0.5
            cut = self._cut(text, _uniform(seed, CUT, first + row))
            second = (others if labels[row] else rows)[row, cut:room]
            tokens[row] = np.concatenate([start, text[:cut], end, second, end])
            segments[row, cut + 2 :] = 1
        return tokens, segments, labels

    def _cut(self, text: npt.NDArray[np.int64], draw: float) -> int:
        """Returns where the first sentence of a pair ends: preferably after a sentence end in the
        middle half of the row, otherwise after any token in that half.
        """
        low, high = max(1, len(text) // 4), max(2, len(text) * 3 // 4)
        ends = np.flatnonzero(np.isin(text[low - 1 : high - 1], self.specials.sentence_ends)) + low
        return int(ends[int(draw * len(ends))]) if len(ends) else low + int(draw * (high - low))

    def _hide(self, tokens: Rows, first: int, seed: int) -> tuple[Rows, Rows]:
        """Selects the tokens to predict, and masks most of them, replaces some with another word
        and leaves some unchanged. Returns the new tokens and the targets.
        """
        shape, special = tokens.shape, self.specials
        fixed = [
            special.start,
            special.separator,
            special.padding,
            special.mask,
            self.dataset.manifest.end_of_document,
        ]
        draws = _draws(shape, seed, SELECT, first) + np.isin(tokens, fixed)
        draws[:, 0] += 1  # selected last, because its target is a label, not a word
        guesses = self.guesses(shape[1])
        chosen = np.zeros(shape, bool)
        np.put_along_axis(
            chosen, np.argpartition(draws, guesses, axis=1)[:, :guesses], True, axis=1
        )
        kind = _draws(shape, seed, REPLACE, first)
        words = special.words[
            (_draws(shape, seed, WORD, first) * len(special.words)).astype(np.int64)
        ]
        replaced = np.where(
            kind < MASKED, special.mask, np.where(kind < MASKED + KEPT, tokens, words)
        )
        return np.where(chosen, replaced, tokens), np.where(chosen, tokens, IGNORED)


def specials_of(tokenizer: Tokenizer) -> Specials:
    """Looks up a tokenizer's special tokens. Raises DataError if a token that masked models need is
    missing.
    """
    ids = {}
    for role, names in SPECIALS.items():
        known = [tokenizer.vocabulary[name] for name in names if name in tokenizer.vocabulary]
        if not known:
            why = f"its vocabulary does not contain any of these tokens: {', '.join(names)}"
            remedy = "set data.tokenizer to one with this token, or to bpe"
            raise DataError(
                f"has no {role} token, which a masked model needs",
                where=tokenizer.where,
                why=why,
                next=remedy,
            )
        ids[role] = known[0]
    words = [
        id_
        for token, id_ in tokenizer.vocabulary.items()
        if id_ not in ids.values() and not _is_special(token)
    ]
    ends = [
        id_
        for token, id_ in tokenizer.vocabulary.items()
        if token.replace("Ċ", "\n").strip(" Ġ\u2581") in SENTENCE_ENDS
    ]
    return Specials(
        **ids, words=np.sort(np.array(words, np.int64)), sentence_ends=np.array(ends, np.int64)
    )


def _draws(shape: tuple[int, ...], seed: int, purpose: int, first: int) -> npt.NDArray[np.float64]:
    """Returns a random number in [0, 1) for each token of the global samples from `first`
    onwards.
    """
    rows = mix(np.arange(first, first + shape[0], dtype=np.uint64) ^ np.uint64(fold(seed, purpose)))
    cells = mix(rows[:, None] ^ np.arange(shape[1], dtype=np.uint64)[None, :])
    return (cells >> np.uint64(11)).astype(np.float64) / 2**53


def _uniform(*key: int) -> float:
    return (fold(*key) >> 11) / 2**53


def _is_special(token: str) -> bool:
    return (token.startswith("[") and token.endswith("]") and token[1:-1].isupper()) or (
        token.startswith("<") and token.endswith(">")
    )
