"""Caches blocks of a remote dataset as files on this machine, shared by its ranks and bounded in
bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ..process import file_systems

THREADS = 8  # blocks that are fetched at a time


class BlockCache:
    """Reads a block from its file, or downloads it and keeps the file for the other ranks."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="blocks")
        self.coming: dict[str, Future[bytes]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, fetch: Callable[[], bytes]) -> Callable[[], bytes]:
        """Starts to prefetch a block. Calling the result waits for it and raises its error."""
        if name not in self.coming:
            self.coming[name] = self.threads.submit(self._bring, name, fetch)
        return lambda: self._take(name, fetch)

    def _take(self, name: str, fetch: Callable[[], bytes]) -> bytes:
        future = self.coming.pop(name, None)
        return future.result() if future else self._bring(name, fetch)

    def _bring(self, name: str, fetch: Callable[[], bytes]) -> bytes:
        path = self.folder / name
        try:
            content = path.read_bytes()
            file_systems.offered(lambda: os.utime(path))  # used now, so it is kept longer
        except FileNotFoundError:
            content = fetch()
            partial = path.with_name(f"{name}.{os.getpid()}.partial")
            partial.write_bytes(content)
            partial.replace(path)
            self._make_room()
        return content

    def _make_room(self) -> None:
        """Evicts the least recently used blocks."""
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
    except FileNotFoundError:  # another rank made room
        return None
