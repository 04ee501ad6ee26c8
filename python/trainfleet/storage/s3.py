"""Access to S3 or a compatible server (AWS_ENDPOINT_URL) for sources, datasets, checkpoints and run
folders.

An object is identified by its address, s3://bucket/key. boto3 retries a request if S3 is busy or
the connection breaks: ten attempts, which take about a minute, or AWS_MAX_ATTEMPTS. A permanent
failure raises S3Error with the address, the cause and the next command. boto3 is imported at the
first request.

Responses are validated. A listing may contain only names below its prefix, and is limited in
length. An object may not be larger than its reader allows.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

from ..process.install_paths import installing_package
from ..trust.errors import S3Error
from ..trust.secrets import is_keyless

SCHEME = "s3://"
# attempts per request with boto3's backoff and jitter; S3 returns 503 while it splits a prefix
TRIES = 10
# timeouts in seconds to connect, and between bytes of a response; S3 sends whitespace while it
# works
CONNECT, ANSWER = 10, 20
# attempts per request that times out; a wrong endpoint would otherwise block for minutes
SILENCES = 3
PART = 2**24  # part size in bytes of a large object, which may have 10,000 parts
# parallel parts per object, enough to use a node's full bandwidth while all ranks write
AT_ONCE = 4
SMALL = 2**28  # default maximum size in bytes of an object that is read into memory
LARGEST = (
    2**46
    # Maximum object size in bytes. S3 allows 50 TB:
    # https://docs.aws.amazon.com/AmazonS3/latest/userguide/upload-objects.html
)
LISTED = 10**7  # maximum entries per listing, because a faulty server may never end it
BATCH = 1000  # maximum objects that S3 removes per request
# Every page of a listing contains at least one of these keys.
LISTING = {"IsTruncated", "KeyCount", "Name", "Contents", "CommonPrefixes", "Uploads"}
# Response field that a proxy's page would lack, per operation; defaults to ETag
PROOFS = {
    "create_multipart_upload": "UploadId",
    "copy_object": "CopyObjectResult",
    "delete_object": "ResponseMetadata",
    "abort_multipart_upload": "ResponseMetadata",
}
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
ABSENT = ("404", "NoSuchKey", "NotFound")
CHANGED = ("412", "PreconditionFailed")
CREDENTIALS = "set AWS_PROFILE or AWS_ACCESS_KEY_ID, or run on an instance with a role"
REASONS = {
    **dict.fromkeys(("403", "AccessDenied"), "access is denied"),
    **dict.fromkeys(ABSENT, "the object does not exist"),
    **dict.fromkeys(CHANGED, "the object has changed since it was listed"),
    "NoSuchBucket": "the bucket does not exist",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "InvalidObjectState": "the object is archived (Glacier); restore it first",
    "NotImplemented": "this server does not support conditional writes, which keep jobs apart",
}
ELSEWHERE = (
    "301",
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
)
OF_CREDENTIALS = {
    "InvalidAccessKeyId": "the access key does not exist",
    "SignatureDoesNotMatch": "the secret key is wrong",
    "ExpiredToken": "the credentials have expired",
}


@dataclass(frozen=True)
class Object:
    """Object in a listing. `version` is its ETag, and `modified` its last modification time
    (Unix) by S3's clock.
    """

    address: str
    size: int
    version: str
    modified: float = 0.0


def list_objects(prefix: str) -> list[Object]:
    """Returns all objects with an address that starts with `prefix`, ordered by key."""
    bucket = split(prefix)[0]
    entries = _pages("list_objects_v2", "Contents", prefix)
    return [_object(f"{SCHEME}{bucket}/{entry['Key']}", entry) for entry in entries]


def list_folders(prefix: str) -> list[str]:
    """Returns the distinct key parts between `prefix` and the next slash."""
    begins = len(split(prefix)[1])
    return [
        entry["Prefix"][begins:-1]
        for entry in _pages("list_objects_v2", "CommonPrefixes", prefix, Delimiter="/")
    ]


def stat(address: str) -> Object | None:
    """Returns an object's size and ETag, or None if it does not exist."""
    head = request("head_object", address, unless=ABSENT)
    return head and Object(address, head["ContentLength"], head["ETag"])


def read(address: str, most: int = SMALL) -> bytes | None:
    """Returns an object of at most `most` bytes, or None if it does not exist."""
    found = read_version(address, most)
    return found and found[0]


def read_version(address: str, most: int = SMALL) -> tuple[bytes, str] | None:
    """Returns an object as `read` does, with its ETag."""
    return _get(address, most, unless=ABSENT)


def read_range(
    address: str, start: int, end: int, version: str = "", unless: tuple[str, ...] = ()
) -> bytes:
    """Returns bytes [start, end) of an object, or b"" if S3 responds with an error code in
    `unless`.

    Raises S3Error if the bytes do not exist, or if `version` is given and differs from the object's
    ETag.
    """
    if end <= start:
        return b""
    unchanged: dict[str, Any] = {"IfMatch": version} if version else {}
    found = _get(address, end - start, unless=unless, Range=f"bytes={start}-{end - 1}", **unchanged)
    if found is None:
        return b""
    if len(found[0]) != end - start:
        raise _unbelievable(
            address, f"requested bytes {start} to {end}, received {len(found[0]):,} bytes"
        )
    return found[0]


