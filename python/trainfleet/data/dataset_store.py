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
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol, TextIO

from ..health.lease import GLANCE, PATIENCE, Lease, is_renewed, newest_holder
from ..run import run_folder
from ..run.claims import look_again
from ..storage import s3
from ..trust import untrusted_input
from ..trust.errors import BackendError, DataError, S3Error

PART = 2**23
# Maximum size of a file that is read at once, in bytes. A manifest with a million shards is half
# this size.
LARGEST = 2**30
# Number of parent folders that a dataset's job may have created: data and its parent
LEVELS = 2
THREADS = 16  # parallel reads of small objects

RENEW = 10.0  # seconds
LAPSE = 60.0
POLL = 1.0


class DatasetStore(Protocol):
    """Interface to a dataset's files. `folder` contains the dataset, or only this machine's local
    files if the dataset is in S3. Methods raise RunError or DataError on failure.
    """

    folder: Path
    note_every: float  # minimum seconds between calls to `note`

    def read(self, name: str) -> bytes | None:
        """Returns the content of a small file, or None if it does not exist."""
        ...

    def read_all(self, names: Iterable[str]) -> list[bytes | None]:
        """Returns the content of each small file in order, or None for files that do not exist."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Atomically replaces a small file."""
        ...

    def stream(self, name: str) -> Iterator[bytes]:
        """Yields the content of a large file in chunks."""
        ...

    def publish(self, name: str, file: Path) -> None:
        """Moves a finished local file into the dataset as `name`."""
        ...

    def note(self, name: str, content: bytes) -> None:
        """Replaces a small file. The new content may be lost in a crash."""
        ...

    def remove(self, name: str) -> None:
        """Removes a file if it exists."""
        ...

    def sizes(self, part: str) -> dict[str, int]:
        """Returns the size in bytes of each file in one of the dataset's folders, by file name."""
        ...

    def describe(self, name: str) -> str:
        """Returns a file's path or URL, for error messages."""
        ...

    def remake(self) -> str:
        """Returns the command that deletes a damaged dataset and recreates it."""
        ...


def open_store(folder: Path, address: str | None) -> DatasetStore:
    """Opens the dataset store at an address such as s3://bucket/prefix, or in `folder` if there is
    no address.
    """
    return (
        BucketDataset(folder, f"{address.rstrip('/')}/{folder.name}")
        if address
        else FolderDataset(folder)
    )


