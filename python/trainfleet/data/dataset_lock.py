"""A lock on a dataset, so that one job at a time makes it: a file lock beside it, and for one in S3 an object as well.

The kernel releases a file lock when its holder dies. An object stays, so its holder renews it every RENEW seconds, and one that
has not changed for LAPSE is taken over. The taker waits that long itself, so no two machines' clocks are compared.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TextIO

from ..run import run_folder
from ..storage import s3
from ..trust.errors import DataError, S3Error
from .dataset_store import BucketDataset, DatasetStore

RENEW = 10.0  # seconds
LAPSE = 60.0
POLL = 1.0


@contextmanager
def only_job(store: DatasetStore) -> Iterator[None]:
    """Held for as long as the block runs. DataError when another job is at work on the dataset."""
    file = run_folder.take_lock(store.folder)
    if file is None:
        raise _busy(str(store.folder), "")
    with file, Claim(store.describe("lock"), _name(file)) if isinstance(store, BucketDataset) else nullcontext():
        yield


class Claim:
    """The object that names the dataset's holder, written by compare-and-swap (S3's conditional writes)."""

    def __init__(self, address: str, lock: str) -> None:
        """`lock` names the lock of the operating system that is held: whoever else wrote that name here has ended."""
        self.address, self.lock, self.count = address, lock, 0
        self.ended = threading.Event()
        self.renewing = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> None:
        self.version = self._take()
        self.renewing.start()

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.renewing.join()
        s3.remove(self.address, self.version)

    def _take(self) -> str:
        """Puts the claim if there is none, or an expired one. DataError when its holder is alive."""
        seen, since = "", time.monotonic()
        while not (mine := self._put("")):
            if (found := s3.read_version(self.address)) is None:
                continue
            (lock, holder), version = found[0].decode().split(" ", 1), found[1]
            if lock == self.lock or (version == seen and time.monotonic() - since > LAPSE):
                if mine := self._put(version):
                    return mine
            elif not seen:
                print(f"{holder} may be at work on this dataset: looks for {LAPSE:.0f} s whether it is", flush=True)
                seen = version
            elif version != seen:
                raise _busy(self.address, f"{holder} said so {POLL:.0f} s ago")
            time.sleep(POLL)
        return mine

    def _put(self, version: str) -> str:
        self.count += 1  # so that every claim differs from the one before
        content = f"{self.lock} {socket.gethostname()} (process {os.getpid()}, claim {self.count})"
        return s3.write_if(self.address, content.encode(), version)

    def _renew(self) -> None:
        while not self.ended.wait(RENEW):
            try:
                version = self._put(self.version)
            except S3Error as error:  # what cannot be reached cannot be taken over either; the work itself will say so
                print(error, file=sys.stderr, flush=True)
                continue
            if not version:
                print(_busy(self.address, f"this one was not heard for {LAPSE:.0f} s"), file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
                return
            self.version = version


def _name(file: TextIO) -> str:
    """The unique name that a lock file contains."""
    file.seek(0)
    if not (name := file.read()):
        file.write(name := uuid.uuid4().hex)
        file.flush()
    return name


def _busy(where: str, why: str) -> DataError:
    return DataError("another job is tokenizing this dataset", where=where, why=why, next="wait for it, or: make stop")
