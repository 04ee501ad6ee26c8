"""Reader and writer for token files in Megatron's format: raw little-endian ids in .bin, document
bounds in .idx (MMIDIDX, version 1).

Layout of .idx, as Megatron-LM reads it (megatron/core/datasets/indexed_dataset.py): magic, u64
version, u8 type code, u64 number of sequences, u64 number of document bounds, then i32 sequence
lengths, i64 byte offsets of the sequences, i64 document bounds. Here, every document is one
sequence that ends with the end-of-document id. Because formats.LONGEST limits a document's size,
its length fits in 31 bits.

In a dataset of conversations, ids are signed (chat.py), and .idx ends with the number of learned
tokens of each document, as i32.

`Tokens` reads the concatenated shards, either from mapped files or from S3 in blocks. Downloaded
blocks are cached on disk, within a size limit, and shared by the machine's ranks. When training
starts, `check_opening` checks sampled blocks against the manifest. `verify` checks every byte on
request.
"""

from __future__ import annotations

import hashlib
import os
import random
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..config.conversion import SETTINGS
from ..config.vocabulary import FILE
from ..process import file_systems
from ..run.run_folder import unwritable
from ..storage.files import LocalFiles
from ..trust import untrusted_input
from ..trust.errors import DataError
from .dataset_store import DatasetStore, remake, stream
from .manifest import BLOCK, ITEM_BYTES, LENGTHS, SPLITS, Manifest, Shard

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TYPE_CODES = {"int32": 4, "uint16": 8}  # codes of Megatron's DType, which has no uint32

OPEN_FILES = 512  # maximum number of mapped files, below the usual limit of 1024 descriptors
Tokenlike = npt.NDArray[Any]

THREADS = 8  # parallel block downloads

SAMPLED = 4  # random blocks to check per opening: 16 MiB, about 10 ms


