"""Other people's files as sources: JSON arrays, tables, Arrow, packed texts, tars; broken ones are named by file and place."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from requirement import need
from trainfleet.config.types import Data
from trainfleet.data.documents import read_unit
from trainfleet.data.sources import plan_units
from trainfleet.trust.errors import DataError

DATA = Data("set", (), "text", "bpe", 300, 0.1)
TEXTS = [
    f"{number} " + "".join(random.Random(number).choices('ab é日😀\n\t",;\\', k=60))
    for number in range(40)
]
RECORDS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]


def texts_of(*paths: Path, field: str = "text") -> list[str]:
    data = replace(DATA, sources=tuple(map(str, paths)), text_field=field)
    return [document.text for unit in plan_units(data).units for document in read_unit(unit, field)]


def write(path: Path) -> Path:
    """The texts in a file of the kind that its name says."""
    name = path.name
    if name.startswith("array"):
        path.write_text(json.dumps(RECORDS, indent=1))
    elif name.startswith("lines"):
        path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    elif name.endswith(".csv"):
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            table = csv.DictWriter(file, ["id", "text"])
            table.writeheader()
            table.writerows(RECORDS)
    elif name.endswith((".arrow", ".feather")):
        arrow, ipc = need("pyarrow"), need("pyarrow.ipc")
        table = arrow.table({"id": range(len(TEXTS)), "text": TEXTS})
        opened = ipc.new_stream if "stream" in name else ipc.new_file
        with opened(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    else:
        with tarfile.open(path, "w:gz" if name.endswith("gz") else "w") as archive:
            for number, text in enumerate(TEXTS):
                content = text.encode() if number % 2 else json.dumps({"text": text}).encode()
                member = tarfile.TarInfo(f"../{number:04}.{'txt' if number % 2 else 'json'}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
                picture = tarfile.TarInfo(f"{number:04}.png")
                picture.size = 3
                archive.addfile(picture, io.BytesIO(b"\xff\xd8\xff"))
    return path


@pytest.mark.parametrize(
    "name",
    [
        "array.json",
        "lines.json",
        "a.csv",
        "a.arrow",
        "stream.arrow",
        "a.feather",
        "a.tar",
        "a.tar.gz",
        "a.tgz",
    ],
)
def test_the_texts_come_out_as_they_went_in(name: str, tmp_path: Path) -> None:
    assert texts_of(write(tmp_path / name)) == TEXTS
    assert list(tmp_path.parent.glob("*.txt")) == []  # names in a tar lead nowhere


def test_a_packed_text_is_one_document(tmp_path: Path) -> None:
    whole = "\n".join(TEXTS)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(whole.encode()))
    (tmp_path / "b.md.zst").write_bytes(need("zstandard").ZstdCompressor().compress(whole.encode()))
    assert texts_of(tmp_path / "a.txt.gz", tmp_path / "b.md.zst") == [whole, whole]


def test_a_single_object_is_one_text(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"text": "one"}, indent=4))
    assert texts_of(tmp_path / "a.json") == ["one"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.json", b"[1]", ["a.json: entry 0", "is not a JSON object"]),
        ("a.json", b'[{"text": "a"}, {"body": "b"}]', ["entry 1", "lacks the field `text`", "its fields: body"]),
        ("a.json", b'{"text": "a"}\n{"text": 3}', ["a.json:2", "`text` is 3, not a string"]),
        ("a.json", b'{"text": "a"}\nx', ["a.json:2", "is not valid JSON"]),
        ("a.json", b"[" * 100_000, ["a.json", "nested too deeply"]),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000, ["a.jsonl:1"]),
        ("a.json", b"\xff\xfe", ["a.json", "not valid UTF-8"]),
        ("a.csv", b"id,body\n1,x\n", ["a.csv", "lacks the field `text`", "its fields: id, body"]),
        ("a.csv", b"id,text\n1,x\n2\n", ["a.csv:3", "has 1 cells, not 2"]),
        ("a.csv", b'id,text\n1,"x"y\n', ["a.csv:2", "is not a valid CSV row"]),
        ("a.csv", b"id,text\n1,\xff\n", ["a.csv", "not valid UTF-8"]),
        ("a.csv", b"", ["is empty"]),
        ("a.arrow", b"ARROW1 and no more", ["a.arrow", "damaged Arrow"]),
        ("a.tar", b"no tar at all" * 100, ["a.tar", "damaged tar"]),
        ("a.txt.gz", b"\x1f\x8b\x08 no gzip", ["a.txt.gz", "damaged compressed"]),
    ],
)  # fmt: skip
def test_what_is_broken_is_named(
    name: str, content: bytes, told: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        texts_of(tmp_path / name)
    assert all(word in str(caught.value) for word in told), caught.value


def test_a_folder_says_what_it_leaves(tmp_path: Path) -> None:
    for name in ("a.txt", "b.csv", "c.pdf", "d.pdf", "e.png"):
        (tmp_path / name).write_text("text\nx\n")
    plan = plan_units(replace(DATA, sources=(str(tmp_path),)))
    assert plan.files == 2 and [warning.split(": ", 1)[1] for warning in plan.warnings] == [
        "skipped files: 2 .pdf, 1 .png"
    ]
