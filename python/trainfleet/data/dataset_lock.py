"""Decides which job makes a dataset: the holder of a lease in its folder (health/lease.py), or of
an object in its place in S3.

Both are renewed; without renewal another job takes them over. The taker itself waits for that time,
so no two machines' clocks are compared. An additional lock of the operating system only shows at
once that a holder on this machine has ended. On NFS and Lustre the lock of a dead or frozen host
stays for minutes.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

from ..health.lease import GLANCE, PATIENCE, Lease, is_renewed, newest_holder
from ..run import run_folder
from ..storage import s3
from ..trust.errors import BackendError, DataError, S3Error
from .dataset_store import BucketDataset, DatasetStore

RENEW = 10.0  # seconds
LAPSE = 60.0
POLL = 1.0


@contextmanager
def only_job(store: DatasetStore) -> Iterator[None]:
    """Holds the dataset while the block runs. Raises DataError if another job is making it."""
    busy = is_busy(store.folder, PATIENCE)
    file = run_folder.take_lock(store.folder)
    in_bucket = isinstance(store, BucketDataset)
    if busy or (in_bucket and file is None):
        raise _busy(str(store.folder), "")
    with file or nullcontext(), ExitStack() as stack:
        if in_bucket and file:
            stack.enter_context(Claim(store.describe("lock"), _name(file)))
        try:
            lease = stack.enter_context(Lease(store.folder))
        except BackendError as error:
            raise _busy(str(store.folder), "") from error
        yield
        lease.code = 0


def is_busy(folder: Path, seconds: float = GLANCE) -> bool:
    """Tells whether a job is making the dataset of this folder. Watches its lease for that many
    seconds if nothing else decides.
    """
    holder = newest_holder(folder)
    if holder is None or holder.code is not None:
        return False
    if holder.host == platform.node() and not run_folder.is_locked(folder):
        return False
    return is_renewed(folder, seconds)


class Claim:
    """The object that names the dataset's holder, written by compare-and-swap (S3's conditional
    writes).
    """

    def __init__(self, address: str, lock: str) -> None:
        """Names this claim by `lock`, the operating system's lock that is held: an earlier writer
        of that name has ended.
        """
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
        """Writes the claim if there is no other, or only an expired one. Raises DataError if its
        holder is alive.
        """
        seen, since = "", time.monotonic()
        while not (mine := self._put("")):
            if (found := s3.read_version(self.address)) is None:
                continue
            (lock, holder), version = found[0].decode().split(" ", 1), found[1]
            if lock == self.lock or (version == seen and time.monotonic() - since > LAPSE):
                if mine := self._put(version):
                    return mine
            elif not seen:
                print(
                    f"{holder} may be making this dataset: watching for {LAPSE:.0f} s whether "
                    "it is",
                    flush=True,
                )
                seen = version
            elif version != seen:
                raise _busy(self.address, f"{holder} renewed its claim {POLL:.0f} s ago")
            time.sleep(POLL)
        return mine

    def _put(self, version: str) -> str:
        self.count += 1  # every claim differs from the one before
        content = f"{self.lock} {socket.gethostname()} (process {os.getpid()}, claim {self.count})"
        return s3.write_if(self.address, content.encode(), version)

    def _renew(self) -> None:
        while not self.ended.wait(RENEW):
            try:
                version = self._put(self.version)
            # an unreachable claim can't be taken over either; the work itself will report that
            except S3Error as error:
                print(error, file=sys.stderr, flush=True)
                continue
            if not version:
                print(
                    _busy(self.address, f"this one was silent for {LAPSE:.0f} s"),
                    file=sys.stderr,
                    flush=True,
                )
                os.kill(os.getpid(), signal.SIGTERM)
                return
            self.version = version


def _name(file: TextIO) -> str:
    """Returns the unique name that a lock file contains."""
    file.seek(0)
    if not (name := file.read()):
        file.write(name := uuid.uuid4().hex)
        file.flush()
    return name


def _busy(where: str, why: str) -> DataError:
    return DataError(
        "another job is tokenizing this dataset",
        where=where,
        why=why,
        next="wait for it, or run make stop",
    )