class ShardWriter:
    """Writer for one pair of token files. The files have temporary names until `commit`, and
    exiting the context removes uncommitted files.
    """

    def __init__(self, store: DatasetStore, path: str, dtype: str, end_of_document: int) -> None:
        self.store, self.path, self.dtype, self.end = (
            store,
            path,
            np.dtype(dtype).newbyteorder("<"),
            end_of_document,
        )
        # The process ID keeps the files of concurrent jobs apart.
        self.partial = store.folder / f"{path}.{os.getpid()}.partial"
        self.lengths = [np.empty(0, np.int32)]
        self.learned = [np.empty(0, np.int32)]  # learned tokens, for conversations only
        self.begun = 0  # tokens written so far for an unfinished document
        self.min_id, self.max_id = end_of_document, end_of_document
        self.sha256, self.blocks, self.crc, self.filled = hashlib.sha256(), list[int](), 0, 0

    def __enter__(self) -> ShardWriter:
        try:
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.partial, "wb", buffering=0, opener=untrusted_input.opener)
        except OSError as error:
            raise unwritable(self.partial, error) from error
        return self

    def begin(self, ids: npt.NDArray[np.uint32]) -> int:
        """Appends part of a document, which the next call continues. Returns the number of tokens
        written.
        """
        self._see(ids)
        self.begun += len(ids)
        self._write(ids.astype(self.dtype).data.cast("B"))
        return len(ids)

    def add(self, ids: Tokenlike, offsets: npt.NDArray[np.int64]) -> int:
        """Appends documents, given as flat ids and offsets, and ends each with an end-of-document
        id.

        In conversations, which have signed ids, the end-of-document id is not learned. Returns the
        number of tokens written.
        """
        lengths = np.diff(offsets) + 1
        tokens = np.empty(len(ids) + len(lengths), self.dtype)
        inside = np.ones(len(tokens), np.bool_)
        inside[np.cumsum(lengths) - 1] = False
        tokens[inside] = ids
        tokens[~inside] = self.end
        if ids.dtype == np.int64:
            tokens[~inside] = ~self.end
            self.learned.append(
                np.diff(np.cumsum(np.append(0, ids >= 0))[offsets]).astype(np.int32)
            )
            ids = unsigned(ids)
        self._see(ids)
        lengths[0], self.begun = lengths[0] + self.begun, 0
        self.lengths.append(lengths.astype(np.int32))
        self._write(tokens.data.cast("B"))
        return len(tokens)

    def commit(self, source: int) -> Shard | None:
        """Makes both files durable and visible, and returns their record. If there are no
        documents, publishes no files and returns None.
        """
        lengths, learned = np.concatenate(self.lengths), np.concatenate(self.learned)
        if not len(lengths):
            return None
        index = index_bytes(lengths, self.dtype) + learned.astype("<i4").tobytes()
        self._publish(index)
        return Shard(
            path=self.path,
            source=source,
            tokens=int(lengths.sum(dtype=np.int64)),
            documents=len(lengths),
            min_id=self.min_id,
            max_id=self.max_id,
            longest=int(lengths.max()),
            learned=int(learned.sum(dtype=np.int64)),
            lengths=tuple(np.bincount(np.frexp(lengths)[1] - 1, minlength=LENGTHS).tolist()),
            bin_sha256=self.sha256.hexdigest(),
            idx_sha256=hashlib.sha256(index).hexdigest(),
            blocks=(*self.blocks, self.crc) if self.filled else tuple(self.blocks),
        )

    def _publish(self, index: bytes) -> None:
        try:
            os.fsync(self.file.fileno())
            self.store.publish(f"{self.path}.bin", self.partial)
            with open(self.partial, "wb", opener=untrusted_input.opener) as file:
                file.write(index)
                file.flush()
                os.fsync(file.fileno())
            self.store.publish(f"{self.path}.idx", self.partial)
        except OSError as error:
            raise unwritable(self.partial, error) from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.file.close()
        self.partial.unlink(missing_ok=True)

    def _see(self, ids: Tokenlike) -> None:
        if len(ids):
            self.min_id, self.max_id = (
                min(self.min_id, int(ids.min())),
                max(self.max_id, int(ids.max())),
            )

    def _write(self, content: memoryview) -> None:
        self.sha256.update(content)
        try:
            for start in range(0, len(content), BLOCK):
                self._write_all(content[start : start + BLOCK])
        except OSError as error:
            raise unwritable(self.partial, error) from error
        while content:
            part = content[: BLOCK - self.filled]
            self.crc, self.filled = zlib.crc32(part, self.crc), self.filled + len(part)
            if self.filled == BLOCK:
                self.blocks.append(self.crc)
                self.crc = self.filled = 0
            content = content[len(part) :]

    def _write_all(self, content: memoryview) -> None:
        while content:  # A write may be short after a signal or on a nearly full disk.
            content = content[self.file.write(content) :]


def unsigned(ids: Tokenlike) -> npt.NDArray[np.int64]:
    """Converts signed ids back to token ids."""
    return np.where(ids < 0, ~ids, ids)


def read_index(store: DatasetStore, shard: Shard) -> npt.NDArray[np.int64]:
    """Returns the length and learned-token count of each conversation in a shard, as [2,
    documents].

    Raises DataError if the index is damaged.
    """
    content = store.read(name := f"{shard.path}.idx") or b""
    if hashlib.sha256(content).hexdigest() != shard.idx_sha256:
        raise damaged(store, name)
    places = HEADER.size, len(content) - 4 * shard.documents
    parts = [np.frombuffer(content, "<i4", shard.documents, place) for place in places]
    return np.stack(parts).astype(np.int64)


def damaged(store: DatasetStore, name: str) -> DataError:
    return DataError(
        "is damaged: its SHA-256 differs", where=store.describe(name), next=remake(store)
    )


