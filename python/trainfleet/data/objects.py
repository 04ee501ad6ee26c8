"""Files in S3, or in any server that speaks its protocol (AWS_ENDPOINT_URL): listed, read by ranges, written whole.

Every request is tried again with exponential back-off and jitter when the server is busy or a connection breaks; what fails for
good is named with its bucket, key and cause.
"""

from __future__ import annotations

import io
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import islice
from typing import Any, BinaryIO, TypeVar, cast

from ..errors import DataError
from .storage import BUFFER, S3, File

RANGE = 2**23  # bytes of a GET: large enough that its latency does not count
PAGES = 10_000  # of a listing, a thousand objects each; a server may go on for ever
TRIES = 8  # with the pauses below, about a minute
PAUSE = (0.2, 20.0)  # seconds: the first, doubled each time, and the longest
FOR_GOOD = {
    "403": "access is denied",
    "AccessDenied": "access is denied",
    "InvalidAccessKeyId": "the access key is not known",
    "SignatureDoesNotMatch": "the secret key is wrong",
    "404": "there is no such object",
    "NoSuchKey": "there is no such object",
    "NoSuchBucket": "there is no such bucket",
    "412": "it changed after the work was planned",
    "PreconditionFailed": "it changed after the work was planned",
    "NotImplemented": "this server knows no conditional writes, which keep two jobs apart",
}
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
GONE = ("404", "NoSuchKey")
CHANGED = ("412", "PreconditionFailed")
T = TypeVar("T")


def list_files(source: str, suffixes: tuple[str, ...]) -> list[File]:
    """The objects below a prefix that have a known suffix, or the one object of that name; sorted as S3 lists them."""
    bucket, prefix = split(source)
    found = [file for file in list_prefix(source) if file.path.endswith(suffixes)]
    exact = [file for file in found if file.path == source]
    folder = f"{S3}{bucket}/{prefix.rstrip('/')}/" if prefix else source
    return exact or [file for file in found if file.path.startswith(folder)]


def list_prefix(prefix: str) -> list[File]:
    """Every object whose address begins so."""
    bucket, key = split(prefix)

    def pages() -> list[dict[str, Any]]:
        found = list(islice(client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key), PAGES + 1))
        if len(found) > PAGES:
            raise DataError(f"has more than {PAGES:,} pages of objects", where=prefix, next="name a longer prefix")
        return found

    contents = [entry for page in attempt(pages, prefix) for entry in page.get("Contents", [])]
    return [_listed(bucket, key, entry) for entry in contents]


def _listed(bucket: str, prefix: str, entry: dict[str, Any]) -> File:
    """An entry of a listing as a file, when it is one that was asked for: its name goes on to be a path."""
    key, size = str(entry.get("Key")), entry.get("Size")
    inside = key.startswith(prefix) and ".." not in key.split("/") and not CONTROL.search(key)
    if not inside or not isinstance(size, int) or size < 0:
        why = f"the listing has {key!r} of {size!r} bytes, which is no object below it"
        raise DataError(
            "S3's answer is not to be believed", where=f"{S3}{bucket}/{prefix}", why=why, next="aws s3 ls, and rename it"
        )
    return File(f"{S3}{bucket}/{key}", size, str(entry.get("ETag", "")))


def stat(path: str) -> File:
    """Size and ETag of an object. DataError when there is none."""
    bucket, key = split(path)
    head = attempt(lambda: client().head_object(Bucket=bucket, Key=key), path)
    return File(path, head["ContentLength"], head["ETag"])


def read_range(file: File, start: int, end: int) -> bytes:
    """Bytes [start, end) of an object. DataError when it is no longer the version that was listed."""
    bucket, key = split(file.path)

    unchanged = {"IfMatch": file.version} if file.version else {}

    def get() -> bytes:
        answer = client().get_object(Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}", **unchanged)
        content = cast(bytes, answer["Body"].read())
        if len(content) != end - start:
            raise ConnectionError(f"{len(content)} bytes came instead of {end - start}")
        return content

    return attempt(get, f"{file.path} (bytes {start} to {end})") if end > start else b""


def read(path: str) -> bytes | None:
    """The whole of a small object; None when there is none."""
    found = read_version(path)
    return found and found[0]


def write(path: str, content: bytes) -> None:
    """Puts a small object; others see the old one or the whole new one."""
    bucket, key = split(path)
    attempt(lambda: client().put_object(Bucket=bucket, Key=key, Body=content), path)


def read_version(path: str) -> tuple[bytes, str] | None:
    """A small object and its ETag; None when there is none."""
    bucket, key = split(path)

    def get() -> tuple[bytes, str] | None:
        answer = _unless(GONE, lambda: client().get_object(Bucket=bucket, Key=key))
        return answer and (answer["Body"].read(), answer["ETag"])

    return attempt(get, path)


