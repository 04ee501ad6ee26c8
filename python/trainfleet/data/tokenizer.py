"""Tokenizer that encodes texts, decodes ids, and exposes the properties that a dataset needs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..config.types import Data
from ..config.vocabulary import TRAINED, Vocabulary, folder_named
from .chat import ChatTemplate

if TYPE_CHECKING:
    from .encoders import HuggingFace, Ids, Offsets, TextEncoder


class Tokenizer(Vocabulary):
    """Tokenizer from a tokenizer.json, loaded into an encoder library on first use."""

    def encode(self, texts: list[str]) -> tuple[Ids, Offsets]:
        """Encodes all texts into one uint32 array, with len(texts) + 1 offsets. Special tokens in a
        text are encoded as plain text.
        """
        from .encoders import blaming

        with blaming(self.where):
            return self.encoder.encode(texts)

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes ids to text, without special tokens. Invalid UTF-8 bytes become U+FFFD."""
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
        """Fastest library that reproduces this tokenizer's ids exactly."""
        return self._opened[0]

    def renew(self) -> None:
        """Drops the encoder and its caches. The next use reopens the encoder."""
        for name in ("encoder", "_opened"):
            self.__dict__.pop(name, None)

    @property
    def backend(self) -> str:
        """Name and version of the library that encodes texts."""
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
    """Returns the name and version of the library behind an encoder."""
    from importlib.metadata import version  # imported here, because the import takes 14 ms

    return f"{encoder.name} {version(encoder.package)}"


class StreamDecoder:
    """Streaming decoder for ids that arrive one at a time. Buffers a character until all its bytes
    have arrived.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers.decoders import DecodeStream

        self.tokenizer = tokenizer.reference.tokenizer
        self.stream = DecodeStream(skip_special_tokens=True)

    def push(self, id_: int) -> str:
        """Returns the text that this id completes, or "" if a character is still incomplete."""
        return self.stream.step(self.tokenizer, int(id_)) or ""


def require_use(data: Data) -> None:
    """Raises DataError if data.tokenizer can't encode text. The config checks don't cover this,
    because they read only its vocabulary.
    """
    if data.tokenizer != TRAINED:
        assert load(folder_named(data)).reference
    if data.conversations:
        ChatTemplate.read(folder_named(data))


def load(path: Path) -> Tokenizer:
    """Loads a tokenizer from a tokenizer.json, from a folder that contains one, or from another
    format that conversion.py reads.

    Raises DataError if the tokenizer is missing or broken.
    """
    return Tokenizer.read(path)
