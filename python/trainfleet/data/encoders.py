"""Common interface to tokenizer libraries, fastest first. Hugging Face `tokenizers` is the
reference.

A faster library is used only if it produces the same ids as the reference. It must pass an
adversarial check when it is opened, and then a spot check of every batch (work_units.py). All
libraries encode documents as plain text, so `<|endoftext|>` inside a document does not end it.

For BERT's WordPiece, the reference encodes each distinct word once, and a table caches the ids.
BERT's pre-tokenizer ends a word at every ASCII space, line break and punctuation mark. Its
normalizer never looks past these characters: a leading combining mark affects at most the preceding
punctuation mark, which stays unchanged. The ids of a text are therefore the concatenated ids of its
words. Without the table, `tokenizers` encodes 1 to 2 MB/s, and no faster library matches it exactly
for WordPiece.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..trust.errors import DataError
from ..trust.untrusted_input import printable, shortened

Ids = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]

WORD = re.compile(r"[^ \t\n\r!-/:-@\[-`{-~]+|[!-/:-@\[-`{-~]")
KEPT = 2**18  # maximum words in the table, about 50 MB
KEPT_IDS = 2**21


class Reference(Protocol):
    """Interface to the encoder for words that are not in the table yet."""

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]: ...


class Words:
    """WordPiece encoder that caches the reference's ids for each word. Raises ValueError for any
    other kind of tokenizer.
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
            raise ValueError("its added tokens also match plain text")
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
        ends = np.concatenate([[0], np.cumsum(lengths)])  # offsets of each word's ids in the result
        indices = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)
        return self.ids[indices], ends[
            np.concatenate([[0], np.cumsum([len(part) for part in found], dtype=np.int64)])
        ]

    def _learn(self, words: list[str]) -> None:
        """Adds new words to the table, which is cleared first if it is full."""
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


class TextEncoder(Protocol):
    """Encoder interface. `encode` returns one flat array of ids, in which text i is
    ids[offsets[i]:offsets[i+1]]. `package` is the pip package that provides the encoder.
    """

    name: str
    package: str

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]: ...


class HuggingFace:
    """Reference encoder: slow but complete, from the library that defines the tokenizer.json
    format.
    """

    name = package = "tokenizers"

    def __init__(self, definition: str) -> None:
        import tokenizers

        self.tokenizer = tokenizers.Tokenizer.from_str(definition)
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]:
        lists = [
            encoding.ids
            for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]
        offsets = np.zeros(len(lists) + 1, np.int64)
        np.cumsum([len(ids) for ids in lists], out=offsets[1:])
        return np.fromiter(
            (id_ for ids in lists for id_ in ids), np.uint32, int(offsets[-1])
        ), offsets


class Fastokens:
    """BPE encoder in Rust with a hand-written pre-tokenizer and a word cache. It returns flat
    arrays without creating Python objects.
    """

    name = package = "fastokens"

    def __init__(self, definition: str) -> None:
        import fastokens

        self.tokenizer = fastokens.Tokenizer.from_json_str(definition)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]:
        ids, offsets = self.tokenizer.encode_batch_flat(texts, split_special_tokens=True)
        return np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.int64)


class Gigatoken:
    """BPE encoder in Rust. It can't encode special tokens as plain text, so it loads the tokenizer
    without them.
    """

    name = package = "gigatoken"

    def __init__(self, definition: str) -> None:
        import gigatoken

        self.tokenizer = gigatoken.Tokenizer.from_json(_without_special(definition))

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]:
        import awkward

        arrays = self.tokenizer.encode_batch(texts, parallel=False)
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(awkward.num(arrays).to_numpy(), out=offsets[1:])
        return awkward.flatten(arrays).to_numpy().astype(np.uint32, copy=False), offsets


ENCODERS: dict[str, Callable[[str], TextEncoder]] = {
    "fastokens": Fastokens,
    "gigatoken": Gigatoken,
    Words.name: lambda definition: Words(definition, HuggingFace(definition)),
    "tokenizers": HuggingFace,
}