def index_bytes(lengths: npt.NDArray[np.int32], dtype: npt.DTypeLike) -> bytes:
    """Returns the content of an .idx file for documents with these lengths."""
    count, size = len(lengths), np.dtype(dtype).itemsize
    pointers = np.zeros(count, np.int64)
    np.cumsum(lengths[:-1], out=pointers[1:], dtype=np.int64)
    header = HEADER.pack(MAGIC, 1, TYPE_CODES[np.dtype(dtype).name], count, count + 1)
    parts = (
        lengths.astype("<i4"),
        (pointers * size).astype("<i8"),
        np.arange(count + 1, dtype="<i8"),
    )
    return header + b"".join(part.tobytes() for part in parts)


class Tokens:
    """Reader for any range of tokens in the concatenated shards."""

    def __init__(
        self, store: DatasetStore, shards: Sequence[Shard], dtype: str, cache: BlockCache | None
    ) -> None:
        self.store, self.shards, self.cache = store, shards, cache
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.starts = np.concatenate(
            [[0], np.cumsum([shard.tokens for shard in shards], dtype=np.int64)]
        ).astype(np.int64)
        self.mapped: Callable[[int], Tokenlike] = lru_cache(OPEN_FILES)(self._map)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, out: npt.NDArray[np.int64]) -> None:
        """Fills `out` with the tokens starting at `start`."""
        for index, begin, end, at in self._parts(start, len(out)):
            out[at : at + end - begin] = (
                self._fetch(index, begin, end) if self.cache else self.mapped(index)[begin:end]
            )

    def expect(self, start: int, length: int) -> None:
        """Prefetches a range of tokens into the cache, if there is a cache."""
        for index, begin, end, _ in self._parts(start, length) if self.cache else ():
            for block in self._blocks(begin, end):
                self._cached(index, block)

    def _parts(self, start: int, length: int) -> list[tuple[int, int, int, int]]:
        """Splits a token range at shard boundaries. Returns each part's shard index, its start and
        end in the shard, and its position in the range.
        """
        index, at, parts = int(np.searchsorted(self.starts, start, side="right")) - 1, 0, []
        while at < length:
            begin = start + at - int(self.starts[index])
            end = min(begin + length - at, self.shards[index].tokens)
            parts.append((index, begin, end, at))
            index, at = index + 1, at + end - begin
        return parts

    def _map(self, index: int) -> Tokenlike:
        shard = self.shards[index]
        with open(
            self.store.describe(f"{shard.path}.bin"), "rb", opener=untrusted_input.opener
        ) as file:
            return np.memmap(file, self.dtype, "r", shape=(shard.tokens,))

    def _blocks(self, begin: int, end: int) -> range:
        width = self.dtype.itemsize
        return range(begin * width // BLOCK, (end * width - 1) // BLOCK + 1)

    def _fetch(self, index: int, begin: int, end: int) -> Tokenlike:
        blocks = self._blocks(begin, end)
        content = b"".join(self._cached(index, block)() for block in blocks)
        first = blocks[0] * BLOCK // self.dtype.itemsize
        return np.frombuffer(content, self.dtype)[begin - first : end - first]

    def _cached(self, index: int, block: int) -> Callable[[], bytes]:
        """Starts fetching a block of a shard in the background unless it is cached. Returns a
        function that waits for the block and returns it.
        """
        assert self.cache is not None
        shard, store = self.shards[index], self.store

        def fetch() -> bytes:
            content = store.read_range(
                f"{shard.path}.bin",
                block * BLOCK,
                min(shard.tokens * self.dtype.itemsize, (block + 1) * BLOCK),
            )
            check_block(content, shard, block, store)
            return content

        name = f"{shard.bin_sha256[:16]}-{block}-{shard.blocks[block]}"
        return self.cache.get(name, fetch)


def check_block(content: bytes | memoryview, shard: Shard, block: int, store: DatasetStore) -> None:
    """Raises DataError if a block of a shard does not match its checksum."""
    if zlib.crc32(content) != shard.blocks[block]:
        why = f"the checksum of bytes {block * BLOCK} to {block * BLOCK + len(content)} differs"
        raise DataError(
            "is damaged", where=store.describe(f"{shard.path}.bin"), why=why, next=remake(store)
        )


class BlockCache:
    """Cache of downloaded blocks, in files that this machine's ranks share. A block's name ends
    with its CRC-32.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="blocks")
        self.coming: dict[str, Future[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, fetch: Callable[[], bytes]) -> Callable[[], bytes]:
        """Starts fetching a block in the background. Returns a function that waits for the block
        and raises any download error.
        """
        if name not in self.coming:
            self.coming[name] = self.threads.submit(self._bring, name, fetch)
        return lambda: self._take(name, fetch)

    def _take(self, name: str, fetch: Callable[[], bytes]) -> bytes:
        future = self.coming.pop(name, None)
        return future.result() if future else self._bring(name, fetch)

    def _bring(self, name: str, fetch: Callable[[], bytes]) -> bytes:
        path = self.folder / name
        with suppress(OSError):  # the block is missing, or the disk can't read it
            content = path.read_bytes()
            # A power failure may have left the file empty or full of zeros.
            if name.endswith(f"-{zlib.crc32(content)}"):
                file_systems.offered(lambda: os.utime(path))  # mark as recently used
                return content
        content = fetch()
        try:
            file_systems.replace_file(path, content)
            self._make_room()
        except OSError as error:  # training can continue, because the cache only saves requests
            warnings.warn(f"can't cache dataset blocks: {error.strerror}", stacklevel=2)
        return content

    def _make_room(self) -> None:
        """Evicts the least recently used blocks until the cache is within its size limit."""
        found = sorted(
            (status.st_mtime_ns, status.st_size, path)
            for path in self.folder.iterdir()
            if (status := _stat(path))
        )
        size = sum(length for _, length, _ in found)
        for _, length, path in found:
            if size <= self.limit:
                return
            path.unlink(missing_ok=True)
            size -= length


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:  # another rank evicted the block
        return None


def check_opening(store: DatasetStore, manifest: Manifest) -> None:
    """Raises DataError if a file is missing or has the wrong size, the tokenizer is not the
    dataset's, or a sampled block is damaged. Blocks in S3 are checked on arrival instead.
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
                next=remake(store),
            )
    _check_tokenizer(store, manifest)
    if not store.remote:
        for shard, block in _some_blocks(manifest.shards):
            start = block * BLOCK
            content = store.read_range(f"{shard.path}.bin", start, start + BLOCK)
            check_block(content, shard, block, store)


