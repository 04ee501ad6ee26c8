"""Dataset storage, either in a folder that all nodes share or under an S3 prefix. In both cases, a
file becomes visible only once it is complete.

Names such as `units/00000.json` are relative to the dataset. An S3 store also has a local folder
for the tokenizer, cached token blocks, and shards that are not uploaded yet.

The job that creates a dataset holds a lease in the dataset's folder (health/lease.py) and, for a
dataset in S3, a claim object there. If the job stops renewing them, another job takes over. The
other job measures the timeout on its own clock, so clocks are never compared across machines. On
the same machine, an operating system lock immediately reveals that the holder has exited. On NFS
and Lustre, the lock of a dead or frozen host persists for minutes.
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
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

from ..health.lease import GLANCE, PATIENCE, Lease, is_renewed, newest_holder
from ..run import run_folder
from ..storage import s3
from ..storage.files import BucketFiles, Files, LocalFiles
from ..trust.errors import BackendError, DataError, S3Error

PART = 2**23
THREADS = 16  # parallel reads of small objects

RENEW = 10.0  # seconds between renewals of a claim
LAPSE = 60.0
POLL = 1.0


DatasetStore = Files  # `folder` contains the tokenizer and, for a dataset in S3, the cache


def open_store(folder: Path, address: str | None) -> DatasetStore:
    """Opens the dataset store at an address such as s3://bucket/prefix, or in `folder` if there is
    no address.
    """
    return (
        BucketFiles(f"{address.rstrip('/')}/{folder.name}", folder)
        if address
        else LocalFiles(folder)
    )


def read_all(store: DatasetStore, names: Iterable[str]) -> list[bytes | None]:
    """Reads many small files in parallel. Returns None for each file that does not exist."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(store.read, names))


def stream(store: DatasetStore, name: str) -> Iterator[bytes]:
    """Yields the content of a large file in chunks."""
    with store.open(name) as file:
        while part := file.read(PART):
            yield part


def remake(store: DatasetStore) -> str:
    """Returns the command that deletes and recreates only this dataset."""
    remote = f"aws s3 rm --recursive {store.describe('')} && " if store.remote else ""
    return f"{remote}rm -r {store.folder} && make tokenize"


@contextmanager
def only_job(store: DatasetStore) -> Iterator[None]:
    """Claims the dataset for this job for the duration of the `with` block. Raises DataError if
    another job is creating the dataset.
    """
    busy = is_busy(store.folder, PATIENCE)
    file = run_folder.take_lock(store.folder)
    if busy or (store.remote and file is None):
        raise _busy(str(store.folder), "")
    with file or nullcontext(), ExitStack() as stack:
        if store.remote and file:
            stack.enter_context(Claim(store.describe("lock"), _name(file)))
        try:
            lease = stack.enter_context(Lease(store.folder))
        except BackendError as error:
            raise _busy(str(store.folder), "") from error
        yield
        lease.code = 0


def is_busy(folder: Path, seconds: float = GLANCE) -> bool:
    """Returns whether a job is creating the dataset in this folder. If the last holder's record and
    lock are inconclusive, watches its lease for up to `seconds`.
    """
    holder = newest_holder(folder)
    if holder is None or holder.code is not None:
        return False
    if holder.host == platform.node() and not run_folder.is_locked(folder):
        return False
    return is_renewed(folder, seconds)


class Claim:
    """S3 object that identifies the job that is creating the dataset. It is written by
    compare-and-swap (S3 conditional writes).
    """

    def __init__(self, address: str, lock: str) -> None:
        """Creates a claim named after `lock`, the name in the lock file that this process holds. An
        existing claim with this name therefore belongs to a process that has exited.
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
        """Writes the claim if no other claim exists or the other one has expired. Raises DataError
        if the other claim's holder is alive.
        """
        seen, since = "", time.monotonic()
        while not (mine := self._put("")):
            if (found := s3.read_version(self.address)) is None:
                continue
            holder, version = found[0].decode().partition(" ")[2], found[1]
            if version == seen and time.monotonic() - since > LAPSE:
                if mine := self._put(version):
                    return mine
            elif not seen:
                print(
                    f"{holder} may be tokenizing this dataset; watching its claim for {LAPSE:.0f} s"
                )
                seen = version
            elif version != seen:
                raise _busy(self.address, f"{holder} renewed its claim {POLL:.0f} s ago")
            time.sleep(POLL)
        return mine

    def _put(self, version: str) -> str:
        self.count += 1  # Consecutive writes must differ, so that the ETag changes.
        content = f"{self.lock} {socket.gethostname()} (process {os.getpid()}, claim {self.count})"
        if mine := s3.write_if(self.address, content.encode(), version):
            return mine
        # This claim may already be there: a request is retried if its response is lost.
        found = s3.read_version(self.address)
        return found[1] if found and found[0].startswith(f"{self.lock} ".encode()) else ""

    def _renew(self) -> None:
        while not self.ended.wait(RENEW):
            try:
                version = self._put(self.version)
            # Continue, because other jobs can't take over a claim in an unreachable bucket. The
            # job's own requests will report the problem.
            except S3Error as error:
                print(error, file=sys.stderr)
                continue
            if not version:
                print(
                    _busy(self.address, f"this job did not renew its claim for {LAPSE:.0f} s"),
                    file=sys.stderr,
                )
                os.kill(os.getpid(), signal.SIGTERM)
                return
            self.version = version


def _name(file: TextIO) -> str:
    """Returns the unique name in a lock file, after writing a new name if the file is empty."""
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
        next="wait for that job, or run make stop",
    )
