"""Files that describe a dataset: its settings, the record of each unit, and the manifest.

    data/<name>/
      plan.json          settings, listing and tokenizer for all units, written first
      tokenizer.json     the tokenizer, converted to this format
      tokenizer_config.json  chat template, if the dataset is made of conversations
      train/00000.bin    token ids of unit 0's training documents    (same for validation/)
      train/00000.idx    bounds of these documents
      units/00000.json   record of unit 0, written last; without it, the unit is not done
      manifest.json      written when all units are done
      progress/ logs/    written by the nodes while they run
      lock               held by the running job

Every file is written by rename and never changed afterwards.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from ..config.types import Data
from ..config.vocabulary import TRAINED, folder_named
from ..run import run_folder
from ..trust import untrusted_input
from ..trust.errors import DataError, InputError
from ..trust.validation import Count, Pattern, Range, fit
from . import bad_records
from .chat import ChatTemplate
from .dataset_store import DatasetStore, open_store, read_all, remake
from .sources import UnitPlan, titles
from .tokenizer import Tokenizer, load

PLAN, MANIFEST = "plan.json", "manifest.json"
TRAIN, VALIDATION = "train", "validation"
SPLITS = (TRAIN, VALIDATION)
ITEM_BYTES: dict[str, int] = {"uint16": 2, "int32": 4}
LARGEST_UINT16 = 65_500
BLOCK = 2**22  # bytes of .bin per CRC-32, so that readers can verify individual blocks
LISTED = 1000  # maximum bad records listed in a manifest
# Number of length classes. Class i counts documents with [2^i, 2^(i+1)) tokens, up to the longest
# length that the format supports.
LENGTHS = 31
# Manifest fields that identify a dataset besides its shards, fields copied from the preparation,
# and fields summed over units
IDENTIFYING = ("tokenizer_sha256", "end_of_document", "dtype")
SHARED = (*IDENTIFYING, "settings", "listing", "vocabulary_size")
SUMMED = ("bytes", "text_bytes", "checked", "skipped")
FORMAT = 1  # version of the file format; all other versions are rejected
Digest = Annotated[str, Pattern("[0-9a-f]{64}")]
Stem = Annotated[str, Pattern("(train|validation)/[0-9]{5,9}")]
Dtype = Literal["uint16", "int32"]
T = TypeVar("T")


@dataclass(frozen=True)
class DatasetSettings:
    """Settings that determine a dataset's content. Source weights are excluded, because they affect
    only the reading order.
    """

    sources: tuple[str, ...]
    text_field: str
    tokenizer: str
    validation_fraction: Annotated[float, Range(0, 1)]
    conversations: bool = False


@dataclass(frozen=True)
class Preparation:
    """Content of plan.json: the settings that all units of a dataset share. Each unit's record
    contains its hash.
    """

    settings: DatasetSettings
    listing: Digest
    units: Count
    files: Count
    bytes: Count
    tokenizer_sha256: Digest
    vocabulary_size: Count
    end_of_document: Count
    dtype: Dtype
    few: bool  # whether there are so few texts that each is split between training and validation
    format: int = FORMAT

    @property
    def identity(self) -> str:
        return _hash(asdict(self))


@dataclass(frozen=True)
class Shard:
    """Pair of token files, with its path, checksums and bounds."""

    path: Stem  # relative to the dataset, without suffix
    source: Count  # index in data.sources
    tokens: Count
    documents: Count
    min_id: Count
    max_id: Count
    longest: Count  # length of the longest document, in tokens
    learned: Count  # number of learned tokens in conversations; otherwise 0
    lengths: tuple[int, ...]  # number of documents with [2^i, 2^(i+1)) tokens
    bin_sha256: Digest
    idx_sha256: Digest
    blocks: tuple[int, ...]  # CRC-32 of each BLOCK-sized part of .bin


@dataclass(frozen=True)
class UnitRecord:
    """Record of a finished unit. `bytes` is the size of its sources, and `text_bytes` the UTF-8
    size of its texts.
    """

    index: Count
    source: Count
    preparation: Digest
    bytes: Count
    text_bytes: Count
    documents: Count
    backend: str
    checked: Count  # number of documents compared with the reference encoder
    notes: tuple[str, ...]
    train: Shard | None
    validation: Shard | None
    skipped: Count = 0  # number of bad records (data.on_bad_record)
    skipped_records: tuple[str, ...] = ()  # the first bad records, with file, line and reason

    @property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(shard for shard in (self.train, self.validation) if shard)


@dataclass(frozen=True)
class Manifest:
    """Manifest of a finished dataset. `identity` is a hash of the shards, dtype and tokenizer that
    training uses, independent of how they were created.
    """

    identity: Digest
    settings: DatasetSettings
    listing: Digest
    tokenizer_sha256: Digest
    vocabulary_size: Count
    end_of_document: Count
    dtype: Dtype
    tokens: Count  # in the training split
    validation_tokens: Count
    documents: Count  # in both splits
    validation_documents: Count
    longest: Count
    bytes: Count
    text_bytes: Count
    backends: tuple[str, ...]
    checked: Count
    notes: tuple[str, ...]
    shards: tuple[Shard, ...]
    skipped: Count = 0  # number of bad records (data.on_bad_record)
    skipped_records: tuple[str, ...] = ()  # the first bad records, with file, line and reason
    format: int = FORMAT

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of documents with [2^i, 2^(i+1)) tokens, for each i from 0."""
        return tuple(map(sum, zip(*(shard.lengths for shard in self.shards), strict=True)))

    def split(self, name: str) -> tuple[Shard, ...]:
        """Returns the shards of one split in order."""
        return tuple(shard for shard in self.shards if shard.path.startswith(f"{name}/"))

    def by_source(self, name: str) -> dict[int, list[Shard]]:
        """Returns the shards of one split by source, or [] for a source without any."""
        found = defaultdict[int, list[Shard]](list)
        for shard in self.split(name):
            found[shard.source].append(shard)
        return found

    @property
    def source_tokens(self) -> dict[int, int]:
        """Number of training tokens from each source that has any."""
        parts = self.by_source(TRAIN).items()
        return {source: _total("tokens", shards) for source, shards in parts}


