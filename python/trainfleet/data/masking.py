"""A dataset as masked language models see it: dynamic masking of RoBERTa's packed sentences and of
BERT's sentence pairs.

What is masked in global sample g is a function of (seed, g) alone, drawn from a counter and not
from a generator that somebody holds: any world size, resume or prefetch masks the same tokens, and
g's next epoch masks others. Every row is full, so that no work is spent on padding, and has as many
tokens to guess as any other, so that the mean over a batch is the mean of its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..config.vocabulary import SPECIALS
from ..trust.errors import DataError
from .dataset import Dataset
from .shuffling import fold, mix
from .tokenizer import Tokenizer, load

Rows = npt.NDArray[np.int64]
IGNORED = -100  # the target of a token that is not to be guessed (torch.nn.CrossEntropyLoss)
SELECT, REPLACE, WORD, PAIR, CUT = range(5)  # what a draw is for
# of the chosen tokens; the others become another word (Devlin et al. 2018, section 3.1)
MASKED, KEPT = (0.8, 0.1)
SENTENCE_ENDS = (".", "!", "?", "。", "！", "？", "\n")


@dataclass(frozen=True)
class Specials:
    """The ids that a masked model's input is built with, which words may replace a masked one, and
    which ids end a sentence.
    """

    start: int
    separator: int
    mask: int
    padding: int
    words: npt.NDArray[np.int64]
    sentence_ends: npt.NDArray[np.int64]


class Masked:
    """Samples of a dataset with tokens hidden. `pairs`: as BERT has them, else as RoBERTa has them.

    `guesses` says how many tokens of a sample of some length are to be guessed.
    """

    def __init__(self, dataset: Dataset, pairs: bool, guesses: Callable[[int], int]) -> None:
        self.dataset, self.pairs, self.guesses = dataset, pairs, guesses
        self.specials = specials_of(load(dataset.folder))
        self.added = 3 if pairs else 2  # special tokens in a row

    @property
    def end_of_document(self) -> int:
        return self.dataset.end_of_document

    def samples(self, split: str, sequence_length: int) -> int:
        """How many samples of that length one epoch of a split has."""
        return self.dataset.samples(split, sequence_length - self.added)

    def batch(self, split: str, first: int, count: int, sequence_length: int, seed: int) -> Rows:
        """Samples [first, first + count) of the global order, [count, sequence_length, 2 or 3]:
        token, target and segment.

        The target of the first token, which is never hidden, says for a pair whether B is from
        elsewhere.
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
        """RoBERTa's FULL-SENTENCES: rows that run on across documents, an end between them (Liu et
        al. 2019, section 4.2).
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
        """BERT's [CLS] A [SEP] B [SEP]: tokens, segments, labels; in half of the rows B is from
        half an epoch further on (1).

        A ends with a sentence of the row's middle half where one ends there (Devlin et al. 2018,
        section 3.1).
        """
        room = length - 3
        rows = self.dataset.batch(split, first, count, room, seed)[:, :room]
        others = self.dataset.rows(
            split, first + self.dataset.samples(split, room) // 2, count, room, seed
        )
        tokens, segments = np.empty((count, length), np.int64), np.zeros((count, length), np.int64)
        labels = np.array(
            [_uniform(seed, PAIR, first + row) < 0.5 for row in range(count)], np.int64
        )
        for row, text in enumerate(rows):
            cut = self._cut(text, _uniform(seed, CUT, first + row))
            second = (others if labels[row] else rows)[row, cut:room]
            edges = [self.specials.start], [self.specials.separator]
            tokens[row] = np.concatenate([edges[0], text[:cut], edges[1], second, edges[1]])
            segments[row, cut + 2 :] = 1
        return tokens, segments, labels

    def _cut(self, text: npt.NDArray[np.int64], draw: float) -> int:
        """Where the first part ends: after a sentence of the middle half if one ends there, else at
        any token of it.
        """
        low, high = max(1, len(text) // 4), max(2, len(text) * 3 // 4)
        ends = np.flatnonzero(np.isin(text[low - 1 : high - 1], self.specials.sentence_ends)) + low
        return int(ends[int(draw * len(ends))]) if len(ends) else low + int(draw * (high - low))

    def _hide(self, tokens: Rows, first: int, seed: int) -> tuple[Rows, Rows]:
        """Chooses tokens to guess; most become the mask, some another word, some stay. The tokens
        then, and the targets.
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
        draws[:, 0] += 1  # chosen last of all: what it is to say is not a word
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
    """DataError when the tokenizer lacks one of the special tokens that masked models need."""
    ids = {}
    for role, names in SPECIALS.items():
        known = [tokenizer.vocabulary[name] for name in names if name in tokenizer.vocabulary]
        if not known:
            why = f"it has none of {', '.join(names)}"
            remedy = "set data.tokenizer to one that has it, or to bpe"
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
    """Numbers in [0, 1) for each token of the global samples from `first` on."""
    rows = mix(np.arange(first, first + shape[0], dtype=np.uint64) ^ np.uint64(fold(seed, purpose)))
    cells = mix(rows[:, None] ^ np.arange(shape[1], dtype=np.uint64)[None, :])
    return (cells >> np.uint64(11)).astype(np.float64) / 2**53


def _uniform(*key: int) -> float:
    return (fold(*key) >> 11) / 2**53


def _is_special(token: str) -> bool:
    return (token.startswith("[") and token.endswith("]") and token[1:-1].isupper()) or (
        token.startswith("<") and token.endswith(">")
    )
