"""What a bucket's server answers is not believed: names that lead elsewhere, listings without an end, sizes that are none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from s3server import Application, serve
from trainfleet.checkpoints.store import BROKEN, NAME, CheckpointStore
from trainfleet.data import source_files
from trainfleet.storage import files, s3
from trainfleet.trust.errors import S3Error

Pages = Iterable[dict[str, Any]]


class Server:
    """A client whose listings are given; what it is asked to delete is kept."""

    def __init__(self, pages: Pages) -> None:
        self.pages, self.deleted = pages, list[str]()

    def get_paginator(self, request: str) -> Server:
        return self

    def paginate(self, **words: str) -> Iterator[dict[str, Any]]:
        return iter(self.pages)

    def delete_objects(self, Bucket: str, Delete: dict[str, Any]) -> dict[str, Any]:
        self.deleted += [entry["Key"] for entry in Delete["Objects"]]
        return {}


@pytest.fixture
def listing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pages], Server]:
    """Has every listing answered with these pages."""

    def answer(pages: Pages) -> Server:
        server = Server(pages)
        monkeypatch.setattr(s3, "client", lambda: server)
        return server

    return answer


RUN = CheckpointStore("s3://bucket/runs/one")


def test_a_listing_that_names_other_objects_deletes_none_of_them(
    listing: Callable[[Pages], Server],
) -> None:
    server = listing([{"Contents": [{"Key": "elsewhere/precious", "Size": 1}]}])
    with pytest.raises(S3Error, match="'elsewhere/precious', which is outside this prefix"):
        RUN.abandon(4)
    assert server.deleted == []


def test_a_listing_without_an_end_is_left(
    listing: Callable[[Pages], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "LISTED", 50)
    listing(
        {"CommonPrefixes": [{"Prefix": f"runs/one/step-{number:08}/"}]}
        for number in itertools.count()
    )
    with pytest.raises(S3Error, match="more than 50 entries"):
        RUN.steps()


def test_only_names_of_ours_are_steps(listing: Callable[[Pages], Server]) -> None:
    names = [
        "step-00000004",
        "step-000000004",
        "step-٠٠٠٠٠٠٠٨",
        f"step-{'9' * 5000}",
        "step-100000000",
    ]
    listing([{"CommonPrefixes": [{"Prefix": f"runs/one/{name}/"} for name in names]}])
    assert RUN.steps() == [4, 100_000_000]
    assert (
        NAME.fullmatch("step-00000004")
        and BROKEN.fullmatch("step-00000004.broken")
        and not BROKEN.fullmatch("step-00000004xbroken")
    )


ENTRIES: list[dict[str, Any]] = [
    {"Key": "text/../../victim.txt", "Size": 1, "ETag": "x"},
    {"Key": "/etc/passwd", "Size": 1, "ETag": "x"},
    {"Key": "text/a\x1b]0;x.txt", "Size": 1, "ETag": "x"},
    {"Key": "text/a.txt", "Size": -1, "ETag": "x"},
    {"Key": "text/a.txt"},
    {"Key": "text/a.txt", "Size": 2**70, "ETag": "x"},
    {},
]


@pytest.mark.parametrize("entry", ENTRIES, ids=range(len(ENTRIES)))
def test_a_source_in_s3_lists_only_what_is_below_it(
    entry: dict[str, Any], listing: Callable[[Pages], Server]
) -> None:
    listing([{"Contents": [entry]}])
    with pytest.raises(S3Error, match="S3 sent an invalid response"):
        source_files.list_files("s3://bucket/text/")


def test_a_name_that_ends_a_line_is_refused(listing: Callable[[Pages], Server]) -> None:
    listing([{"CommonPrefixes": [{"Prefix": "runs/one/step-00000004\n/"}]}])
    with pytest.raises(S3Error, match="S3 sent an invalid response"):
        RUN.steps()


@pytest.mark.parametrize(
    "page", [{}, {"ResponseMetadata": {}}, {"Contents": [], "IsTruncated": True}]
)
def test_a_page_that_is_no_listing_is_no_empty_prefix(
    page: dict[str, Any], listing: Callable[[Pages], Server]
) -> None:
    """A proxy's 200 and a page whose end is missing: a run that believes them begins again from nothing."""
    listing([page])
    with pytest.raises(S3Error, match="S3 sent an invalid response"):
        RUN.steps()


PAGE = b"<html>Sign in to use this network</html>"


def upload(address: str) -> None:
    with files.upload_stream(address) as stream:
        stream.write(bytes(s3.PART + 1))


@pytest.mark.parametrize("request_", [
    lambda to: s3.read(to), lambda to: s3.read_range(to, 0, 4), lambda to: s3.read_range(to, 0, len(PAGE)), lambda to: s3.stat(to),
    lambda to: s3.write(to, b"x"), lambda to: s3.write_if(to, b"x", ""), lambda to: s3.copy(to, f"{to}.broken"), upload,
    lambda to: s3.list_objects(to), lambda to: s3.list_folders(to), lambda to: s3.abort_uploads(to), lambda to: RUN.commit(4, "marker"),
])  # fmt: skip
def test_a_proxy_s_page_is_no_answer_to_any_request(request_: Callable[[str], object]) -> None:
    def wrap(application: Application) -> Application:
        def page(environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            start("200 OK", [("Content-Type", "text/html"), ("Content-Length", str(len(PAGE)))])
            return [PAGE]

        return page

    with serve(wrap), pytest.raises(S3Error, match="S3 sent an invalid response"):
        request_("s3://bucket/runs/one/file")


def test_a_bucket_elsewhere_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "one")
    answer = {
        "Error": {"Code": "PermanentRedirect"},
        "ResponseMetadata": {"HTTPHeaders": {"x-amz-bucket-region": "eu-west-3"}},
    }
    with pytest.raises(S3Error, match="AWS_REGION=eu-west-3"), s3.explained("s3://bucket/x"):
        raise ClientError(answer, "ListObjectsV2")
    for missing in (KeyError("ETag"), ValueError("invalid literal for int(): 'large'")):
        with (
            pytest.raises(S3Error, match="S3 sent an invalid response"),
            s3.explained("s3://bucket/x"),
        ):
            raise missing
