"""Defines a tokenizer: texts to ids, ids to text, and the properties that a dataset needs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.types import Data
from ..config.vocabulary import TRAINED, Vocabulary, folder_named

if TYPE_CHECKING:
    from .encoders import HuggingFace, Ids, Offsets, TextEncoder


class Tokenizer(Vocabulary):
    """A tokenizer.json, loaded by a library on first use."""

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]:
        """Encodes all texts into one uint32 array, with len(texts) + 1 bounds; special tokens in a
        text are plain text.
        """
        from .encoders import blaming

        with blaming(self.where):
            return self.encoder.encode(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids to text, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        from .encoders import blaming

        with blaming(self.where):
            return str(
                self.reference.tokenizer.decode(list(map(int, ids)), skip_special_tokens=True)
            )

    @cached_property
    def reference(self) -> HuggingFace:
        from .encoders import open_reference

        return open_reference(self.definition, self.where)

    @cached_property
    def encoder(self) -> TextEncoder:
        """Opens the fastest library that gives exactly this tokenizer's tokens."""
        return self._opened[0]

    def renew(self) -> None:
        """Drops the encoder with its caches; the next use opens it again."""
        for name in ("encoder", "_opened"):
            self.__dict__.pop(name, None)

    @property
    def backend(self) -> str:
        """The library that encodes."""
        return described(self.encoder)

    @property
    def notes(self) -> list[str]:
        """Reasons why faster libraries were skipped, one line each."""
        return self._opened[1]

    @cached_property
    def _opened(self) -> tuple[TextEncoder, list[str]]:
        from .encoders import open_encoder

        return open_encoder(self.definition, self.reference)


def described(encoder: TextEncoder) -> str:
    """Returns name and version of a library that encodes."""
    from importlib.metadata import version  # takes 14 ms

    return f"{encoder.name} {version(encoder.package)}"


class StreamDecoder:
    """Decodes ids that arrive one at a time; holds back a character until all its bytes are
    there.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers.decoders import DecodeStream

        self.tokenizer = tokenizer.reference.tokenizer
        self.stream = DecodeStream(skip_special_tokens=True)

    def push(self, id_: int) -> str:
        """Returns the text that this id completes, or ""."""
        return self.stream.step(self.tokenizer, int(id_)) or ""


def require_use(data: Data) -> None:
    """Raises DataError if data.tokenizer can't encode text; the config's check reads only its table
    of tokens.
    """
    if data.tokenizer != TRAINED:
        assert load(folder_named(data)).reference


def load(path: Path) -> Tokenizer:
    """Loads the tokenizer in a tokenizer.json, in a folder that has one, or in one of the other
    forms that conversion.py reads.

    Raises DataError if it is missing or broken.
    """
    return Tokenizer.read(path)
