"""Files in a folder or below an s3:// prefix, behind one interface.

Datasets (data/dataset_store.py) and checkpoints (checkpoints/store.py) use it. Names are relative
to the folder or prefix, such as `units/00000.json`. Files become visible only once they are
complete, except that `LocalFiles.create` writes in place.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..run import run_folder
from ..run.claims import look_again
from ..trust import untrusted_input
from ..trust.errors import S3Error
from . import s3

BUFFER = 2**20  # file buffer size in bytes, because tensor headers take several small writes
# Maximum bytes that `read` returns. A dataset manifest of a million shards is half as large.
LARGEST = 2**30
# Parent folders to re-list if a file is missing, because another node may have just created them
LEVELS = 2
RANGE = 2**23  # bytes per GET, large enough to make its latency negligible
STREAM_BUFFER = 2**18  # buffer size in bytes of a stream from S3


class LocalFiles:
    """Files in a folder, which may be on a file server that several nodes share.

    `remote` is whether the files are in S3. `folder` is the folder itself, or a local folder for
    copies of files in S3.
    """

    remote = False

    def __init__(self, folder: Path) -> None:
        untrusted_input.seal(folder)
        self.folder = folder

    def describe(self, name: str) -> str:
        """Returns the path or address of a file or folder."""
        return str(self.folder / name)

    def read(self, name: str) -> bytes | None:
        """Returns the content of a small file, or None if the file does not exist."""
        path = self.folder / name
        for _ in range(2):
            with suppress(FileNotFoundError):
                return untrusted_input.read_bytes(path, LARGEST)
            # A file server's client may still cache that the file is missing.
            look_again(*path.parents[LEVELS::-1])
        return None

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Returns bytes [start, end) of a file that never changes."""
        with self.open(name) as file:
            file.seek(start)
            return file.read(end - start)

    def open(self, name: str) -> BinaryIO:
        """Opens only regular files, because a link could lead out of the folder and a pipe could
        block.
        """
        path = self.folder / name
        try:
            descriptor = untrusted_input.opener(str(path), os.O_RDONLY)
        except OSError as error:
            raise (_no_file(path) if untrusted_input.is_in_the_way(error) else error) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _no_file(path)
        return open(descriptor, "rb", buffering=BUFFER)

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Creates a file that is durable once the context ends."""
        path = self.folder / name
        with open(path, "xb", buffering=BUFFER, opener=untrusted_input.opener) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())

    def write(self, name: str, content: bytes, durable: bool = True) -> None:
        """Replaces a small text file atomically. Unless `durable`, a power failure may undo the
        write.
        """
        run_folder.write_atomic(self.folder / name, content.decode(), durable)

    def publish(self, name: str, file: Path) -> None:
        """Moves a complete local file to `name`."""
        try:
            file.replace(self.folder / name)
            run_folder.sync_folder((self.folder / name).parent)
        except OSError as error:
            raise run_folder.unwritable(self.folder / name, error) from error

    def sizes(self, folder: str) -> dict[str, int]:
        """Returns the name and size in bytes of each file in a folder."""
        path, found = self.folder / folder, dict[str, int]()
        look_again(*path.parents[LEVELS::-1])
        for entry in os.scandir(path) if path.is_dir() else ():
            # Another node may have just removed leftovers of an earlier job.
            with suppress(FileNotFoundError):
                if not entry.name.startswith(".") and not entry.name.endswith(".partial"):
                    found[f"{folder}/{entry.name}"] = entry.stat().st_size
        return found

    def folders(self, parent: str = "") -> list[str]:
        """Returns the folders in `parent`, which is "" or ends with a slash."""
        path = self.folder / parent
        return [one.name for one in path.iterdir() if one.is_dir()] if path.is_dir() else []

    def rename(self, old: str, new: str) -> None:
        """Renames a folder: atomically on a file system, file by file in S3."""
        run_folder.sync_folder(self.folder / old)  # The content must be durable first.
        (self.folder / old).rename(self.folder / new)
        run_folder.sync_folder(self.folder)

    def remove(self, name: str) -> None:
        """Removes a file if it exists."""
        (self.folder / name).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        """Removes a folder with all its files if it exists."""
        if (self.folder / name).exists():
            shutil.rmtree(self.folder / name)


class BucketFiles:
    """Objects below an s3:// prefix."""

    remote = True

    def __init__(self, address: str, folder: Path = Path()) -> None:
        self.address, self.folder = address.rstrip("/"), folder

    def describe(self, name: str) -> str:
        return f"{self.address}/{name}"

    def read(self, name: str) -> bytes | None:
        return s3.read(self.describe(name), LARGEST)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        return s3.read_range(self.describe(name), start, end)

    def open(self, name: str) -> BinaryIO:
        if found := s3.stat(self.describe(name)):
            return open_object(found)
        raise FileNotFoundError(errno.ENOENT, "the object does not exist", self.describe(name))

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        return cast(AbstractContextManager[BinaryIO], upload_stream(self.describe(name)))

    def write(self, name: str, content: bytes, durable: bool = True) -> None:
        s3.write(self.describe(name), content)

    def publish(self, name: str, file: Path) -> None:
        upload(self.describe(name), file)
        file.unlink()

    def sizes(self, folder: str) -> dict[str, int]:
        start = len(self.describe(""))
        return {
            found.address[start:]: found.size
            for found in s3.list_objects(self.describe(f"{folder}/"))
        }

    def folders(self, parent: str = "") -> list[str]:
        return s3.list_folders(self.describe(parent))

    def rename(self, old: str, new: str) -> None:
        for name in self.sizes(old):
            s3.copy(self.describe(name), self.describe(name.replace(old, new, 1)))
            self.remove(name)

    def remove(self, name: str) -> None:
        s3.remove(self.describe(name))

    def remove_folder(self, name: str) -> None:
        s3.remove_all(map(self.describe, self.sizes(name)))


