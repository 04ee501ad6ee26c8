"""Stores checkpoints in S3, or in any server of its protocol (storage/s3.py).

    s3://bucket/prefix/<run>/
      step-00000100/committed.json             the marker, written last, removed first: a checkpoint
      exists if it has one
      step-00000050.broken/committed.json      marker of one that a resume found damaged
      parts-0 ... parts-f/step-00000100/...    its files, spread by their names

An object appears completely or not at all, so no hidden names are needed. S3 splits its capacity
(3,500 writes per second for each prefix) by the beginning of keys. The sixteen `parts-` stay the
same from save to save, so that S3's splits stay valid.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html
"""

from __future__ import annotations

import re
import zlib
from contextlib import AbstractContextManager
from typing import BinaryIO

from ..run.run_folder import step_name
from ..storage import s3, s3_streams
from .marker import BROKEN, MARKER, MARKER_BYTES, NAME

SPREAD = 16


class BucketStore:
    """Stores checkpoints below an s3:// address."""

    def __init__(self, address: str) -> None:
        self.prefix = f"{address.rstrip('/')}/"

    def steps(self) -> list[int]:
        return self._numbers(NAME)

    def broken(self) -> list[int]:
        return self._numbers(BROKEN)

    def address(self, step: int) -> str:
        return f"{self.prefix}{step_name(step)}"

    def marker(self, step: int) -> str | None:
        found = s3.read(self._marker(step), MARKER_BYTES)
        return None if found is None else found.decode(errors="replace")

    def size(self, step: int, file: str) -> int | None:
        found = s3.stat(self._part(step, file))
        return None if found is None else found.size

    def open(self, step: int, file: str) -> BinaryIO:
        """Downloads to a temporary file: readers of checkpoints seek."""
        return s3.download(self._part(step, file))

    def begin(self, step: int) -> None:
        self.remove(step)

    def create(self, step: int, file: str) -> AbstractContextManager[BinaryIO]:
        return s3_streams.create(self._part(step, file))

    def commit(self, step: int, marker: str) -> None:
        s3.write(self._marker(step), marker.encode())

    def abandon(self, step: int) -> None:
        for parts in self._spread():
            s3.remove_all(found.address for found in s3.list_objects(f"{parts}{step_name(step)}/"))

    def remove(self, step: int) -> None:
        s3.remove(self._marker(step))
        self.abandon(step)

    def set_aside(self, step: int) -> None:
        s3.copy(self._marker(step), self._aside(step))
        s3.remove(self._marker(step))

    def remove_broken(self, step: int) -> None:
        if step not in self.steps():  # a good one of that step has its files in the same place
            self.abandon(step)
        s3.remove(self._aside(step))

    def sweep(self) -> None:
        begun = set[str]()
        for parts in self._spread():
            s3.abort_uploads(parts)
            begun |= set(s3.list_folders(parts))
        for name in begun - {step_name(step) for step in (*self.steps(), *self.broken())}:
            if match := NAME.fullmatch(name):
                self.abandon(int(match[1]))

    def free(self) -> int | None:
        return None

    def _marker(self, step: int) -> str:
        return f"{self.address(step)}/{MARKER}"

    def _aside(self, step: int) -> str:
        return f"{self.address(step)}.broken/{MARKER}"

    def _part(self, step: int, file: str) -> str:
        return f"{self.prefix}parts-{zlib.crc32(file.encode()) % SPREAD:x}/{step_name(step)}/{file}"

    def _spread(self) -> list[str]:
        return [f"{self.prefix}parts-{number:x}/" for number in range(SPREAD)]

    def _numbers(self, name: re.Pattern[str]) -> list[int]:
        return sorted(
            int(match[1]) for match in map(name.fullmatch, s3.list_folders(self.prefix)) if match
        )