HARD_TEXTS = [
    "",
    "\0",
    "plain words, and some more: it's we'll THEY'RE 1234567890",
    "\ttabs\n\n\n    four spaces  \r\n trailing   \n",
    "naïve café Ünïcödé ﬁ ﬀ Å e\u0301 \u00a0\u2003\u3000\u200b\u200d\ufeff",
    "日本語の文章。中文字符 한국어 텍스트 русский текст العربية हिन्दी ไทย",
    "😀👩‍👩‍👧‍👦🇩🇪 \U0001f3f4\U000e0067 \U00020000 \U0010ffff \ue000 \ud7ff",
    "\x01\x07\x1b[0m\x7f\x85 \u2028\u2029",
    # Characters from Unicode 15, 15.1, 16 and 17, because libraries support different versions
    "a\U00031350b \U0002ebf0c \U00010d4a1 \U000329abd \U000329ab's",
    "a" * 3000 + " " * 3000 + "!?" * 500 + "\n" * 300,
    "def f(x: int) -> int:\n    return x**2  # 'quoted' \"text\"\n",
    "http://example.org/a?b=c&d=%20e#f <p class='x'>&amp;</p> \\n {{}} $x_{i}^{2}$",
]


def open_encoder(
    definition: str, reference: HuggingFace, names: tuple[str, ...] = tuple(ENCODERS)
) -> tuple[TextEncoder, list[str]]:
    """Returns the first encoder in `names` that can load this tokenizer.json and matches the
    reference on the hard texts.

    Also returns one line per skipped library with the reason.
    """
    passed = list[str]()
    for name in names:
        if name == reference.name:
            break
        try:
            encoder = ENCODERS[name](definition)
        # Third-party loaders may raise any error for an unknown tokenizer.
        except Exception as error:
            passed.append(
                f"{name} can't load this tokenizer: "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
            )
            continue
        if (different := first_difference(encoder, reference, hard_texts(reference))) is None:
            return encoder, passed
        passed.append(
            f"{name} {version(encoder.package)} encodes {different!r} differently from tokenizers"
        )
    return reference, passed


def open_reference(definition: str, where: str) -> HuggingFace:
    """Opens the reference encoder for a tokenizer.json from `where`. Raises DataError if it can't
    load the tokenizer or encode text.
    """
    with blaming(where), muted():
        reference = HuggingFace(definition)
        reference.encode(
            HARD_TEXTS
            # A tokenizer without an unknown token loads, but fails on the first unknown word.
        )
        return reference


@contextmanager
def muted() -> Iterator[None]:
    """Redirects stderr to /dev/null, because the library prints a panic message before
    raising it.
    """
    try:
        kept = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def blaming(where: str) -> Iterator[None]:
    """Converts errors from `tokenizers` to a DataError that names `where`. The library raises a
    bare Exception, or PanicException, which is not a subclass of Exception.
    """
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        what, why = (
            "is not a tokenizer that the `tokenizers` library can use",
            shortened(printable(str(error)), 300),
        )
        raise DataError(
            what, where=where, why=why, next="set data.tokenizer to another tokenizer"
        ) from error


def hard_texts(reference: HuggingFace) -> list[str]:
    """Returns HARD_TEXTS, plus one text around each of the tokenizer's first added tokens."""
    added = reference.tokenizer.get_added_tokens_decoder()
    return HARD_TEXTS + [
        f"a {added[id_].content} b{added[id_].content}" for id_ in sorted(added)[:32]
    ]


def first_difference(encoder: TextEncoder, reference: TextEncoder, texts: list[str]) -> str | None:
    """Returns the start of the first text that the encoders encode differently, or None if they
    agree. If `encoder` fails, returns its error.
    """
    try:
        ids, offsets = encoder.encode(texts)
    except Exception as error:  # a failure counts as a difference
        return f"{type(error).__name__}: {error}"
    expected, bounds = reference.encode(texts)
    for i, text in enumerate(texts):
        if not np.array_equal(
            ids[offsets[i] : offsets[i + 1]], expected[bounds[i] : bounds[i + 1]]
        ):
            return text[:40]
    return None


def _without_special(definition: str) -> str:
    """Returns the tokenizer.json without special tokens, truncation and padding. Truncation and
    padding are meant for batches, not for documents.
    """
    content = json.loads(definition) | {"truncation": None, "padding": None}
    content["added_tokens"] = [
        token for token in content.get("added_tokens", []) if not token["special"]
    ]
    return json.dumps(content)