Files = LocalFiles | BucketFiles


def _no_file(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "it is not a plain file", str(path))


@contextmanager
def upload_stream(address: str) -> Iterator[Upload]:
    """Opens a stream that becomes an object when the context ends. On an error, no object is
    created.
    """
    stream = Upload(address)
    try:
        yield stream
        stream.finish()
    except BaseException:
        stream.abort()
        raise


def upload(address: str, source: Path) -> str:
    """Uploads a local file and returns the ETag of the object, which becomes visible once
    complete.
    """
    with (
        open(source, "rb", opener=untrusted_input.opener) as file,
        upload_stream(address) as stream,
    ):
        shutil.copyfileobj(file, stream, s3.PART)
    return stream.version


def open_object(found: s3.Object, start: int = 0) -> BinaryIO:
    """Opens a buffered, seekable stream that prefetches an object.

    Reads raise S3Error if the object has changed since it was listed.
    """
    stream = io.BufferedReader(Ranges(found), STREAM_BUFFER)
    stream.seek(start)
    return stream


class Upload(io.RawIOBase):
    """Write stream of an object. Large objects are sent in parallel parts, so that memory holds
    only a few of them.
    """

    def __init__(self, address: str) -> None:
        self.address, self.waiting, self.id, self.version = address, bytearray(), "", ""
        self.threads = ThreadPoolExecutor(s3.AT_ONCE)
        self.sent: list[Future[dict[str, Any]]] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.waiting += data
        while len(self.waiting) >= s3.PART:
            self._send(bytes(self.waiting[: s3.PART]))
            del self.waiting[: s3.PART]
        return len(data)

    def finish(self) -> None:
        """Completes the upload. The object is visible once this returns."""
        if self.id:
            self._send(bytes(self.waiting))
            parts = {"Parts": [part.result() for part in self.sent]}
            done = s3.request(
                "complete_multipart_upload", self.address, UploadId=self.id, MultipartUpload=parts
            )
            self.version = str(done["ETag"])
        else:
            self.version = s3.write(self.address, bytes(self.waiting))
        self.threads.shutdown()

    def abort(self) -> None:
        """Removes the uploaded parts. If S3 is unreachable, they remain until
        `s3.abort_uploads`.
        """
        self.threads.shutdown(cancel_futures=True)
        if self.id:
            with suppress(S3Error):
                s3.request("abort_multipart_upload", self.address, UploadId=self.id)

    def _send(self, part: bytes) -> None:
        self.id = self.id or s3.request("create_multipart_upload", self.address)["UploadId"]
        if len(self.sent) >= s3.AT_ONCE:
            # Wait for an earlier part, to bound memory use and to raise its error.
            self.sent[-s3.AT_ONCE].result()
        self.sent.append(self.threads.submit(self._put, part, len(self.sent) + 1))

    def _put(self, part: bytes, number: int) -> dict[str, Any]:
        answer = s3.request(
            "upload_part", self.address, UploadId=self.id, PartNumber=number, Body=part
        )
        checksums = {
            name: value
            for name, value in answer.items()
            if name.startswith("Checksum") and name != "ChecksumType"
        }
        return {"PartNumber": number, "ETag": answer["ETag"], **checksums}


class Ranges(io.RawIOBase):
    """Raw read stream of an object. Requests RANGE bytes at a time, with prefetching."""

    def __init__(self, found: s3.Object) -> None:
        self.found, self.length, self.at = found, found.size, 0
        self.threads = ThreadPoolExecutor(s3.AT_ONCE)
        self.fetch = lru_cache(s3.AT_ONCE + 1)(
            lambda index: self.threads.submit(self._fetch, index)
        )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence]
        if self.at < 0:
            raise ValueError("the position is before the start of the file")
        return self.at

    def readinto(self, buffer: Any) -> int:
        if self.at >= self.length:
            return 0
        index = self.at // RANGE
        content = self.fetch(index).result()
        # Prefetch less at the start, because some readers need only the first range.
        for ahead in range(index + 1, index + 1 + min(index + 1, s3.AT_ONCE)):
            if ahead * RANGE < self.length:
                self.fetch(ahead)
        part = content[self.at % RANGE :][: len(buffer)]
        buffer[: len(part)] = part
        self.at += len(part)
        return len(part)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.fetch.cache_clear()  # A reference cycle would keep ranges until garbage collection.
        super().close()

    def _fetch(self, index: int) -> bytes:
        bounds = index * RANGE, min((index + 1) * RANGE, self.length)
        return s3.read_range(self.found.address, *bounds, self.found.version)
