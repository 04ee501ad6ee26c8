"""Checks a dataset against its manifest: quickly when training starts, to the last byte on
request.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

from ..config.conversion import LARGEST
from ..config.vocabulary import FILE
from ..trust import untrusted_input
from ..trust.errors import DataError
from .dataset_store import DatasetStore, FolderDataset
from .manifest import BLOCK, ITEM_BYTES, SPLITS, Manifest, Shard
from .tokens import check_block

SAMPLED = 4  # blocks that are read at every opening, other ones each time: 16 MiB, some 10 ms


def check_opening(store: DatasetStore, manifest: Manifest) -> None:
    """Raises DataError if a file is missing or has another size, the tokenizer is another one, or a
    sampled block is damaged.

    Blocks from S3 are checked one by one as they arrive.
    """
    sizes = {name: size for split in SPLITS for name, size in store.sizes(split).items()}
    width = ITEM_BYTES[manifest.dtype]
    for shard in manifest.shards:
        if (
            sizes.get(f"{shard.path}.bin") != shard.tokens * width
            or f"{shard.path}.idx" not in sizes
        ):
            where = store.describe(f"{shard.path}.bin")
            raise DataError(
                "is missing, or its length differs from the manifest",
                where=where,
                next=store.remake(),
            )
    _check_tokenizer(store, manifest)
    if isinstance(store, FolderDataset):
        for shard, block in _some_blocks(manifest.shards):
            with open(
                store.folder / f"{shard.path}.bin", "rb", opener=untrusted_input.opener
            ) as file:
                file.seek(block * BLOCK)
                check_block(file.read(BLOCK), shard, block, store)


def verify(store: DatasetStore, manifest: Manifest) -> Iterator[str]:
    """Yields a line for every file that was checked in full. Raises DataError at the first that
    differs from the manifest.
    """
    check_opening(store, manifest)
    for shard in manifest.shards:
        for suffix, expected in (("bin", shard.bin_sha256), ("idx", shard.idx_sha256)):
            name = f"{shard.path}.{suffix}"
            digest = hashlib.sha256()
            for part in store.stream(name):
                digest.update(part)
            if digest.hexdigest() != expected:
                raise DataError(
                    "is damaged: its SHA-256 differs",
                    where=store.describe(name),
                    next=store.remake(),
                )
            yield f"{name}  sha256 {expected[:16]}…  right"


def _check_tokenizer(store: DatasetStore, manifest: Manifest) -> None:
    path = store.folder / FILE
    content = untrusted_input.read_bytes(path, LARGEST) if path.exists() else store.read(FILE)
    if content is None or hashlib.sha256(content).hexdigest() != manifest.tokenizer_sha256:
        what = "is not the tokenizer that the dataset was made with" if content else "is missing"
        raise DataError(what, where=store.describe(FILE), next=store.remake())
    if not path.exists():
        FolderDataset(store.folder).write(FILE, content)


def _some_blocks(shards: tuple[Shard, ...]) -> list[tuple[Shard, int]]:
    draw = random.SystemRandom()
    chosen = draw.choices(shards, weights=[len(shard.blocks) for shard in shards], k=SAMPLED)
    return [(shard, draw.randrange(len(shard.blocks))) for shard in chosen]
