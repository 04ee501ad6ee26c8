"""Batches for masked language models: dynamic masking, RoBERTa's packed sentences, BERT's sentence pairs.

What is masked in global sample g is a function of (seed, g) alone, drawn from a counter and not from a generator that somebody
holds: any world size, resume or prefetch masks the same tokens, and g's next epoch masks others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .dataset import Dataset
from .order import fold, mix
from .tokenizer import Tokenizer

Rows = npt.NDArray[np.int64]
IGNORED = -100  # the label of a token that is not to be predicted (torch.nn.CrossEntropyLoss)
SELECT, REPLACE, WORD, PAIR, SHORT, CUT = range(6)  # what a draw is for
SHORT_PAIRS = 0.1  # of BERT's pairs are cut to a random length, to know short inputs too (Devlin et al. 2018, appendix A.2)
SENTENCE_ENDS = (".", "!", "?", "。", "！", "？", "\n")
NAMES = {
    "start": ("[CLS]", "<s>", "<|startoftext|>"),
    "separator": ("[SEP]", "</s>", "<|endoftext|>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
    "padding": ("[PAD]", "<pad>", "<|endoftext|>"),
}


@dataclass(frozen=True)
class Specials:
    """The ids that a masked model's input is built with, which words may replace a masked one, and which ids end a sentence."""

    start: int
    separator: int
    mask: int
    padding: int
    words: npt.NDArray[np.int64]
    sentence_ends: npt.NDArray[np.int64]


@dataclass(frozen=True)
class MaskedBatch:
    """All int64 [count, length] but `next_sentence`, int64 [count]: 0 if the second part follows the first, 1 if it doesn't."""

    input_ids: Rows
    labels: Rows
    token_type_ids: Rows
    attention_mask: Rows
    next_sentence: npt.NDArray[np.int64] | None


def specials_of(tokenizer: Tokenizer) -> Specials:
    """DataError when the tokenizer lacks one of the special tokens that masked models need."""
    ids = {}
    for role, names in NAMES.items():
        known = [tokenizer.vocabulary[name] for name in names if name in tokenizer.vocabulary]
        if not known:
            why = f"it has none of {', '.join(names)}"
            raise DataError(f"has no {role} token, which a masked model needs", where=tokenizer.where, why=why)
        ids[role] = known[0]
    words = [id for token, id in tokenizer.vocabulary.items() if id not in ids.values() and not _is_special(token)]
    ends = [id for token, id in tokenizer.vocabulary.items() if token.replace("Ċ", "\n").strip(" Ġ\u2581") in SENTENCE_ENDS]
    return Specials(**ids, words=np.sort(np.array(words, np.int64)), sentence_ends=np.array(ends, np.int64))


def packed_batch(
    dataset: Dataset, specials: Specials, first: int, count: int, length: int, seed: int, fraction: float = 0.15
) -> MaskedBatch:
    """RoBERTa's FULL-SENTENCES: rows that run on across documents, an end between them (Liu et al. 2019, section 4.2)."""
    rows = dataset.batch("train", first, count, length - 2, seed)[:, : length - 2]
    edges = np.ones((count, 1), np.int64)
    ids = np.concatenate([edges * specials.start, rows, edges * specials.separator], axis=1)
    return _masked(ids, np.zeros_like(ids), np.ones_like(ids), None, specials, first, seed, fraction, dataset)


def pair_batch(
    dataset: Dataset, specials: Specials, first: int, count: int, length: int, seed: int, fraction: float = 0.15
) -> MaskedBatch:
    """BERT's [CLS] A [SEP] B [SEP], padded; in half of the rows B is from elsewhere (Devlin et al. 2018, section 3.1)."""
    room, end = length - 3, dataset.manifest.end_of_document
    ids = np.full((count, length), specials.padding, np.int64)
    types, attention, labels = np.zeros_like(ids), np.zeros_like(ids), np.zeros(count, np.int64)
    for row, tokens in enumerate(dataset.batch("train", first, count, room, seed)):
        number = first + row
        text = _longest_text(tokens[:room], end)
        if _uniform(seed, SHORT, number) < SHORT_PAIRS:
            text = text[: 2 + int(_uniform(seed, SHORT, number, 1) * (len(text) - 1))]
        cut = _cut(text, specials, _uniform(seed, CUT, number))
        second, labels[row] = text[cut:], _uniform(seed, PAIR, number) < 0.5
        if labels[row]:
            elsewhere = fold(seed, PAIR, number, 1) % dataset.samples("train", room)
            second = _longest_text(dataset.batch("train", elsewhere, 1, room, seed)[0, :room], end)[: room - cut]
        parts = np.concatenate([[specials.start], text[:cut], [specials.separator], second, [specials.separator]])
        ids[row, : len(parts)], attention[row, : len(parts)] = parts, 1
        types[row, cut + 2 : len(parts)] = 1
    return _masked(ids, types, attention, labels, specials, first, seed, fraction, dataset)


def _masked(
    ids: Rows,
    types: Rows,
    attention: Rows,
    next_sentence: npt.NDArray[np.int64] | None,
    specials: Specials,
    first: int,
    seed: int,
    fraction: float,
    dataset: Dataset,
) -> MaskedBatch:
    """Selects tokens to predict; of these 80 % become the mask, 10 % another word, and 10 % stay."""
    fixed = [specials.start, specials.separator, specials.padding, specials.mask, dataset.manifest.end_of_document]
    selected = (_draws(ids.shape, seed, SELECT, first) < fraction) & ~np.isin(ids, fixed)
    kind = _draws(ids.shape, seed, REPLACE, first)
    words = specials.words[(_draws(ids.shape, seed, WORD, first) * len(specials.words)).astype(np.int64)]
    labels = np.where(selected, ids, IGNORED)
    masked = np.where(selected & (kind < 0.8), specials.mask, np.where(selected & (kind >= 0.9), words, ids))
    return MaskedBatch(masked, labels, types, attention, next_sentence)


def _draws(shape: tuple[int, ...], seed: int, purpose: int, first: int) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) for each token of the global samples from `first` on."""
    rows = mix(np.arange(first, first + shape[0], dtype=np.uint64) ^ np.uint64(fold(seed, purpose)))
    cells = mix(rows[:, None] ^ np.arange(shape[1], dtype=np.uint64)[None, :])
    return (cells >> np.uint64(11)).astype(np.float64) / 2**53


def _uniform(*key: int) -> float:
    return (fold(*key) >> 11) / 2**53


def _longest_text(tokens: npt.NDArray[np.int64], end: int) -> npt.NDArray[np.int64]:
    """The longest part of a window that is of one document; the whole window when no part has two tokens to make a pair of."""
    parts = [part[part != end] for part in np.split(tokens, np.flatnonzero(tokens == end))]
    longest = max(parts, key=len)
    return longest if len(longest) >= 2 else tokens


def _cut(text: npt.NDArray[np.int64], specials: Specials, draw: float) -> int:
    """Where the first part ends: after a sentence of the middle half if one ends there, else at any token of it."""
    low, high = max(1, len(text) // 4), max(2, len(text) * 3 // 4)
    ends = np.flatnonzero(np.isin(text[low - 1 : high - 1], specials.sentence_ends)) + low
    return int(ends[int(draw * len(ends))]) if len(ends) else low + int(draw * (high - low))


def _is_special(token: str) -> bool:
    return (token.startswith("[") and token.endswith("]") and token[1:-1].isupper()) or (
        token.startswith("<") and token.endswith(">")
    )
