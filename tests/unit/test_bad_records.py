"""data.on_bad_record: what can't be read is skipped up to a bound, counted and listed, the same whoever does it."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from trainfleet.config.types import Data
from trainfleet.data import manifest, sources
from trainfleet.data.dataset import find
from trainfleet.data.dataset_store import open_store
from trainfleet.data.tokenize_worker import Share, tokenize
from trainfleet.trust.errors import DataError
from unit.test_data_share import content

GOOD = [
    f"document {number}: " + " ".join(f"word{(number * step) % 89}" for step in range(60))
    for number in range(99)
]
ALONE = Share(0, 1, 1)


def lines(bad: bytes) -> bytes:
    """A hundred lines of JSON, of which the 51st is bad."""
    good = [json.dumps({"text": text}).encode() for text in GOOD]
    return b"\n".join([*good[:50], bad, *good[50:]]) + b"\n"


def table() -> bytes:
    rows = [["id", "text"], *([str(number), text] for number, text in enumerate(GOOD))]
    rows.insert(51, ["half"])
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode()


def tar() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for number, text in enumerate([*(text.encode() for text in GOOD), b"caf\xe9"]):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return packed.getvalue()


ONE_BAD = {
    "no json": ("a.jsonl", lines(b'{"text": "half a'), "a.jsonl:51: is not valid JSON"),
    "no text field": ("a.jsonl", lines(b'{"body": "b"}'), "a.jsonl:51: lacks the field `text`"),
    "no text": ("a.jsonl", lines(b'{"text": 3}'), "a.jsonl:51: `text` is 3, not a string"),
    "no object": ("a.jsonl", lines(b"[1]"), "a.jsonl:51: is not a JSON object"),
    "latin 1": ("a.jsonl", lines(b'{"text": "caf\xe9"}'), "a.jsonl:51: is not valid UTF-8"),
    "half a pair": (
        "a.jsonl",
        lines(b'{"text": "\\ud800"}'),
        "a.jsonl:51: `text` contains half of a surrogate pair",
    ),
    "nested": ("a.jsonl", lines(b"[" * 100_000), "a.jsonl:51: is nested too deeply"),
    "packed": ("a.jsonl.gz", gzip.compress(lines(b"x")), "a.jsonl.gz:51: is not valid JSON"),
    "lines called json": ("a.json", lines(b"x"), "a.json:51: is not valid JSON"),
    "array": (
        "a.json",
        json.dumps([*({"text": text} for text in GOOD), {"text": []}]).encode(),
        "a.json: entry 99: `text` is []",
    ),
    "table": ("a.csv", table(), "a.csv:52: has 1 cells, not 2"),
    "tar": ("a.tar", tar(), "a.tar: 99.txt:1: is not valid UTF-8"),
}


def data_of(folder: Path, bad_records: str | float = "stop") -> Data:
    return Data("set", (str(folder),), "text", "bpe", 320, 0.1, on_bad_record=bad_records)


def written(folder: Path, name: str, text: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(text)
    return folder


@pytest.mark.parametrize("kind", ONE_BAD)
def test_one_bad_record_ends_the_work_or_is_skipped_counted_and_listed(
    kind: str, tmp_path: Path
) -> None:
    name, text, told = ONE_BAD[kind]
    folder = written(tmp_path / "text", name, text)
    with pytest.raises(DataError) as caught:
        tokenize(data_of(folder), ALONE, tmp_path / "data")
    assert (
        told in str(caught.value)
        and "or skip such records: SET='data.on_bad_record=skip'" in caught.value.next
    )
    found = tokenize(data_of(folder, "skip"), ALONE, tmp_path / "data")
    assert found is not None and (found.documents, found.skipped) == (99, 1)
    assert len(found.skipped_records) == 1 and told in found.skipped_records[0]
    with pytest.raises(
        DataError, match=r"1 of 100 records are bad; data.on_bad_record stop allows 0"
    ):
        find(data_of(folder), tmp_path / "data")


def test_one_file_in_another_encoding_among_many(tmp_path: Path) -> None:
    for number, text in enumerate(GOOD):
        written(tmp_path / "text", f"{number:02}.txt", text.encode())
    folder = written(tmp_path / "text", "latin.txt", "café ".encode("latin1") * 50)
    found = tokenize(data_of(folder, "skip"), ALONE, tmp_path / "data")
    assert (
        found is not None
        and found.skipped == 1
        and "latin.txt:1: is not valid UTF-8" in found.skipped_records[0]
    )


def test_the_dataset_is_the_same_on_any_number_of_nodes_and_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "GRID", 2**12)
    folder = written(tmp_path / "text", "a.jsonl", lines(b"x"))
    folders = []
    for nodes in (1, 2, 5):
        for node in range(nodes):
            tokenize(data_of(folder, "skip"), Share(node, nodes, 1), tmp_path / str(nodes))
        folders.append(content(tmp_path / str(nodes) / "set"))
    assert len([name for name in folders[0] if name.startswith("units/")]) > 3
    assert all(found == folders[0] for found in folders)


def test_what_was_done_before_the_first_bad_record_stays_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "GRID", 2**12)
    folder = written(tmp_path / "text", "a.jsonl", lines(b"x"))
    tokenize(data_of(folder, "skip"), ALONE, tmp_path / "first")
    stop, skip = (
        replace(data_of(folder, words), tokenizer=str(tmp_path / "first/set/tokenizer.json"))
        for words in ("stop", "skip")
    )
    with pytest.raises(DataError, match=r"a\.jsonl:51"):
        tokenize(stop, ALONE, tmp_path / "again")
    kept = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "again/set/units").glob("[0-9]*.json")
    }
    tokenize(skip, ALONE, tmp_path / "again")
    tokenize(skip, ALONE, tmp_path / "whole")
    assert kept and all(path.stat().st_mtime_ns == time for path, time in kept.items())
    assert content(tmp_path / "again/set") == content(tmp_path / "whole/set")


def test_more_than_the_bound_is_refused_with_the_share_that_would_do(tmp_path: Path) -> None:
    folder = written(tmp_path / "text", "a.jsonl", lines(b"x\ny\nz"))
    with pytest.raises(
        DataError, match=r"3 of 102 records are bad; data.on_bad_record skip allows 1"
    ) as caught:
        tokenize(data_of(folder, "skip"), ALONE, tmp_path / "data")
    share = re.search(r"SET='data.on_bad_record=([0-9.]+)'", caught.value.next)
    assert share and find(data_of(folder), tmp_path / "data") is None
    found = tokenize(data_of(folder, float(share[1])), ALONE, tmp_path / "data")
    assert found is not None and found.skipped == 3


def test_a_wrong_field_is_no_case_for_skipping(tmp_path: Path) -> None:
    folder = written(tmp_path / "text", "a.jsonl", b'{"body": "b"}\n' * 200 + lines(b"x"))
    with pytest.raises(DataError) as caught:
        tokenize(data_of(folder, 0.5), ALONE, tmp_path / "data")
    assert "one unit has 201 bad records and only 99 good ones" in str(caught.value)


def test_what_an_older_version_wrote_has_skipped_nothing(tmp_path: Path) -> None:
    folder = written(tmp_path / "text", "a.txt", "\n".join(GOOD).encode())
    tokenize(data_of(folder), ALONE, tmp_path / "data")
    for path in (tmp_path / "data/set/manifest.json", tmp_path / "data/set/units/00000.json"):
        record = json.loads(path.read_text())
        del record["skipped"], record["skipped_records"]
        path.write_text(json.dumps(record))
    assert find(data_of(folder), tmp_path / "data") == manifest.read_manifest(
        open_store(tmp_path / "data/set", None)
    )
