"""Checkpoints in S3, or in any server of its protocol (AWS_ENDPOINT_URL).

    s3://bucket/prefix/<run>/
      step-00000100/committed.json             the marker, written last, removed first: what has one exists
      step-00000050.broken/committed.json      of one that a resume found damaged
      parts-0 ... parts-f/step-00000100/...    its files, spread by their names

An object appears whole or not at all, so nothing needs a hidden name. S3 splits its capacity (3,500 writes a second for each
prefix) by the beginning of keys: the sixteen `parts-` stay the same from save to save, so that what it has split stays split.
https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html
"""

from __future__ import annotations

import errno
import io
import os
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Any, BinaryIO, cast

from ..errors import RunError
from ..runs import step_name
from .marker import MARKER, MARKER_BYTES
from .store import BROKEN, NAME, S3

SPREAD = 16
PART = 2**24  # bytes of a part of a large object; S3 takes 10,000 of them
AT_ONCE = 4  # parts of one object on their way: enough for the bandwidth of a node whose ranks all write
TRIES = "10"  # of a request: S3 asks for patience with 503 while it splits a prefix; about a minute in all
ABSENT = ("404", "NoSuchKey", "NotFound")
LISTED = 10**6  # entries of one listing: ten thousand ranks' files are far fewer, and a server may go on for ever