def write(address: str, content: bytes, **condition: str) -> str:
    """Writes a small object atomically. Returns its ETag, or "" if its condition failed."""
    unless = ABSENT + CHANGED if condition else ()
    answer = request("put_object", address, unless=unless, Body=content, **condition)
    return str(answer["ETag"]) if answer else ""


def write_if(address: str, content: bytes, version: str) -> str:
    """Writes a small object if its current ETag is `version`, or if `version` is "" and the object
    does not exist. Returns as `write` does.
    """
    return write(address, content, **({"IfMatch": version} if version else {"IfNoneMatch": "*"}))


def copy(source: str, address: str) -> None:
    """Copies an object within S3 to `address`."""
    bucket, key = split(source)
    request("copy_object", address, CopySource={"Bucket": bucket, "Key": key})


def remove(address: str, version: str = "") -> None:
    """Removes an object if it exists and, with `version`, only if its ETag matches."""
    request(
        "delete_object",
        address,
        unless=ABSENT + CHANGED,
        **({"IfMatch": version} if version else {}),
    )


def remove_all(addresses: Iterable[str]) -> None:
    """Removes objects of one bucket, BATCH per request. Missing objects are ignored."""
    found = list(addresses)
    for first in range(0, len(found), BATCH):
        some = found[first : first + BATCH]
        entries = {"Objects": [{"Key": split(address)[1]} for address in some], "Quiet": True}
        with explained(some[0]):
            answer = client().delete_objects(Bucket=split(some[0])[0], Delete=entries)
        for error in answer.get("Errors", []):
            address = f"{SCHEME}{split(some[0])[0]}/{error.get('Key', '')}"
            raise _refused(address, f"{error.get('Code')}: {error.get('Message')}")


def abort_uploads(prefix: str) -> None:
    """Removes the parts of all unfinished uploads below `prefix`, because S3 bills for them."""
    for entry in _pages("list_multipart_uploads", "Uploads", prefix):
        request(
            "abort_multipart_upload",
            f"{SCHEME}{split(prefix)[0]}/{entry['Key']}",
            UploadId=entry["UploadId"],
        )


def clock(address: str) -> float:
    """Returns the current time by S3's clock (unix), comparable with `Object.modified`."""
    with explained(address):
        answer = client().head_bucket(Bucket=split(address)[0])
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()


def split(address: str) -> tuple[str, str]:
    """Splits an address into bucket and key."""
    bucket, _, key = address.removeprefix(SCHEME).partition("/")
    return bucket, key


def request(call: str, address: str, *, unless: tuple[str, ...] = (), **words: Any) -> Any:
    """Sends one request about an object. Returns None if S3 responds with an error code in
    `unless`.
    """
    bucket, key = split(address)
    with explained(address):
        from botocore.exceptions import ClientError

        try:
            answer = getattr(client(), call)(Bucket=bucket, Key=key, **words)
        except ClientError as error:
            if error.response["Error"].get("Code") in unless:
                return None
            raise
        if not answer.get(field := PROOFS.get(call, "ETag")):
            raise _unbelievable(address, f"the response has no {field}")
        return answer


@contextmanager
def explained(address: str) -> Iterator[None]:
    """Converts boto3's errors inside the `with` block to S3Error."""
    if is_keyless():
        raise S3Error("S3 needs credentials", where=address, next=CREDENTIALS)
    client()  # Raises S3Error if boto3 is not installed.
    from botocore import exceptions as boto
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

    try:
        yield
    except (boto.NoCredentialsError, boto.CredentialRetrievalError) as error:
        raise S3Error(
            "S3 needs credentials", where=address, why=str(error), next=CREDENTIALS
        ) from error
    except (ClientError, BotoCoreError) as error:
        if answer := getattr(error, "response", None):
            raise _refused(address, _reason(answer), str(answer["Error"].get("Code"))) from error
        silent = isinstance(error, (boto.ConnectTimeoutError, boto.ReadTimeoutError))
        often = (
            f", {SILENCES if silent else TRIES} times" if isinstance(error, HTTPClientError) else ""
        )
        raise S3Error(
            "S3 sent no valid response", where=address, why=f"{error}{often}", next=_look(address)
        ) from error
    except (
        LookupError,
        TypeError,
        ValueError,
    ) as error:  # invalid numbers, times or missing fields in a response
        raise _unbelievable(address, f"can't parse it: {type(error).__name__}: {error}") from error


def client() -> Any:
    """Returns this process's S3 client. Threads may share it, but forked processes may not."""
    return _client(os.getpid())


