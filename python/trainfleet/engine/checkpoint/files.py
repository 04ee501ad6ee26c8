"""torch.distributed.checkpoint's files, in a store: what they hold is its format, so any program that reads that reads ours."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from ...checkpoints.marker import File
from ...checkpoints.store import Store


class Writer(FileSystemWriter):
    """Writes one rank's part of a checkpoint that `begin` made room for. `written` grows by every file, with its checksum."""

    def __init__(self, store: Store, step: int) -> None:
        super().__init__(
            "/", sync_files=False, per_thread_copy_ahead=0
        )  # the store syncs; what is written is on the host already
        self.written: dict[str, File] = {}
        self.fs = Streams(store, step, self.written)  # type: ignore[assignment]


class Reader(FileSystemReader):
    """Reads a visible checkpoint."""

    def __init__(self, store: Store, step: int) -> None:
        super().__init__("/")
        self.fs = Streams(store, step, {})  # type: ignore[assignment]


class Streams:
    """A checkpoint's files as torch's classes want a file system: paths are names, and nothing is in sight before the commit.

    So `.metadata` is written in its place at once: the rename by which torch makes it appear has nothing to hide here.
    """

    def __init__(self, store: Store, step: int, written: dict[str, File]) -> None:
        self.store, self.step, self.written = store, step, written

    @contextmanager
    def create_stream(self, path: Path, mode: str) -> Iterator[Any]:
        name = path.name.removesuffix(".tmp")
        if mode == "rb":
            with self.store.open(self.step, name) as stream:
                yield stream
        else:
            with self.store.create(self.step, name) as stream:
                yield (tally := Tally(stream))
                self.written[name] = File(tally.size, tally.crc)

    def concat_path(self, path: Path, suffix: str) -> Path:
        return path / suffix

    def rename(self, path: Path, new_path: Path) -> None:
        pass

    def exists(self, path: Path) -> bool:
        return False


class Tally(io.RawIOBase):
    """Passes bytes on, and takes their size and CRC-32 before any disk has them."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.size, self.crc = stream, 0, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with memoryview(data).cast("B") as view:
            self.crc = zlib.crc32(view, self.crc)
            self.size += len(view)
            self.stream.write(view)
            return len(view)

    def tell(self) -> int:
        return self.size
