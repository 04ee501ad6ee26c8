"""Tokenizes a unit: reads and encodes its texts, checks them against the reference encoder, and
writes and commits the result.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from ..config.types import Data
from ..config.vocabulary import FILE
from . import manifest
from .bad_records import STOP, Skipped
from .chat import REWRITES, ChatEncoder, ChatTemplate
from .dataset_store import DatasetStore
from .documents import in_batches, left_out, read_unit, rendered
from .encoders import Ids, Offsets, TextEncoder
from .formats import Document
from .manifest import SPLITS, TRAIN, VALIDATION, Preparation, UnitRecord, shard_path
from .progress import Meter
from .shards import ShardWriter
from .source_files import told
from .sources import Unit
from .tokenizer import described, load

CUT_TOKENS = 16
# Number of text bytes after which the encoder is reopened, because fastokens' word cache grows to
# 100 MB
RENEWED = 2**27
# Number of characters to check per batch, so that about 0.1 % of the text is encoded twice
CHECKED_CHARACTERS = 1024
LONG = 2**24  # characters; longer documents are encoded in parts
PART = 2**20
AROUND = 256  # characters to test on each side of a cut
SEARCHED = 2**16
TRIED = 8
WORD_END = re.compile(r"(?<=\S)\n(?=[^\W\d_])|(?<=[^\W\d_])(?= [^\W\d_])")


class Mismatch(Exception):
    """Raised if the fast encoder and the reference disagree on a text. The message is the start of
    the text.
    """


@dataclass(frozen=True)
class Draft:
    """Encoded but uncommitted unit. Closing `open_files` before a commit removes its writers'
    files.
    """

    record: UnitRecord
    writers: dict[str, ShardWriter]
    open_files: ExitStack


class UnitWork:
    """Worker that tokenizes the units of one dataset. For a given unit, it commits the same bytes
    on every node and in every attempt.

    A thread writes a unit's files to disk while the next unit is being encoded. With small units or
    a slow file system, waiting for fsync would take longer than encoding. `flush` waits for the
    last commit.
    """

    def __init__(
        self, data: Data, preparation: Preparation, store: DatasetStore, meter: Meter
    ) -> None:
        self.data, self.preparation, self.store, self.meter = data, preparation, store, meter
        self.tokenizer = load(store.folder / FILE)
        self.template = ChatTemplate.read(store.folder) if data.conversations else None
        self.chat = ChatEncoder(self.tokenizer.definition) if data.conversations else None
        self.encoded = 0  # bytes of text encoded since the encoder was opened
        self.committer, self.pending = ThreadPoolExecutor(1), list[Future[None]]()

    def do(self, unit: Unit) -> None:
        """Encodes one unit and starts to commit it. If the fast encoder gets a text wrong, prints a
        note and re-encodes the whole unit with the reference.
        """
        notes, before = tuple(() if self.chat else self.tokenizer.notes), self.meter.counts
        try:
            draft = self._encode(unit, self.chat or self.tokenizer.encoder, notes)
        except Mismatch as mismatch:
            self.meter.counts = before
            note = (
                f"unit {unit.index}: {self.tokenizer.backend} encodes {mismatch} wrongly; "
                "encoded again with the reference"
            )
            print(note)
            draft = self._encode(unit, self.tokenizer.reference, (*notes, note))
        self.encoded += draft.record.text_bytes
        if self.encoded > RENEWED:
            self.tokenizer.renew()
            self.encoded = 0
        self.flush()
        self.pending.append(self.committer.submit(self._commit, draft))

    def flush(self) -> None:
        """Waits until all units are committed. Raises the error of a failed commit."""
        while self.pending:
            self.pending.pop().result()
            self.meter.add(units=1)

    def _commit(self, draft: Draft) -> None:
        with draft.open_files:
            shards = {
                split: writer.commit(draft.record.source) for split, writer in draft.writers.items()
            }
            record = replace(draft.record, train=shards[TRAIN], validation=shards[VALIDATION])
            manifest.write(self.store, manifest.unit_name(record.index), record)

    def _encode(self, unit: Unit, encoder: TextEncoder, notes: tuple[str, ...]) -> Draft:
        bad = Skipped(self.data.on_bad_record == STOP)
        with ExitStack() as stack:
            writers = {split: stack.enter_context(self._writer(split, unit)) for split in SPLITS}
            text_bytes, documents, checked = self._write(unit, encoder, writers, bad)
            files = stack.pop_all()
        bad.require_few(documents)
        record = UnitRecord(
            index=unit.index,
            source=unit.source,
            preparation=self.preparation.identity,
            bytes=unit.bytes,
            text_bytes=text_bytes,
            documents=documents,
            backend=described(encoder),
            checked=checked,
            notes=(
                *notes,
                *told(f"unit {unit.index}", bad.unread),
                *left_out(unit, documents),
                *([REWRITES] if self.template and self.template.rewrites else []),
            ),
            train=None,
            validation=None,
            skipped=bad.count,
            skipped_records=tuple(bad.listed),
        )
        return Draft(record, writers, files)

    def _write(
        self, unit: Unit, encoder: TextEncoder, writers: dict[str, ShardWriter], bad: Skipped
    ) -> tuple[int, int, int]:
        """Writes a unit's tokens. Returns the text size in bytes, and the numbers of documents and
        of documents compared with the reference.
        """
        text_bytes = documents = checked = done = 0
        for number, batch in enumerate(in_batches(self._documents(unit, bad))):
            read, tokens, compared = self._add(batch, encoder, writers, unit.index + number)
            text_bytes += sum(document.size for document in batch)
            documents, checked = documents + read, checked + compared
            consumed = min(sum(document.consumed for document in batch), unit.bytes - done)
            done += consumed
            self.meter.add(bytes_=consumed, documents=read, tokens=tokens)
        # Count the remaining bytes: headers, blank lines, and bytes that a decompressor has read
        # ahead.
        self.meter.add(bytes_=unit.bytes - done)
        return text_bytes, documents, checked

    def _add(
        self,
        batch: list[Document],
        encoder: TextEncoder,
        writers: dict[str, ShardWriter],
        seed: int,
    ) -> tuple[int, int, int]:
        """Writes a batch's tokens. Returns the numbers of texts, tokens and compared texts."""
        read = tokens = checked = 0
        parts = divide(batch, self.data.validation_fraction, self.preparation.few)
        for split, texts in parts.items():
            read += len(texts)
            # A long text is always the last of its batch.
            long = texts.pop() if len(texts[-1]) > LONG else ""
            if texts:
                ids, offsets = encoder.encode(texts)
                checked += self._check(texts, ids, offsets, encoder, seed)
                tokens += writers[split].add(ids, offsets)
            tokens += _add_long(long, encoder, writers[split]) if long else 0
        return read, tokens, checked

    def _documents(self, unit: Unit, bad: Skipped) -> Iterator[Document]:
        """Yields a unit's documents, with conversations rendered."""
        documents = read_unit(unit, self.data.text_field_of(unit.source), bad)
        if self.template is None:
            return documents
        self.template.rewrites = False
        return rendered(documents, self.template, bad)

    def _writer(self, split: str, unit: Unit) -> ShardWriter:
        preparation = self.preparation
        return ShardWriter(
            self.store,
            shard_path(split, unit.index),
            preparation.dtype,
            preparation.end_of_document,
        )

    def _check(
        self, texts: list[str], ids: Ids, offsets: Offsets, encoder: TextEncoder, seed: int
    ) -> int:
        """Compares one document of a batch, or the start of a long one, with the reference. Returns
        the number of documents that were compared.
        """
        reference = self.tokenizer.reference
        if encoder in (self.chat, reference):
            return 0
        index = zlib.crc32(seed.to_bytes(8, "little")) % len(texts)
        text, found = texts[index], ids[offsets[index] : offsets[index + 1]]
        expected, _ = reference.encode([text[:CHECKED_CHARACTERS]])
        if len(text) > CHECKED_CHARACTERS:  # the last tokens before the cut may differ
            begin = expected[:-CUT_TOKENS]
            if np.array_equal(found[: len(begin)], begin):
                return 1
            expected, _ = reference.encode([text])
        if not np.array_equal(found, expected):
            raise Mismatch(repr(text[:40]))
        return 1