def settings_of(data: Data) -> DatasetSettings:
    """Returns the settings of the dataset that the config specifies. Raises DataError if the
    tokenizer can't be read.
    """
    trained = data.tokenizer == TRAINED
    tokenizer = (
        f"{TRAINED} {data.vocab_size}" if trained else f"sha256 {load(folder_named(data)).sha256}"
    )
    if data.conversations:
        tokenizer += f", chat template {_hash(ChatTemplate.read(folder_named(data)).definition)}"
    return DatasetSettings(
        titles(data), data.text_field, tokenizer, data.validation_fraction, data.conversations
    )


def preparation_of(data: Data, plan: UnitPlan, tokenizer: Tokenizer) -> Preparation:
    """Returns the preparation for the units of `plan`. Raises DataError if the tokenizer has no
    end-of-document token.
    """
    return Preparation(
        settings=settings_of(data),
        listing=plan.identity,
        units=len(plan.units),
        files=plan.files,
        bytes=plan.bytes,
        tokenizer_sha256=tokenizer.sha256,
        vocabulary_size=tokenizer.vocabulary_size,
        end_of_document=tokenizer.end_of_document,
        # Conversations need a signed type (chat.py).
        dtype="int32" if data.conversations else dtype_for(tokenizer.vocabulary_size),
        few=plan.few,
    )


def dtype_for(vocabulary_size: int) -> Dtype:
    """Returns the dtype of stored ids, by Megatron's rule: uint16 if the vocabulary is small
    enough, otherwise int32.
    """
    return "uint16" if vocabulary_size < LARGEST_UINT16 else "int32"


def store_of(data: Data, root: Path = run_folder.DATA) -> DatasetStore:
    """Returns the store of the config's dataset, which may not exist yet."""
    return open_store(root / data.name, data.tokenized_path)