def write_if(path: str, content: bytes, version: str) -> str:
    """Puts a small object in place of the one with the ETag `version`, "" for none; its own ETag. "" when another was there."""
    bucket, key = split(path)
    condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}

    def put() -> str:
        answer = _unless(GONE + CHANGED, lambda: client().put_object(Bucket=bucket, Key=key, Body=content, **condition))
        return str(answer["ETag"]) if answer else ""

    return attempt(put, path)


def remove(path: str, version: str = "") -> None:
    """Deletes an object, if it is there; with an ETag only the one that has it."""
    bucket, key = split(path)
    condition = {"IfMatch": version} if version else {}
    attempt(lambda: _unless(GONE + CHANGED, lambda: client().delete_object(Bucket=bucket, Key=key, **condition)), path)


def upload(path: str, source: str) -> None:
    """Puts a local file, in parts when it is large; nothing is visible before all of it is there."""
    bucket, key = split(path)
    attempt(lambda: client().upload_file(source, bucket, key), path)


def open_object(file: File, start: int) -> BinaryIO:
    """A buffered stream over an object that reads ahead."""
    stream = io.BufferedReader(_Ranges(file), BUFFER)
    stream.seek(start)
    return stream


def split(address: str) -> tuple[str, str]:
    """Bucket and key."""
    bucket, _, key = address.removeprefix(S3).partition("/")
    return bucket, key


def attempt(request: Callable[[], T], where: str) -> T:
    """The request's answer, after as many tries as it takes. DataError when it fails for good or too often."""
    import boto3.exceptions
    import botocore.exceptions

    pause = PAUSE[0]
    for number in range(1, TRIES + 1):
        try:
            return request()
        except (botocore.exceptions.NoCredentialsError, botocore.exceptions.PartialCredentialsError) as error:
            remedy = "set AWS_PROFILE or AWS_ACCESS_KEY_ID, or run on an instance with a role"
            raise DataError("can't be reached without credentials", where=where, why=str(error), next=remedy) from error
        except (
            botocore.exceptions.BotoCoreError,
            botocore.exceptions.ClientError,
            boto3.exceptions.Boto3Error,
            OSError,
        ) as error:
            answer = getattr(error, "response", {}).get("Error", {})
            code = str(answer.get("Code", ""))
            if code in FOR_GOOD:
                raise _refused(where, f"{FOR_GOOD[code]} ({code})") from error
            if number == TRIES:
                raise _refused(
                    where, f"{code} {answer['Message']}, {number} times" if answer else f"{error}, {number} times"
                ) from error
        time.sleep(pause * random.uniform(0.5, 1))
        pause = min(2 * pause, PAUSE[1])
    raise AssertionError("unreachable")


def _unless(codes: tuple[str, ...], request: Callable[[], T]) -> T | None:
    """The request's answer; None when it is an error of one of these codes."""
    import botocore.exceptions

    try:
        return request()
    except botocore.exceptions.ClientError as error:
        if error.response["Error"]["Code"] in codes:
            return None
        raise


@cache
def client() -> Any:
    """One S3 client a process; it is safe to share between threads."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        what = "needs the package boto3 to be read"
        raise DataError(what, where="s3://", why=str(error), next="pip install boto3") from error
    once = {"total_max_attempts": 1}  # `attempt` tries again, and knows what for
    return boto3.session.Session().client("s3", config=Config(retries=once, connect_timeout=10, read_timeout=30))


def _refused(where: str, why: str) -> DataError:
    return DataError("S3 refuses the request", where=where, why=why, next=f"aws s3 ls {where.split(' ')[0]}")


class _Ranges(io.RawIOBase):
    """An object as a raw stream: ranges of RANGE bytes, the next one fetched while this one is read."""

    def __init__(self, file: File) -> None:
        self.file, self.at = file, 0
        self.threads = ThreadPoolExecutor(1)
        self.ranges: dict[int, Future[bytes]] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.file.size}[whence]
        self.at = base + offset
        return self.at

    def readinto(self, buffer: Any) -> int:
        if self.at >= self.file.size:
            return 0
        first = self.at // RANGE
        content = self._range(first).result()
        if (first + 1) * RANGE < self.file.size:
            self._range(first + 1)
        self.ranges = {index: future for index, future in self.ranges.items() if index in (first, first + 1)}
        part = content[self.at - first * RANGE :][: len(buffer)]
        buffer[: len(part)] = part
        self.at += len(part)
        return len(part)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _range(self, index: int) -> Future[bytes]:
        if index not in self.ranges:
            end = min((index + 1) * RANGE, self.file.size)
            self.ranges[index] = self.threads.submit(read_range, self.file, index * RANGE, end)
        return self.ranges[index]
