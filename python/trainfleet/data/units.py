"""The work on one unit: read, encode, check against the reference, write, commit."""

from __future__ import annotations

import zlib
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import numpy as np

from ..config.types import Data
from . import manifest
from .documents import in_batches, read_unit
from .encoders import Encoder, Ids, Offsets
from .formats import Document
from .manifest import SPLITS, TRAIN, VALIDATION, Preparation, UnitRecord, shard_path
from .progress import Meter
from .shards import ShardWriter
from .sources import Unit
from .tokenizer import FILE, Tokenizer, described, load

CHECKED_CHARACTERS = 4096  # of each batch, so that about 0.1 % of the text is encoded twice


class Mismatch(Exception):
    """The fast encoder and the reference disagree on the text that begins so."""


class UnitWork:
    """Tokenizes units of one dataset; what it commits for a unit is the same on every node and at every try."""

    def __init__(self, data: Data, preparation: Preparation, folder: Path) -> None:
        self.data, self.preparation, self.folder = data, preparation, folder

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load(self.folder / FILE)

    def do(self, unit: Unit, meter: Meter) -> None:
        """Commits one unit; with the reference encoder if the fast one turns out to be wrong on it, and says so."""
        notes, before = tuple(self.tokenizer.notes), meter.counts
        try:
            record = self._encode(unit, meter, self.tokenizer.encoder, notes)
        except Mismatch as mismatch:
            meter.counts = before
            note = f"unit {unit.index}: {self.tokenizer.backend} is wrong on {mismatch}: done again with the reference"
            print(note, flush=True)
            record = self._encode(unit, meter, self.tokenizer.reference, (*notes, note))
        manifest.write_record(self.folder, record)
        meter.add(units=1)

    def _encode(self, unit: Unit, meter: Meter, encoder: Encoder, notes: tuple[str, ...]) -> UnitRecord:
        text_bytes = documents = checked = done = 0
        text_field = self.data.text_field_of(unit.source)
        with ExitStack() as stack:
            writers = {split: stack.enter_context(self._writer(split, unit)) for split in SPLITS}
            for number, batch in enumerate(in_batches(read_unit(unit, text_field))):
                tokens = 0
                for split, texts in divide(batch, self.data.validation_fraction).items():
                    ids, offsets = encoder.encode(texts)
                    checked += self._check(texts, ids, offsets, encoder, unit.index + number)
                    tokens += writers[split].add(ids, offsets)
                text_bytes, documents = text_bytes + sum(document.size for document in batch), documents + len(batch)
                consumed = min(sum(document.consumed for document in batch), unit.bytes - done)
                done += consumed
                meter.add(bytes=consumed, documents=len(batch), tokens=tokens)
            shards = {split: writers[split].commit() for split in SPLITS}
        meter.add(bytes=unit.bytes - done)  # headers, blank lines, what a decompressor read ahead
        return UnitRecord(
            index=unit.index,
            preparation=self.preparation.identity,
            bytes=unit.bytes,
            text_bytes=text_bytes,
            documents=documents,
            backend=described(encoder),
            checked=checked,
            notes=notes,
            train=shards[TRAIN],
            validation=shards[VALIDATION],
        )

    def _writer(self, split: str, unit: Unit) -> ShardWriter:
        return ShardWriter(self.folder, shard_path(split, unit.index), self.preparation.dtype, self.tokenizer.end_of_document)

    def _check(self, texts: list[str], ids: Ids, offsets: Offsets, encoder: Encoder, seed: int) -> int:
        """Compares one document of a batch, or the start of a long one, with the reference; returns how many were compared."""
        if encoder is self.tokenizer.reference:
            return 0
        index = zlib.crc32(seed.to_bytes(8, "little")) % len(texts)
        text, found = texts[index], ids[offsets[index] : offsets[index + 1]]
        if len(text) > CHECKED_CHARACTERS:
            text = text[:CHECKED_CHARACTERS]
            found, _ = encoder.encode([text])
        expected, _ = self.tokenizer.reference.encode([text])
        if not np.array_equal(found, expected):
            raise Mismatch(repr(text[:40]))
        return 1


def divide(batch: list[Document], validation_fraction: float) -> dict[str, list[str]]:
    """The texts of each split that the batch has any for.

    The text's own hash decides, so a document stays in its split when others are added, and copies stay together.
    """
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    bound = int(validation_fraction * 2**32)
    for document in batch:
        texts[VALIDATION if document.hash < bound else TRAIN].append(document.text)
    return {split: found for split, found in texts.items() if found}
