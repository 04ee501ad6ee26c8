"""Trains a byte-level BPE tokenizer on a bounded sample of the data, which is independent of the
node count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain

from ..config.types import Data
from ..config.vocabulary import END_OF_DOCUMENT, MASK, PADDING
from ..trust.errors import DataError
from ..trust.untrusted_input import MEBIBYTE
from .bad_records import STOP, Skipped
from .documents import read_piece
from .sources import UnitPlan

SMALLEST = 300  # minimum data.vocab_size
SAMPLE_BYTES = 10 * MEBIBYTE
# Files are skipped until this many sampled bytes have accumulated, so at most SAMPLE_BYTES / GRAIN
# files are read.
GRAIN = MEBIBYTE // 16
# Longer words are split for training, because merge time grows with the square of the word length.
LONG_WORD = re.compile(r"(\S{1000}|\s{1000})")
LONGEST = MEBIBYTE  # maximum characters to use per document

# Pre-tokenizer pattern of Llama 3 and GPT-4: words with an optional leading space or punctuation
# mark, numbers of up to three digits, and line breaks
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train(data: Data, plan: UnitPlan) -> str:
    """Trains a BPE tokenizer with `data.vocab_size` tokens and returns its tokenizer.json. The
    end-of-document, padding and mask tokens get the first ids.

    Raises DataError if there is no text, or if the text is too short or too repetitive for the
    vocabulary size.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    splitter = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [splitter, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=data.vocab_size,
        special_tokens=[END_OF_DOCUMENT, PADDING, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = sample(data, plan)
    if (first := next(texts, None)) is None:
        raise DataError(
            "the files contain no text",
            where="data.sources",
            next="run make plan to see which files are skipped",
        )
    tokenizer.train_from_iterator(chain([first], texts), trainer)
    if (size := tokenizer.get_vocab_size()) < data.vocab_size:
        what = f"the text yields a vocabulary of only {size} tokens, not {data.vocab_size}"
        other = (
            f"set data.vocab_size to at most {size}"
            if size >= SMALLEST
            else "set data.tokenizer to a tokenizer.json"
        )
        raise DataError(what, where="data.vocab_size", next=f"add text to data.sources, or {other}")
    return str(tokenizer.to_str(pretty=True))


def sample(data: Data, plan: UnitPlan, limit: int = SAMPLE_BYTES) -> Iterator[str]:
    """Yields about `limit` bytes of text sampled evenly across the data, or all of it if it is
    smaller.
    """
    share, due = min(1.0, limit / plan.bytes), 0.0
    for source, piece in ((unit.source, piece) for unit in plan.units for piece in unit.pieces):
        due += piece.bytes * share
        if due < GRAIN and share < 1:
            continue
        for document in read_piece(
            piece, data.text_field_of(source), None if data.on_bad_record == STOP else Skipped()
        ):
            yield from filter(None, LONG_WORD.split(document.text[:LONGEST]))
            due -= len(document.text)
            if due <= 0 and share < 1:
                break
