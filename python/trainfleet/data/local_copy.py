"""Copies a dataset from S3 to this node's local disk before its ranks read it: `python -m
trainfleet.data.local_copy RUN DISK`. Prints the path of the copy to stdout.

Ranks read the copy in the same way as a dataset mounted by a scheduler (run_folder.MOUNTED), so
they get the same batches in the same order. Each block is checked against the manifest's checksums
on arrival. The manifest is written last, so a copy without a manifest is incomplete. Token files
from an earlier attempt are reused.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..config import Config, load_resolved
from ..config.conversion import SETTINGS
from ..config.vocabulary import FILE
from ..process import file_systems
from ..run import run_folder
from ..run.run_folder import Run
from ..storage.files import LocalFiles
from ..trust.errors import DataError, TrainfleetError
from ..trust.safe_output import install
from .dataset_store import DatasetStore, stream
from .manifest import BLOCK, ITEM_BYTES, MANIFEST, Manifest, Shard, read_manifest, store_of
from .shards import THREADS, check_block, damaged

# Maximum ratio of the dataset's size to the amount of data that the run reads. Above it, a copy is
# not worthwhile.
READ_TWICE = 2


def main(arguments: list[str]) -> int:
    run, disk = Run(Path(arguments[0])), Path(arguments[1])
    try:
        if not disk.is_mount():
            raise DataError("is not a mounted disk", where=str(disk), next="make setup")
        began = time.monotonic()
        folder = copy(load_resolved(run.config), disk)
        print(
            f"copied the dataset to this node's disk, {folder}, in "
            f"{time.monotonic() - began:.0f} s",
            file=sys.stderr,
        )
        print(folder)
    except (TrainfleetError, OSError) as error:
        print(
            "the dataset was not copied and is read from S3 as needed: "
            f"{' '.join(str(error).split())}",
            file=sys.stderr,
        )
        return 1
    return 0


def copy(config: Config, disk: Path) -> Path:
    """Copies the entire dataset and returns the copy's folder.

    Raises:
        DataError: the dataset is unfinished or damaged, the disk is too small, or the run reads too
            little of the dataset.
        S3Error: a download failed.
    """
    store = store_of(config.data)
    manifest = read_manifest(store)
    if manifest is None or not store.remote:
        raise DataError(
            "is not a finished dataset in S3", where=store.describe(""), next="make tokenize"
        )
    here = LocalFiles(disk / "trainfleet" / config.data.name / manifest.identity[:16])
    if here.read(MANIFEST) is not None:
        return here.folder
    _require_worth(config, manifest, store, disk)
    for shard in manifest.shards:
        _bring_tokens(store, here.folder / f"{shard.path}.bin", shard, ITEM_BYTES[manifest.dtype])
        index = b"".join(stream(store, f"{shard.path}.idx"))
        if hashlib.sha256(index).hexdigest() != shard.idx_sha256:
            raise damaged(store, f"{shard.path}.idx")
        file_systems.replace_file(here.folder / f"{shard.path}.idx", index, durable=True)
    chat = (SETTINGS,) if manifest.settings.conversations else ()
    for name in (FILE, *chat, MANIFEST):
        here.write(name, store.read(name) or b"")
    return here.folder


def _require_worth(config: Config, manifest: Manifest, store: DatasetStore, disk: Path) -> None:
    """Raises DataError if the copy does not fit on the disk, or if the run reads too little of the
    dataset to justify a copy.
    """
    train, width = config.train, ITEM_BYTES[manifest.dtype]
    size = sum(shard.tokens for shard in manifest.shards) * width
    read = train.steps * train.global_batch_size * (train.sequence_length + 1) * width
    if size > READ_TWICE * read:
        raise DataError(
            f"has {size / 1e9:,.1f} GB, but this run reads only {read / 1e9:,.1f} GB",
            where=store.describe(""),
        )
    if size > (free := shutil.disk_usage(disk).free):
        raise DataError(
            f"the dataset has {size / 1e9:,.1f} GB, but only {free / 1e9:,.1f} GB are free",
            where=str(disk),
        )


def _bring_tokens(store: DatasetStore, path: Path, shard: Shard, width: int) -> None:
    """Downloads a shard's tokens as parallel block requests, unless an earlier attempt already
    did.
    """
    size = shard.tokens * width
    if path.exists() and path.stat().st_size == size:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with open(partial, "wb") as file, ThreadPoolExecutor(THREADS) as pool:

        def bring(block: int) -> None:
            content = store.read_range(
                f"{shard.path}.bin", block * BLOCK, min(size, (block + 1) * BLOCK)
            )
            check_block(content, shard, block, store)
            if os.pwrite(file.fileno(), content, block * BLOCK) < len(content):
                raise run_folder.unwritable(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

        for _ in pool.map(bring, range(len(shard.blocks))):
            pass
        # The name must not survive a power failure that the content does not.
        os.fsync(file.fileno())
    partial.replace(path)


if __name__ == "__main__":
    install()
    sys.exit(main(sys.argv[1:]))
