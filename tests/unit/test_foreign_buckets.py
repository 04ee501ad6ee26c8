"""What a bucket's server answers is not believed: names that lead elsewhere, listings without an end, sizes that are none."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from trainfleet.checkpoints import s3
from trainfleet.checkpoints.s3 import Bucket
from trainfleet.checkpoints.store import BROKEN, NAME
from trainfleet.data import objects
from trainfleet.errors import DataError

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


def bucket_of(pages: Pages) -> tuple[Bucket, Server]:
    bucket, server = Bucket("s3://bucket/runs/one"), Server(pages)
    bucket.__dict__["client"] = server
    return bucket, server


def test_a_listing_that_names_other_objects_deletes_none_of_them() -> None:
    bucket, server = bucket_of([{"Contents": [{"Key": "elsewhere/precious"}]}])
    with pytest.raises(OSError, match="'elsewhere/precious', which is elsewhere"):
        bucket.abandon(4)
    assert server.deleted == []


def test_a_listing_without_an_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "LISTED", 50)
    bucket, _ = bucket_of({"CommonPrefixes": [{"Prefix": f"runs/one/step-{number:08}/"}]} for number in itertools.count())
    with pytest.raises(OSError, match="more than 50 entries"):
        bucket.steps()


def test_only_names_of_ours_are_steps() -> None:
    names = ["step-00000004", "step-00000004\n", "step-000000004", "step-٠٠٠٠٠٠٠٨", f"step-{'9' * 5000}", "step-100000000"]
    bucket, _ = bucket_of([{"CommonPrefixes": [{"Prefix": f"runs/one/{name}/"} for name in names]}])
    assert bucket.steps() == [4, 100_000_000]
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
    {},
]


@pytest.mark.parametrize("entry", ENTRIES, ids=range(len(ENTRIES)))
def test_a_source_in_s3_lists_only_what_is_below_it(entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "client", lambda: Server([{"Contents": [entry]}]))
    with pytest.raises(DataError, match="not to be believed"):
        objects.list_prefix("s3://bucket/text/")


def test_a_source_whose_listing_has_no_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PAGES", 5)
    monkeypatch.setattr(objects, "client", lambda: Server({"Contents": []} for _ in itertools.count()))
    with pytest.raises(DataError, match="more than 5 pages"):
        objects.list_prefix("s3://bucket/text/")