def _get(
    address: str, most: int, *, unless: tuple[str, ...] = (), **words: Any
) -> tuple[bytes, str] | None:
    """Returns the body and ETag of a GET. Retries interrupted bodies, because boto3 does not."""
    for left in reversed(range(TRIES)):
        if (answer := request("get_object", address, unless=unless, **words)) is None:
            return None
        if answer["ContentLength"] > most:
            raise _unbelievable(
                address, f"{answer['ContentLength']:,} bytes received, at most {most:,} expected"
            )
        with explained(address):
            from botocore.exceptions import HTTPClientError, IncompleteReadError, ReadTimeoutError

            try:
                return answer["Body"].read(), answer["ETag"]
            except (HTTPClientError, IncompleteReadError) as error:
                if not left or (isinstance(error, ReadTimeoutError) and left <= TRIES - SILENCES):
                    raise
    raise AssertionError("unreachable")


def _pages(call: str, content: str, prefix: str, **words: str) -> list[dict[str, Any]]:
    """Returns a listing's entries. Rejects names outside `prefix`, because callers turn names into
    local paths or delete the objects.
    """
    (bucket, key), found = split(prefix), list[dict[str, Any]]()
    with explained(prefix):
        for page in client().get_paginator(call).paginate(Bucket=bucket, Prefix=key, **words):
            # An empty page, or a proxy's page, must not be mistaken for an empty listing.
            if not LISTING & page.keys():
                raise _unbelievable(prefix, "the response is not a listing")
            if (
                page.get("IsTruncated")
                and not {"NextContinuationToken", "NextKeyMarker"} & page.keys()
            ):
                raise _unbelievable(prefix, "the listing is truncated but has no next page")
            found += page.get(content, [])
            if len(found) > LISTED:
                raise _unbelievable(prefix, f"the listing has more than {LISTED:,} entries")
    for entry in found:
        name = str(entry.get("Prefix" if content == "CommonPrefixes" else "Key"))
        if not name.startswith(key) or ".." in name.split("/") or CONTROL.search(name):
            raise _unbelievable(prefix, f"the listing has {name!r}, which is outside this prefix")
    return found


def _object(address: str, entry: dict[str, Any]) -> Object:
    size, modified = entry.get("Size"), entry.get("LastModified")
    if not isinstance(size, int) or not 0 <= size <= LARGEST:
        raise _unbelievable(address, f"the listing has an invalid size: {size!r} bytes")
    return Object(
        address,
        size,
        str(entry.get("ETag", "")),
        modified.timestamp() if isinstance(modified, datetime) else 0.0,
    )


@cache
def _client(process: int) -> Any:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise S3Error(
            "needs the package boto3",
            where=SCHEME,
            why=str(error),
            next=installing_package("boto3"),
        ) from error
    tries = (
        {"mode": "standard"}
        if "AWS_MAX_ATTEMPTS" in os.environ
        else {"mode": "standard", "total_max_attempts": TRIES}
    )
    config = Config(
        retries=tries,
        connect_timeout=CONNECT,
        read_timeout=ANSWER,
        max_pool_connections=4 * AT_ONCE,
    )
    try:
        found = boto3.session.Session().client("s3", config=config)
        found.meta.events.register_first("needs-retry.s3", _end_silence)
        return found
    except (
        BotoCoreError,
        ValueError,
    ) as error:  # an invalid endpoint, profile or number in AWS's environment variables
        raise S3Error(
            "can't create a client",
            where=SCHEME,
            why=str(error),
            next="env | grep ^AWS_ ; aws configure list",
        ) from error


def _end_silence(attempts: int, caught_exception: Exception | None, **_: Any) -> None:
    """Stops retrying a request after SILENCES timeouts. In all other cases, boto3 decides."""
    from botocore.exceptions import ConnectTimeoutError, ReadTimeoutError

    if attempts >= SILENCES and isinstance(
        caught_exception, (ConnectTimeoutError, ReadTimeoutError)
    ):
        raise caught_exception


def _reason(answer: dict[str, Any]) -> str:
    """Returns why S3 refused a request, with the number of attempts."""
    code = str(answer["Error"].get("Code"))
    often = answer.get("ResponseMetadata", {}).get("RetryAttempts", 0) + 1
    region = (
        answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region", "")
    )
    if region and code in ELSEWHERE:
        return (
            f"the bucket is in another region ({code}); set AWS_REGION={shlex.quote(region)} in "
            "the environment"
        )
    if known := (REASONS | OF_CREDENTIALS).get(code):
        return f"{known} ({code})"
    return f"{code}: {answer['Error'].get('Message')}" + (f", {often} times" if often > 1 else "")


def _refused(address: str, why: str, code: str = "") -> S3Error:
    remedy = CREDENTIALS if code in OF_CREDENTIALS else _look(address)
    return S3Error("S3 refused the request", where=address, why=why, next=remedy)


def _unbelievable(address: str, why: str) -> S3Error:
    return S3Error("S3 sent an invalid response", where=address, why=why, next=_look(address))


def _look(address: str) -> str:
    return f"aws s3 ls {shlex.quote(address)}"