def verify(store: DatasetStore, manifest: Manifest) -> Iterator[str]:
    """Checks every byte of every file and yields one line per file. Raises DataError at the first
    file that does not match the manifest.
    """
    check_opening(store, manifest)
    for shard in manifest.shards:
        for suffix, expected in (("bin", shard.bin_sha256), ("idx", shard.idx_sha256)):
            name = f"{shard.path}.{suffix}"
            digest = hashlib.sha256()
            for part in stream(store, name):
                digest.update(part)
            if digest.hexdigest() != expected:
                raise damaged(store, name)
            yield f"{name}  sha256 {expected[:16]}…  ok"


def _check_tokenizer(store: DatasetStore, manifest: Manifest) -> None:
    content = store.read(FILE)
    if content is None or hashlib.sha256(content).hexdigest() != manifest.tokenizer_sha256:
        what = "is not the tokenizer that the dataset was built with" if content else "is missing"
        raise DataError(what, where=store.describe(FILE), next=remake(store))
    here = LocalFiles(store.folder)  # may contain the files of an earlier dataset in S3
    for name in (FILE, SETTINGS):
        if (content := store.read(name)) and content != here.read(name):
            here.write(name, content)


def _some_blocks(shards: tuple[Shard, ...]) -> list[tuple[Shard, int]]:
    draw = random.SystemRandom()
    chosen = draw.choices(shards, weights=[len(shard.blocks) for shard in shards], k=SAMPLED)
    return [(shard, draw.randrange(len(shard.blocks))) for shard in chosen]