def find(data: Data, root: Path = run_folder.DATA) -> Manifest | None:
    """Returns the manifest of the config's dataset, or None if the dataset is missing or
    unfinished. Raises DataError, listing the differences, if a dataset with this name was created
    with different settings.
    """
    store = store_of(data, root)
    manifest = read_manifest(store)
    if manifest is not None and (different := differences(manifest.settings, settings_of(data))):
        raise DataError(
            f"the dataset `{data.name}` was built with different settings: {'; '.join(different)}",
            where=store.describe(""),
            next=f"set another data.name, or remake this dataset: {remake(store)}",
        )
    if manifest is not None:
        require_few(manifest, data, store)
    return manifest


def skippable(data: Data) -> float:
    """Returns the maximum fraction of bad records that may be skipped."""
    return bad_records.share_of(data.on_bad_record)


def require_few(manifest: Manifest, data: Data, store: DatasetStore) -> None:
    """Raises DataError if more bad records were skipped than data.on_bad_record allows.

    data.on_bad_record is not part of the settings, because it does not affect the tokens of good
    records.
    """
    records = manifest.documents + manifest.skipped
    allowed = bad_records.most(data.on_bad_record, records)
    if manifest.skipped > allowed:
        share = math.ceil(1e6 * manifest.skipped / records) / 1e6
        raise DataError(
            f"{manifest.skipped:,} of {records:,} records are bad; data.on_bad_record "
            f"{data.on_bad_record} allows {allowed:,}",
            where=store.describe(""),
            why=f"first bad record: {manifest.skipped_records[0]}",
            next=f"correct them and run {remake(store)}; or add "
            f"SET='data.on_bad_record={share:.6f}'",
        )


def differences(made: DatasetSettings, wanted: DatasetSettings) -> list[str]:
    """Returns `data.<key> was <made>, is <wanted>` for each setting that differs."""
    pairs = (
        (field.name, getattr(made, field.name), getattr(wanted, field.name))
        for field in fields(DatasetSettings)
    )
    return [
        f"data.{name} was {_shown(old)}, is {_shown(new)}" for name, old, new in pairs if old != new
    ]


def read_manifest(store: DatasetStore) -> Manifest | None:
    """Returns a dataset's manifest, or None if the dataset is unfinished. Raises DataError if the
    manifest is inconsistent or has an unsupported format version.
    """
    manifest = _parse(Manifest, store.read(MANIFEST), store, MANIFEST)
    if manifest is not None and (fault := _contradiction(manifest)):
        what = "is invalid, or from another version of trainfleet"
        raise DataError(what, where=store.describe(MANIFEST), why=fault, next=remake(store))
    return manifest