class FolderDataset:
    """Dataset in a folder on a file system."""

    note_every = 0.2  # seconds

    def __init__(self, folder: Path) -> None:
        untrusted_input.seal(folder)
        self.folder = folder

    def read(self, name: str) -> bytes | None:
        return self.read_all([name])[0]

    def read_all(self, names: Iterable[str]) -> list[bytes | None]:
        names = list(names)
        found = {name: self._read(name) for name in names}
        if missing := [name for name, content in found.items() if content is None]:
            # The file system client may still cache a negative lookup from before another node
            # wrote the file.
            look_again(
                *dict.fromkeys(
                    folder
                    for name in missing
                    for folder in (self.folder / name).parents[LEVELS::-1]
                )
            )
            found |= {name: self._read(name) for name in missing}
        return [found[name] for name in names]

    def _read(self, name: str) -> bytes | None:
        try:
            return untrusted_input.read_bytes(self.folder / name, LARGEST)
        except FileNotFoundError:
            return None

    def stream(self, name: str) -> Iterator[bytes]:
        with open(self.folder / name, "rb", opener=untrusted_input.opener) as file:
            while part := file.read(PART):
                yield part

    def write(self, name: str, content: bytes) -> None:
        run_folder.write_atomic(self.folder / name, content.decode())

    def publish(self, name: str, file: Path) -> None:
        try:
            file.replace(self.folder / name)
            run_folder.sync_folder((self.folder / name).parent)
        except OSError as error:
            raise run_folder.unwritable(self.folder / name, error) from error

    def note(self, name: str, content: bytes) -> None:
        path = self.folder / name
        partial = path.with_suffix(".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(partial, "wb", opener=untrusted_input.opener) as file:
                file.write(content)
            partial.replace(path)
        except OSError as error:
            raise run_folder.unwritable(path, error) from error
        finally:
            with suppress(OSError):  # Clean up even if a signal interrupts the write.
                partial.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def sizes(self, part: str) -> dict[str, int]:
        folder, found = self.folder / part, dict[str, int]()
        look_again(*folder.parents[LEVELS::-1])
        if not folder.is_dir():
            return {}
        with os.scandir(folder) as entries:
            for entry in entries:
                # Another node may have just removed an earlier job's leftovers.
                with suppress(FileNotFoundError):
                    if not entry.name.endswith(".partial"):
                        found[f"{part}/{entry.name}"] = entry.stat().st_size
        return found

    def describe(self, name: str) -> str:
        return str(self.folder / name)

    def remake(self) -> str:
        """Returns the command that deletes and recreates only this dataset."""
        return f"rm -r {self.folder} && make tokenize"


class BucketDataset:
    """Dataset under an S3 prefix, with a local staging folder."""

    note_every = 5.0  # seconds; each call costs an S3 request

    def __init__(self, folder: Path, address: str) -> None:
        self.folder, self.address = folder, address

    def read(self, name: str) -> bytes | None:
        return s3.read(self.describe(name))

    def read_all(self, names: Iterable[str]) -> list[bytes | None]:
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(self.read, names))

    def stream(self, name: str) -> Iterator[bytes]:
        found = s3.stat(self.describe(name))
        size = found.size if found else 0
        return (
            self.read_range(name, start, min(start + PART, size)) for start in range(0, size, PART)
        )

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Reads bytes [start, end) of an immutable file."""
        return s3.read_range(self.describe(name), start, end)

    def write(self, name: str, content: bytes) -> None:
        s3.write(self.describe(name), content)

    note = write

    def remove(self, name: str) -> None:
        s3.remove(self.describe(name))

    def publish(self, name: str, file: Path) -> None:
        s3.upload(self.describe(name), str(file))
        file.unlink()

    def sizes(self, part: str) -> dict[str, int]:
        start = len(self.address) + 1
        return {
            found.address[start:]: found.size
            for found in s3.list_objects(f"{self.address}/{part}/")
        }

    def describe(self, name: str) -> str:
        return f"{self.address}/{name}"

    def remake(self) -> str:
        return f"aws s3 rm --recursive {self.address}/ && rm -r {self.folder} && make tokenize"


@contextmanager
def only_job(store: DatasetStore) -> Iterator[None]:
    """Claims the dataset for this job for the duration of the `with` block. Raises DataError if
    another job is creating the dataset.
    """
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
            (lock, holder), version = found[0].decode().split(" ", 1), found[1]
            if lock == self.lock or (version == seen and time.monotonic() - since > LAPSE):
                if mine := self._put(version):
                    return mine
            elif not seen:
                print(
                    f"{holder} may be tokenizing this dataset; watching its claim for "
                    f"{LAPSE:.0f} s",
                    flush=True,
                )
                seen = version
            elif version != seen:
                raise _busy(self.address, f"{holder} renewed its claim {POLL:.0f} s ago")
            time.sleep(POLL)
        return mine

    def _put(self, version: str) -> str:
        self.count += 1  # Consecutive writes must differ, so that the ETag changes.
        content = f"{self.lock} {socket.gethostname()} (process {os.getpid()}, claim {self.count})"
        return s3.write_if(self.address, content.encode(), version)

    def _renew(self) -> None:
        while not self.ended.wait(RENEW):
            try:
                version = self._put(self.version)
            # Continue, because other jobs can't take over a claim in an unreachable bucket. The
            # job's own requests will report the problem.
            except S3Error as error:
                print(error, file=sys.stderr, flush=True)
                continue
            if not version:
                print(
                    _busy(self.address, f"this job did not renew its claim for {LAPSE:.0f} s"),
                    file=sys.stderr,
                    flush=True,
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