class Bucket:
    """Checkpoints below an s3:// address."""

    def __init__(self, address: str) -> None:
        self.bucket, _, prefix = address.removeprefix(S3).partition("/")
        self.prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""

    @cached_property
    def client(self) -> Any:
        """Retries by itself: throttling, 5xx and broken connections, with back-off and jitter."""
        try:
            import boto3
            from botocore.config import Config
        except ImportError as error:
            raise RunError(
                "needs the package boto3", where=f"{S3}{self.bucket}", why=str(error), next="pip install boto3"
            ) from error
        tries = int(os.environ.get("AWS_MAX_ATTEMPTS", TRIES))
        config = Config(retries={"mode": "standard", "total_max_attempts": tries}, max_pool_connections=4 * AT_ONCE)
        return boto3.session.Session().client("s3", config=config)

    def steps(self) -> list[int]:
        return self._numbers(NAME)

    def broken(self) -> list[int]:
        return self._numbers(BROKEN)

    def address(self, step: int) -> str:
        return f"{S3}{self.bucket}/{self.prefix}{step_name(step)}"

    def marker(self, step: int) -> str | None:
        key = self._marker(step)
        with self._told(key):
            try:
                return cast(bytes, self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read(MARKER_BYTES + 1)).decode(
                    errors="replace"
                )
            except self.client.exceptions.ClientError as error:
                if _code(error) in ABSENT:
                    return None
                raise

    def size(self, step: int, file: str) -> int | None:
        key = self._part(step, file)
        with self._told(key):
            try:
                return int(self.client.head_object(Bucket=self.bucket, Key=key)["ContentLength"])
            except self.client.exceptions.ClientError as error:
                if _code(error) in ABSENT:
                    return None
                raise

    def open(self, step: int, file: str) -> BinaryIO:
        """By a temporary file: readers of checkpoints seek, and a broken connection is then S3's client's to mend."""
        key = self._part(step, file)
        copy = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
        with self._told(key):
            self.client.download_fileobj(self.bucket, key, copy)
        copy.seek(0)
        return cast(BinaryIO, copy)

    def begin(self, step: int) -> None:
        self._delete([self._marker(step)])
        self.abandon(step)

    @contextmanager
    def create(self, step: int, file: str) -> Iterator[BinaryIO]:
        key = self._part(step, file)
        with self._told(key):
            upload = Upload(self.client, self.bucket, key)
            try:
                yield cast(BinaryIO, upload)
                upload.finish()
            except BaseException:
                upload.abort()
                raise

    def commit(self, step: int, marker: str) -> None:
        key = self._marker(step)
        with self._told(key):
            self.client.put_object(Bucket=self.bucket, Key=key, Body=marker.encode())

    def abandon(self, step: int) -> None:
        for parts in self._spread():
            self._delete(self._keys(f"{parts}{step_name(step)}/"))

    def remove(self, step: int) -> None:
        self._delete([self._marker(step)])
        self.abandon(step)

    def set_aside(self, step: int) -> None:
        key = self._marker(step)
        with self._told(key):
            aside = f"{self.prefix}{step_name(step)}.broken/{MARKER}"
            self.client.copy_object(Bucket=self.bucket, Key=aside, CopySource={"Bucket": self.bucket, "Key": key})
        self._delete([key])

    def remove_broken(self, step: int) -> None:
        if step not in self.steps():  # a good one of that step has its files in the same place
            self.abandon(step)
        self._delete([f"{self.prefix}{step_name(step)}.broken/{MARKER}"])

    def sweep(self) -> None:
        for parts in self._spread():
            for upload in self._pages("list_multipart_uploads", "Uploads", "Key", parts):
                self.client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        begun = {name for parts in self._spread() for name in self._folders(parts)}
        kept = {step_name(step) for step in (*self.steps(), *self.broken())}
        for name in begun - kept:
            if match := NAME.fullmatch(name):
                self.abandon(int(match[1]))

    def free(self) -> int | None:
        return None

    def _marker(self, step: int) -> str:
        return f"{self.prefix}{step_name(step)}/{MARKER}"

    def _part(self, step: int, file: str) -> str:
        return f"{self.prefix}parts-{zlib.crc32(file.encode()) % SPREAD:x}/{step_name(step)}/{file}"

    def _spread(self) -> list[str]:
        return [f"{self.prefix}parts-{number:x}/" for number in range(SPREAD)]

    def _numbers(self, name: Any) -> list[int]:
        return sorted(int(match[1]) for match in map(name.fullmatch, self._folders(f"{self.prefix}")) if match)

    def _folders(self, prefix: str) -> list[str]:
        found = self._pages("list_objects_v2", "CommonPrefixes", "Prefix", prefix, Delimiter="/")
        return [entry["Prefix"].removeprefix(prefix).rstrip("/") for entry in found]

    def _keys(self, prefix: str) -> list[str]:
        return [entry["Key"] for entry in self._pages("list_objects_v2", "Contents", "Key", prefix)]

    def _pages(self, request: str, content: str, name: str, prefix: str, **more: str) -> list[dict[str, Any]]:
        """The entries of a listing, whose `name` begins with `prefix`: what a listing names may be deleted."""
        found: list[dict[str, Any]] = []
        with self._told(prefix):
            for page in self.client.get_paginator(request).paginate(Bucket=self.bucket, Prefix=prefix, **more):
                entries = page.get(content, [])
                if astray := [entry.get(name) for entry in entries if not str(entry.get(name)).startswith(prefix)]:
                    raise OSError(errno.EBADMSG, f"S3's listing names {astray[0]!r}, which is elsewhere", self._full(prefix))
                found += entries
                if len(found) > LISTED:
                    raise OSError(errno.EBADMSG, f"S3's listing has more than {LISTED:,} entries", self._full(prefix))
        return found

    def _full(self, key: str) -> str:
        return f"{S3}{self.bucket}/{key}"

    def _delete(self, keys: list[str]) -> None:
        """Removes objects, a thousand a request; one that is not there counts as removed."""
        for first in range(0, len(keys), 1000):
            some = [{"Key": key} for key in keys[first : first + 1000]]
            with self._told(some[0]["Key"]):
                answer = self.client.delete_objects(Bucket=self.bucket, Delete={"Objects": some, "Quiet": True})
                if errors := answer.get("Errors"):
                    raise OSError(errno.EIO, f"S3: {errors[0].get('Code')}: {errors[0].get('Message')}", errors[0].get("Key"))

    @contextmanager
    def _told(self, key: str) -> Iterator[None]:
        """What S3 refuses for good, as the error that a disk would give."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError, Boto3Error) as error:
            raise OSError(errno.EIO, f"S3: {error}", self._full(key)) from error


class Upload(io.RawIOBase):
    """One object on its way: large ones in parts, several at once, so that memory holds a few parts and not the object."""

    def __init__(self, client: Any, bucket: str, key: str) -> None:
        self.client, self.where = client, {"Bucket": bucket, "Key": key}
        self.waiting = bytearray()
        self.upload_id = ""
        self.threads = ThreadPoolExecutor(AT_ONCE)
        self.sent: list[Future[dict[str, Any]]] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.waiting += data
        while len(self.waiting) >= PART:
            self._send(bytes(self.waiting[:PART]))
            del self.waiting[:PART]
        return len(data)

    def finish(self) -> None:
        """Returns when S3 has all of it; it is in sight from then on."""
        if not self.upload_id:
            self.client.put_object(**self.where, Body=bytes(self.waiting))
        else:
            self._send(bytes(self.waiting))
            parts = [part.result() for part in self.sent]
            self.client.complete_multipart_upload(**self.where, UploadId=self.upload_id, MultipartUpload={"Parts": parts})
        self.threads.shutdown()

    def abort(self) -> None:
        """Leaves nothing of it; what even that leaves, as S3 is away, the next sweep takes."""
        from botocore.exceptions import BotoCoreError, ClientError

        self.threads.shutdown(cancel_futures=True)
        if self.upload_id:
            try:
                self.client.abort_multipart_upload(**self.where, UploadId=self.upload_id)
            except (BotoCoreError, ClientError):
                pass

    def _send(self, part: bytes) -> None:
        if not self.upload_id:
            self.upload_id = self.client.create_multipart_upload(**self.where)["UploadId"]
        if len(self.sent) >= AT_ONCE:
            self.sent[-AT_ONCE].result()  # raises what went wrong, and bounds the memory
        number = len(self.sent) + 1
        self.sent.append(self.threads.submit(self._put, part, number))

    def _put(self, part: bytes, number: int) -> dict[str, Any]:
        answer = self.client.upload_part(**self.where, UploadId=self.upload_id, PartNumber=number, Body=part)
        checksums = {name: value for name, value in answer.items() if name.startswith("Checksum") and name != "ChecksumType"}
        return {"PartNumber": number, "ETag": answer["ETag"], **checksums}


def _code(error: Any) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
