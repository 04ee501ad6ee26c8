"""Streams large objects to and from S3: uploads in parts, downloads in ranges."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, BinaryIO, cast

from ..trust.errors import S3Error
from . import s3

RANGE = 2**23  # bytes per GET, large enough to make its latency negligible
BUFFER = 2**18


@contextmanager
def create(address: str) -> Iterator[BinaryIO]:
    """Opens a stream that becomes an object when the context ends. After an error, no object is
    created.
    """
    stream = Upload(address)
    try:
        yield cast(BinaryIO, stream)
        stream.finish()
    except BaseException:
        stream.abort()
        raise


def open_object(found: s3.Object, start: int = 0) -> BinaryIO:
    """Opens a buffered, seekable stream that prefetches an object.

    Reads raise S3Error if the object has changed since it was listed.
    """
    stream = io.BufferedReader(Ranges(found), BUFFER)
    stream.seek(start)
    return stream


class Upload(io.RawIOBase):
    """Uploads an object. Large objects are sent in parallel parts, so that memory holds only a few
    of them.
    """

    def __init__(self, address: str) -> None:
        self.address, self.waiting, self.id = address, bytearray(), ""
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
            s3.request(
                "complete_multipart_upload", self.address, UploadId=self.id, MultipartUpload=parts
            )
        else:
            s3.write(self.address, bytes(self.waiting))
        self.threads.shutdown()

    def abort(self) -> None:
        """Removes the uploaded parts. If S3 can't be reached, they remain until abort_uploads."""
        self.threads.shutdown(cancel_futures=True)
        if self.id:
            with suppress(S3Error):
                s3.request("abort_multipart_upload", self.address, UploadId=self.id)

    def _send(self, part: bytes) -> None:
        self.id = self.id or s3.request("create_multipart_upload", self.address)["UploadId"]
        if len(self.sent) >= s3.AT_ONCE:
            # Wait for an earlier part, to limit the memory and to raise its error.
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
    """Reads an object as a raw stream, in ranges of RANGE bytes. The next range is prefetched."""

    def __init__(self, found: s3.Object) -> None:
        self.found, self.length, self.at = found, found.size, 0
        self.threads = ThreadPoolExecutor(1)
        self.fetch = lru_cache(2)(lambda index: self.threads.submit(self._fetch, index))

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
        if (index + 1) * RANGE < self.length:
            self.fetch(index + 1)
        part = content[self.at % RANGE :][: len(buffer)]
        buffer[: len(part)] = part
        self.at += len(part)
        return len(part)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _fetch(self, index: int) -> bytes:
        bounds = index * RANGE, min((index + 1) * RANGE, self.length)
        return s3.read_range(self.found.address, *bounds, self.found.version)