def _contradiction(manifest: Manifest) -> str | None:
    """Returns the first inconsistency in a manifest, or None if it is consistent."""
    train, validation = manifest.split(TRAIN), manifest.split(VALIDATION)
    width = ITEM_BYTES[manifest.dtype]
    for key, stated, counted in (
        ("tokens", manifest.tokens, _total("tokens", train)),
        ("validation_tokens", manifest.validation_tokens, _total("tokens", validation)),
        ("documents", manifest.documents, _total("documents", manifest.shards)),
        ("shards", len({shard.path for shard in manifest.shards}), len(manifest.shards)),
    ):
        if stated != counted:
            return f"{key} is {stated:,}, but the shards have {counted:,}"
    if not manifest.tokens:
        return "tokens is 0: there is no text to train on"
    if not manifest.end_of_document < manifest.vocabulary_size:
        return (
            f"end_of_document is {manifest.end_of_document}, but there are "
            f"{manifest.vocabulary_size} tokens"
        )
    for shard in manifest.shards:
        if not 0 <= shard.source < len(manifest.settings.sources):
            return f"{shard.path} is of source {shard.source}, which is not among data.sources"
        if len(shard.blocks) != -(-shard.tokens * width // BLOCK) or len(shard.lengths) != LENGTHS:
            return (
                f"{shard.path} has {len(shard.blocks)} checksums and {len(shard.lengths)} "
                "length classes"
            )
    return None


def read_preparation(store: DatasetStore) -> Preparation | None:
    """Returns the preparation that a dataset was started with, or None if there is no plan.json.
    Raises DataError if plan.json has an unsupported format.
    """
    return _parse(Preparation, store.read(PLAN), store, PLAN)


def read_records(
    store: DatasetStore, indices: Sequence[int], preparation: Preparation
) -> dict[int, UnitRecord]:
    """Returns the records of the finished units among `indices`, by unit index. A unit is finished
    if its record belongs to this preparation and all its files exist.
    """
    sizes = {name: size for part in ("units", *SPLITS) for name, size in store.sizes(part).items()}
    names = [name for index in indices if (name := unit_name(index)) in sizes]
    records = [
        _parse(UnitRecord, content, store, name)
        for name, content in zip(names, read_all(store, names), strict=True)
    ]
    width = ITEM_BYTES[preparation.dtype]

    def whole(shard: Shard) -> bool:
        return (
            sizes.get(f"{shard.path}.bin") == shard.tokens * width and f"{shard.path}.idx" in sizes
        )

    return {
        record.index: record
        for record in records
        if record and record.preparation == preparation.identity and all(map(whole, record.shards))
    }


def write(store: DatasetStore, name: str, content: Preparation | UnitRecord | Manifest) -> None:
    store.write(name, (json.dumps(asdict(content), indent=1) + "\n").encode())


def unit_name(index: int) -> str:
    return f"units/{index:05d}.json"


def shard_path(split: str, index: int) -> str:
    return f"{split}/{index:05d}"


def assemble(
    preparation: Preparation, records: Iterable[UnitRecord], warnings: Iterable[str]
) -> Manifest:
    """Builds the manifest from the ordered records of all units and the warnings about their files.
    Raises DataError if there are no training documents.
    """
    done = list(records)
    train, validation = (
        [shard for record in done if (shard := getattr(record, split))] for split in SPLITS
    )
    notes = [*warnings, *chain.from_iterable(record.notes for record in done)]
    if not train:
        what, then = "has no document for training", "add text to data.sources"
        raise DataError(what, where="data.sources", why="; ".join(notes), next=then)
    bad = chain.from_iterable(record.skipped_records for record in done)
    shards = (*train, *validation)
    return Manifest(
        **_settled(preparation, done, shards),
        tokens=_total("tokens", train),
        validation_tokens=_total("tokens", validation),
        documents=_total("documents", shards),
        validation_documents=_total("documents", validation),
        longest=max(shard.longest for shard in shards),
        backends=tuple(sorted({record.backend for record in done})),
        notes=tuple(dict.fromkeys(notes)),
        shards=shards,
        skipped_records=(*islice(bad, LISTED),),
    )


def _settled(
    preparation: Preparation, done: list[UnitRecord], shards: Iterable[Shard]
) -> dict[str, Any]:
    """Returns a manifest's identity, its preparation's fields, and the sums over its units."""
    known = {key: getattr(preparation, key) for key in SHARED}
    files = [(shard.path, shard.bin_sha256, shard.idx_sha256) for shard in shards]
    identity = _hash({"shards": files, **{key: known[key] for key in IDENTIFYING}})
    return {"identity": identity, **known, **{key: _total(key, done) for key in SUMMED}}


def _total(key: str, parts: Iterable[Shard | UnitRecord]) -> int:
    return sum(getattr(part, key) for part in parts)


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _shown(value: Any) -> str:
    return f"`{', '.join(value)}`" if isinstance(value, tuple) else f"`{value}`"


def _parse(kind: type[T], content: bytes | None, store: DatasetStore, name: str) -> T | None:
    """Parses JSON into a dataclass. Returns None if the file does not exist. Raises DataError if
    the JSON has an unexpected format.
    """
    if content is None:
        return None
    where = store.describe(name)
    try:
        found = untrusted_input.parse_json(untrusted_input.decode(content, where), where)
        if isinstance(found, dict) and found.get("format", FORMAT) != FORMAT:
            raise InputError(
                f"its format is {untrusted_input.show(found['format'])}, not {FORMAT}", key="format"
            )
        return fit(kind, found)
    except InputError as error:
        what, why = (
            "is invalid, or from another version of trainfleet",
            ": ".join(filter(None, (error.key, error.what))),
        )
        raise DataError(what, where=error.where or where, why=why, next=remake(store)) from error