def _add_long(text: str, encoder: TextEncoder, writer: ShardWriter) -> int:
    """Encodes and appends one long document in parts. Returns the number of tokens written."""
    tokens, waiting = 0, None
    for part in parts(text, encoder):
        if waiting is not None:
            tokens += writer.begin(encoder.encode([waiting])[0])
        waiting = part
    return tokens + writer.add(*encoder.encode([waiting or ""]))


def divide(batch: list[Document], validation_fraction: float, few: bool) -> dict[str, list[str]]:
    """Divides a batch's texts between the splits, omitting empty splits.

    A text's hash selects its split, so a document keeps its split when others are added, and
    duplicates share a split. If there are few documents, the last lines of each document go to the
    validation split instead.
    """
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    bound = int(validation_fraction * 2**32)
    for document in batch:
        text = document.text
        if few:
            at, last = len(text) - int(validation_fraction * len(text)), len(text.rstrip())
            end = text.find("\n", at, last) + 1 or text.find(" ", at, last) + 1 or len(text)
            texts[TRAIN].append(text[:end])
            texts[VALIDATION] += filter(None, [text[end:]])
        else:
            texts[VALIDATION if document.hash < bound else TRAIN].append(text)
    return {split: found for split, found in texts.items() if found}


def parts(text: str, encoder: TextEncoder) -> Iterator[str]:
    """Yields consecutive parts of a text that can be encoded separately, each with about PART
    characters. The concatenated ids of the parts are those of the whole text.

    A tokenizer's pre-tokenizer needs only a few characters around a position to decide whether a
    word ends there. A cut is therefore made only if encoding its surroundings in two parts gives
    the same ids as in one part. If no cut passes this test, the rest of the document is encoded as
    a whole. SentencePiece never passes, because it puts a space before every text.
    """
    start = 0
    while len(text) - start > 2 * PART and (cut := _find_cut(text, start + PART, encoder)):
        yield text[start:cut]
        start = cut
    yield text[start:]


def _find_cut(text: str, at: int, encoder: TextEncoder) -> int | None:
    """Returns the first valid cut at or after `at`, or None if the first TRIED candidates are
    invalid.
    """
    for number, found in enumerate(WORD_END.finditer(text, at, at + SEARCHED)):
        if number == TRIED:
            break
        if _can_cut(
            text[found.end() - AROUND : found.end()],
            text[found.end() : found.end() + AROUND],
            encoder,
        ):
            return found.end()
    return None


def _can_cut(before: str, after: str, encoder: TextEncoder) -> bool:
    ids, offsets = encoder.encode([before, after, before + after])
    return np.array_equal(ids[: offsets[2]], ids[offsets[2] :])
