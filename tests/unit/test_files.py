"""Files in a folder and in a bucket answer in the same way; a stream from S3 comes whole through many ranges."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3server import serve
from trainfleet.storage import files, s3
from trainfleet.storage.files import BucketFiles, Files, LocalFiles, open_object


@pytest.fixture(params=["folder", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Files]:
    if request.param == "folder":
        yield LocalFiles(tmp_path)
        return
    with serve(lambda application: application):
        yield BucketFiles("s3://bucket/some/", tmp_path)


def make(store: Files, name: str, content: bytes) -> None:
    if not store.remote:
        (store.folder / name).parent.mkdir(parents=True, exist_ok=True)
    with store.create(name) as stream:
        stream.write(content)


def test_what_is_made_is_read_listed_renamed_and_removed(store: Files, tmp_path: Path) -> None:
    assert store.read("a/one") is None and store.sizes("a") == {} and store.folders() == []
    make(store, "a/one", b"0123456789")
    make(store, "a/two", b"")
    assert store.read("a/one") == b"0123456789" and store.read_range("a/one", 2, 5) == b"234"
    with store.open("a/one") as stream:
        assert (
            stream.seek(0, os.SEEK_END) == 10 and stream.seek(4) == 4 and stream.read() == b"456789"
        )
    assert store.sizes("a") == {"a/one": 10, "a/two": 0} and store.folders() == ["a"]
    store.write("a/one", b"new", durable=False)
    store.rename("a", "b")
    assert store.folders() == ["b"] and store.sizes("b") == {"b/one": 3, "b/two": 0}
    store.remove("b/two")
    store.remove("b/two")
    with pytest.raises(FileNotFoundError):
        store.open("b/two")
    (tmp_path / "local").write_bytes(b"moved")
    store.publish("b/three", tmp_path / "local")
    assert store.read("b/three") == b"moved" and not (tmp_path / "local").exists()
    store.remove_folder("b")
    store.remove_folder("b")
    assert store.folders() == []


def test_only_plain_files_are_opened(tmp_path: Path) -> None:
    store = LocalFiles(tmp_path / "in")
    store.folder.mkdir()
    (tmp_path / "secret").write_text("x")
    (store.folder / "link").symlink_to(tmp_path / "secret")
    (store.folder / "folder").mkdir()
    os.mkfifo(store.folder / "pipe")
    (store.folder / "file").touch()
    for name in ("link", "pipe", "folder", "file/below", "absent"):
        with pytest.raises(FileNotFoundError):
            store.open(name)


def test_a_stream_of_many_ranges_comes_whole_and_from_any_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "RANGE", 1000)
    monkeypatch.setattr(files, "STREAM_BUFFER", 300)
    content = random.Random(1).randbytes(20_500)
    with serve(lambda application: application):
        version = s3.write("s3://bucket/large", content)
        found = s3.Object("s3://bucket/large", len(content), version)
        with open_object(found) as stream:
            assert b"".join(iter(lambda: stream.read(700), b"")) == content
            for start in (20_400, 0, 9_990, 5):
                room = bytearray(min(5_000, len(content) - start))
                stream.seek(start)
                assert stream.readinto(room) == len(room)  # type: ignore[attr-defined]
                assert room == content[start : start + len(room)]
