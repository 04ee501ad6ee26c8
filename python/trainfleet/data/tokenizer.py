"""A tokenizer as the rest of the program sees it: texts to ids, ids to text, and what a dataset has to know about it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.families import FAMILIES
from ..config.types import Data
from ..errors import DataError
from .conversion import convert

if TYPE_CHECKING:
    from .encoders import Encoder, HuggingFace, Ids, Offsets

TRAINED = "bpe"  # the value of data.tokenizer that means: train one here
FILE = "tokenizer.json"
END_OF_DOCUMENT = "<|endoftext|>"
ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "<|eos|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
PADDING, MASK = "<|pad|>", "<|mask|>"  # what a tokenizer trained here has beside the end, so that it suits masked models too
SPECIALS = {  # role in the input of a masked model → the names that tokenizers have for it
    "start": ("[CLS]", "<s>", "<|startoftext|>", END_OF_DOCUMENT),
    "separator": ("[SEP]", "</s>", END_OF_DOCUMENT),
    "mask": ("[MASK]", "<mask>", MASK),
    "padding": ("[PAD]", "<pad>", PADDING, END_OF_DOCUMENT),
}


class Tokenizer:
    """One tokenizer.json. It is parsed when its vocabulary is asked for, and a library loads it when something is encoded."""

    def __init__(self, definition: str, where: str, end_token: str | None = None) -> None:
        self.definition, self.where, self.end_token = definition, where, end_token
        self.sha256 = hashlib.sha256(definition.encode()).hexdigest()

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Token to id. DataError when the definition is broken."""
        return _vocabulary(_parse(self.definition, self.where), self.where)

    @cached_property
    def vocabulary_size(self) -> int:
        """The largest id plus one: what an embedding must have at least."""
        return max(self.vocabulary.values()) + 1

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]:
        """The ids of all texts in one uint32 array, and len(texts) + 1 bounds; special tokens in a text are plain text."""
        return self.encoder.encode(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return str(self.reference.tokenizer.decode(list(map(int, ids)), skip_special_tokens=True))

    @cached_property
    def end_of_document(self) -> int:
        """The id that ends every document: the tokenizer's own end token. DataError when it has none that is known."""
        names = (self.end_token,) if self.end_token else ENDS
        for token in names:
            if token in self.vocabulary:
                return self.vocabulary[token]
        why = f"none of {', '.join(names)} is in its vocabulary"
        raise DataError(
            "has no end-of-document token", where=self.where, why=why, next="name one as eos_token in tokenizer_config.json"
        )

    @cached_property
    def reference(self) -> HuggingFace:
        from .encoders import open_reference

        return open_reference(self.definition)

    @cached_property
    def encoder(self) -> Encoder:
        """The fastest library that is exact on this tokenizer."""
        return self._opened[0]

    def renew(self) -> None:
        """Has the encoder opened anew when it is next used, without what it remembers of the texts so far."""
        for name in ("encoder", "_opened"):
            self.__dict__.pop(name, None)

    @property
    def backend(self) -> str:
        """The library that encodes."""
        return described(self.encoder)

    @property
    def notes(self) -> list[str]:
        """Why faster libraries were passed over, a line each."""
        return self._opened[1]

    @cached_property
    def _opened(self) -> tuple[Encoder, list[str]]:
        from .encoders import open_encoder

        return open_encoder(self.definition, self.reference)


def described(encoder: Encoder) -> str:
    """Name and version of a library that encodes."""
    return f"{encoder.name} {version(encoder.package)}"


class StreamDecoder:
    """Text from ids that come one at a time; a character whose bytes are not all there yet is held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers.decoders import DecodeStream

        self.tokenizer = tokenizer.reference.tokenizer
        self.stream = DecodeStream(skip_special_tokens=True)

    def push(self, id: int) -> str:
        """The text that this id completes, "" while it completes none."""
        return self.stream.step(self.tokenizer, int(id)) or ""


def load(path: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json, in a folder that has one, or in one of the other forms that conversion.py reads.

    DataError when it is missing or broken.
    """
    file = path / FILE if path.is_dir() else path
    try:
        if not (file.suffix == ".json" and file.is_file()) and (definition := convert(path)) is not None:
            return Tokenizer(definition, str(path), _end_token(path))
        return Tokenizer(file.read_text(encoding="utf-8"), str(file), _end_token(path))
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        remedy = f"set data.tokenizer to `{TRAINED}` or a tokenizer.json"
        raise DataError("can't be read as a tokenizer", where=str(file), why=why, next=remedy) from error


def _end_token(path: Path) -> str | None:
    """The end token that a Hugging Face folder's tokenizer_config.json names."""
    settings = (path if path.is_dir() else path.parent) / "tokenizer_config.json"
    token = json.loads(settings.read_text(encoding="utf-8")).get("eos_token") if settings.exists() else None
    return token["content"] if isinstance(token, dict) else token


def vocabulary_size_of(data: Data) -> int:
    """How many ids the tokenizer of this config has (the largest, plus one), without loading a library for it."""
    return data.vocabulary_size if data.tokenizer == TRAINED else load(Path(data.tokenizer)).vocabulary_size


def lack_for(data: Data, family: str) -> str | None:
    """Which special token of a masked model the tokenizer of this config lacks, or None.

    RoBERTa counts positions from the row after its padding token's id, so that a folder of it is only right where this is 1.
    """
    if FAMILIES[family].causal or data.tokenizer == TRAINED:
        return None
    vocabulary = load(Path(data.tokenizer)).vocabulary
    for role, names in SPECIALS.items():
        if not any(name in vocabulary for name in names):
            return f"has no {role} token, which model.family {family} needs: one of {', '.join(names)}"
    padding = next(vocabulary[name] for name in SPECIALS["padding"] if name in vocabulary)
    if (rows := FAMILIES[family].positions_from) and padding != rows - 1:
        return f"has its padding token at {padding}; model.family {family} needs it at {rows - 1}; model.family bert does not"
    return None


def _parse(definition: str, where: str) -> dict[str, Any]:
    try:
        content = json.loads(definition)
        if not isinstance(content["model"]["vocab"], dict | list):
            raise TypeError("its vocabulary is no table")
        return dict(content)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            "is no tokenizer.json", where=where, why=f"{type(error).__name__}: {error}", next="set data.tokenizer to another one"
        ) from error


def _vocabulary(content: dict[str, Any], where: str) -> dict[str, int]:
    """Token to id, added tokens included."""
    vocab = content["model"]["vocab"]
    tokens = dict(vocab) if isinstance(vocab, dict) else {entry[0]: id for id, entry in enumerate(vocab)}  # unigram: a list
    tokens |= {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    if not tokens:
        raise DataError("has an empty vocabulary", where=where, next="set data.tokenizer to another one")
    return tokens
