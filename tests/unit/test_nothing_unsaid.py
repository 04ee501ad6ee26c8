"""What is in a folder, a bucket or an archive and is not read is counted and told; what is read comes by one table."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import verbs
from requirement import need
from trainfleet.config.types import Data, Source
from trainfleet.data import archives, source_files
from trainfleet.data.documents import Document, read_unit
from trainfleet.data.source_survey import look
from trainfleet.data.sources import plan_units
from trainfleet.data.tokenize_worker import Share, tokenize
from trainfleet.data.work_units import divide
from trainfleet.storage import s3
from trainfleet.trust.errors import DataError

BOM = b"\xef\xbb\xbf"
WORDS = " ".join(f"word{number * 7 % 89} is another{number}" for number in range(400)).encode()
LINE = b'{"text": "a line"}\n'


def data_of(*paths: Path | str, field: str = "text") -> Data:
    return Data("set", tuple(map(str, paths)), field, "bpe", 300, 0.1)


def texts(*paths: Path | str, field: str = "text") -> list[str]:
    return [
        document.text
        for unit in plan_units(data_of(*paths)).units
        for document in read_unit(unit, field)
    ]


def written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def tar(path: Path, members: dict[str, bytes], *others: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
        for other in others:
            archive.addfile(other)
    return path


def told(*paths: Path | str) -> str:
    """What a plan says of the sources."""
    return "\n".join(look(data_of(*paths)).warnings)


# Row 13: one text validates too, and what the plan says of it is so.
@pytest.mark.parametrize("names", [("input.txt",), ("a.md", "b.txt.gz", "c.py")])
def test_of_few_texts_the_last_part_of_each_validates(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    text = b"".join(f"{number} squared is {number * number}\n".encode() for number in range(5000))
    for name in names:
        written(tmp_path / "source" / name, gzip.compress(text) if name.endswith(".gz") else text)
    data = data_of(tmp_path / "source")
    made = tokenize(data, Share(0, 1, 1), tmp_path / "data")
    assert made and made.validation_documents == made.documents // 2 == len(names)
    assert 0.08 < made.validation_tokens / made.tokens < 0.15
    note = f"there are few texts ({len(names)}), so the last part of each is used for validation"
    assert look(data).notes == (note,) and not look(data).warnings, "it is right, and no warning"
    assert note in made.notes


def test_texts_that_are_many_or_records_validate_whole(tmp_path: Path) -> None:
    few, many = tmp_path / "few", tmp_path / "many"
    for number in range(20):
        written(few / f"{number}.txt", b"a text\n")
        written(many / f"{number}.txt", b"a text\n")
    written(few / "a.jsonl", LINE)
    assert not plan_units(replace(data_of(many), validation_fraction=0.25)).few
    assert not plan_units(data_of(few)).few and plan_units(data_of(many)).few


# Row 17: the mark at a file's beginning.
def test_a_mark_at_the_beginning_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = BOM + "é\n".encode()
    for name in ("a.txt", "b.md", "c.py"):
        written(tmp_path / "plain" / name, marked)
    written(tmp_path / "packed/a.txt.gz", gzip.compress(marked))
    (tmp_path / "tar").mkdir()
    tar(
        tmp_path / "tar/a.tar",
        {"a.txt": marked, "b.txt.gz": gzip.compress(marked), "c.json": BOM + LINE},
    )
    assert texts(tmp_path / "plain") == ["é\n"] * 3 and texts(tmp_path / "packed") == ["é\n"]
    assert texts(tmp_path / "tar") == ["é\n", "é\n", "a line"]
    monkeypatch.setattr("trainfleet.data.sources.LARGEST_TEXT", 100)
    monkeypatch.setattr("trainfleet.data.sources.GRID", 64)
    long = "word \n" * 50
    assert "".join(texts(written(tmp_path / "long.txt", BOM + long.encode()))) == long
    with pytest.raises(DataError, match=r"bad.txt:2: is not valid UTF-8") as caught:
        texts(written(tmp_path / "bad.txt", BOM + b"a\ncaf\xe9 au lait"))
    assert "at byte 8" in caught.value.why


# Row 6: each format's own rules, and one meaning of empty and bad.
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'id\ttext\n1\tPlain.\n2\t"Hello, and went on\n3\tto the bridge.\n4\tso "\n5\tend.', ["Plain.", '"Hello, and went on', "to the bridge.", 'so "', "end."]),
        (BOM + b'text\tid\r\n"quoted"\t1\r\n\r\na \\t b, c\t2\r\n\t3\r\n', ['"quoted"', "a \\t b, c"]),
        ("text\nline\u2028separator\x0b\rone\n".encode(), ["line\u2028separator\x0b\rone"]),
    ],
)  # fmt: skip
def test_tabs_separate_without_quotes_and_a_line_is_a_row(
    content: bytes, expected: list[str], tmp_path: Path
) -> None:
    assert (
        texts(written(tmp_path / "a.tsv", content))
        == expected
        == texts(written(tmp_path / "a.tab", content))
    )


def test_commas_separate_by_rfc_4180(tmp_path: Path) -> None:
    content = b'id,text\r\n1,"a ""word"", and\r\na line"\r\n2,\r\n3,"x\ty"\r\n'
    assert texts(written(tmp_path / "a.csv", content)) == ['a "word", and\r\na line', "x\ty"]


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [("a.tsv", b"id\ttext\tn\n1\tcut\nhere\t0\n", ":2"), ("a.tsv", b'id\ttext\n1\t"of two\nlines"\n', ":3"),
     ("a.csv", b"id,text,n\n1,x,2\n1,cut\n", ":3"), ("a.tsv", b"id\ttext\n1\ta\tb\n", ":2")],
)  # fmt: skip
def test_a_row_with_other_cells_than_the_first_is_bad(
    name: str, content: bytes, place: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="cells, not") as caught:
        texts(written(tmp_path / name, content))
    assert caught.value.where.endswith(place) and "skip" in caught.value.next
    assert ("convert it to CSV: python3 -c" in caught.value.next) == (name == "a.tsv")


def test_an_empty_record_is_empty_in_every_format(tmp_path: Path) -> None:
    rows = [
        {"id": 1, "text": "one"},
        {"id": 2, "text": ""},
        {"id": 3, "text": None},
        {"id": 4, "text": " "},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    arrow, parquet, ipc = need("pyarrow"), need("pyarrow.parquet"), need("pyarrow.ipc")
    written(tmp_path / "lines.jsonl", lines.encode())
    written(tmp_path / "lines.json", lines.encode())
    written(tmp_path / "array.json", json.dumps(rows).encode())
    written(tmp_path / "packed.jsonl.gz", gzip.compress(lines.encode()))
    written(tmp_path / "a.csv", b"id,text\n1,one\n2,\n3,\n\n4, \n")
    written(tmp_path / "a.tsv", b"id\ttext\n1\tone\n2\t\n3\t\n\n4\t \n")
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with ipc.new_file(str(tmp_path / "a.arrow"), arrow.Table.from_pylist(rows).schema) as writer:
        writer.write_table(arrow.Table.from_pylist(rows))
    found = {path.name: texts(path) for path in sorted(tmp_path.iterdir())}
    assert found == {name: ["one", " "] for name in found} and len(found) == 8


@pytest.mark.parametrize("value", ["0", "[]", "false", '{"a": 1}'])
def test_what_is_no_text_is_bad_in_lines_and_arrays_alike(value: str, tmp_path: Path) -> None:
    said = set()
    for name, form in (
        ("a.jsonl", "{}\n"),
        ("b.json", "[{}]"),
        ("c.json", '{{"text": "a"}}\n{}\n'),
    ):
        with pytest.raises(DataError) as caught:
            texts(written(tmp_path / name, form.format(f'{{"text": {value}}}').encode()))
        said.add(caught.value.what)
    assert len(said) == 1 and "not a string" in said.pop()


# Row 12: modules that a Python may have been built without.
LACKING = """
import sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name in ("_lzma", "_bz2", "_sqlite3", "_ctypes", "_curses", "_tkinter", "_dbm", "_gdbm", "readline", "_uuid"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Lacking())
"""
READING = """
from trainfleet.config.types import Data
from trainfleet.data.documents import Document, read_unit
from trainfleet.data.sources import plan_units
from trainfleet.data import tokenize_worker, work_units
from trainfleet.trust.errors import DataError
try:
    for unit in plan_units(Data("set", (sys.argv[1],), "text", "bpe", 300, 0.1)).units:
        print(*(document.text for document in read_unit(unit, "text")))
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("name", "mode", "says"),
    [("a.txt", "", "words"), ("a.tar", "w", "words"), ("a.tgz", "w:gz", "words"), ("a.tar", "w:xz", "module lzma xz -dc"),
     ("a.tar", "w:bz2", "module bz2 bzip2 -dc")],
)  # fmt: skip
def test_a_module_that_python_lacks_is_missed_only_where_a_file_needs_it(
    name: str, mode: str, says: str, tmp_path: Path
) -> None:
    path = written(tmp_path / name, b"words")
    if mode:
        with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
            about = tarfile.TarInfo("a.txt")
            about.size = 5
            archive.addfile(about, io.BytesIO(b"words"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", LACKING + READING, str(path)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert ran.returncode == 0 and all(word in ran.stdout for word in says.split()), (
        ran.stdout + ran.stderr
    )
    assert "make setup" not in ran.stdout


# Loads all that verbs may load before a job starts, which torch and what needs it (it loads ctypes) are no part of.
LOADING = """
import importlib, pkgutil, trainfleet
apart = ("trainfleet.engine", "trainfleet.models", "trainfleet.devices", "trainfleet.platforms")
for module in pkgutil.walk_packages(trainfleet.__path__, "trainfleet."):
    if not module.name.startswith(apart) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert "torch" not in sys.modules
"""


def test_no_verb_needs_a_module_that_python_may_lack(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LACKING)
    written(tmp_path / "text/a.txt", b"a few words\n" * 100)
    (tmp_path / "config.yaml").write_text(
        "name: x\ndata: {sources: [text], vocab_size: 300}\nmodel: {preset: tiny}\n"
    )
    path = {"PYTHONPATH": os.pathsep.join((str(tmp_path), verbs.PACKAGES))}
    assert "next: make train" in verbs.enter(tmp_path, "plan", variables=path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", LACKING + LOADING], capture_output=True, text=True, env=environment
    )
    assert ran.returncode == 0, ran.stderr


# Rows 7 and 9: the files of an archive are read, and told, as those of a folder are.
def test_each_file_of_an_archive_is_read_by_the_table(tmp_path: Path) -> None:
    arrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["a row"]}), table := io.BytesIO())
    members = {
        "a.json.gz": gzip.compress(LINE), "b.jsonl": LINE * 2, "c.txt.gz": gzip.compress(b"text"), "d.parquet": table.getvalue(),
        "e.tsv": b"text\nrow\n", "f.json": b'[{"text": "one"}, {"text": "two"}]', "g.jsonl.zst": need("zstandard").compress(LINE),
    }  # fmt: skip
    assert texts(tar(tmp_path / "a.tar", members)) == ["a line"] * 3 + [
        "text",
        "a row",
        "row",
        "one",
        "two",
        "a line",
    ]


def test_damage_to_a_file_of_an_archive_is_a_record_of_its_own(tmp_path: Path) -> None:
    path = tar(
        tmp_path / "a.tar",
        {"a.json.gz": b"\x1f\x8b\x08 none", "b.jsonl": b'{"body": 1}\n' + LINE, "c.txt": b"text"},
    )
    found = list(archives.read_tar(plan_units(data_of(path)).units[0].pieces[0], "text"))
    assert len(found) == 4
    assert (
        isinstance(found[0], DataError)
        and "a.tar: a.json.gz" in found[0].where
        and "damaged" in found[0].what
    )
    assert isinstance(found[1], DataError) and found[1].where.endswith("a.tar: b.jsonl:1")


@pytest.mark.parametrize("order", [("jpg", "json", "txt"), ("jpg", "txt", "json")])
def test_a_text_and_a_json_of_one_name_are_one_record(
    order: tuple[str, ...], tmp_path: Path
) -> None:
    held = {
        "jpg": b"\xff\xd8",
        "txt": b"words",
        "json": b'{"caption": "from the json", "width": 4}',
    }
    path = tar(
        tmp_path / "a.tar",
        {f"{number}.{kind}": held[kind] for number in range(2) for kind in order},
    )
    assert texts(path) == ["words"] * 2 and texts(path, field="caption") == ["from the json"] * 2
    assert "2 .jpg" in told(path) and "2 unused text or .json file of a pair with one name" in told(
        path
    )
    names = {"v1.0-a.txt": b"one", "v1.1-a.txt": b"two", "sub/v1.1-a.json": LINE}
    assert texts(tar(tmp_path / "b.tar", names)) == ["one", "two", "a line"]


def test_a_readme_beside_records_is_left_out_and_named(tmp_path: Path) -> None:
    for number, names in enumerate(
        (
            ["README.md", "rows.jsonl"],
            ["a/rows.csv", "LICENSE.txt"],
            ["z.jsonl", "dataset_info.json"],
        )
    ):
        members = {
            name: b"text\na card\n"
            if name.endswith("csv")
            else LINE
            if name.endswith("l")
            else b"a card"
            for name in names
        }
        for name, content in members.items():
            written(tmp_path / f"{number}" / name, content)
        folder, path = tmp_path / f"{number}", tar(tmp_path / f"{number}.tar", members)
        beside = next(name for name in names if name[0] in "RLd")
        assert len(texts(folder)) == len(texts(path)) == 1
        assert f"1 {beside} next to records (add it to data.sources" in told(folder)
        assert f"1 {archives.SIDECAR}" in told(path)
    assert texts(tmp_path / "0", tmp_path / "0/README.md") == ["a line", "a card"]
    members = {f"{number}/README.md": b"a page" for number in range(40)}
    for name, content in members.items():
        written(tmp_path / "pages" / name, content)
    assert (
        texts(tmp_path / "pages") == texts(tar(tmp_path / "pages.tar", members)) == ["a page"] * 40
    )


# Row 8: links.
def test_a_link_within_a_source_is_followed_and_one_out_of_it_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    written(folder / "a.txt", b"a")
    written(folder / ".store/hash", b"kept elsewhere")
    written(tmp_path / "real/extra/b.txt", b"outside")
    (folder / "again").symlink_to(".")
    (folder / "a2.txt").symlink_to("a.txt")
    (folder / "kept.txt").symlink_to(".store/hash")
    (folder / "extra").symlink_to("../real/extra")
    (folder / "one.txt").symlink_to(tmp_path / "real/extra/b.txt")
    (folder / "gone.txt").symlink_to("nowhere")
    (tmp_path / "mine").symlink_to("data")
    for source in (folder, tmp_path / "mine"):
        assert texts(source) == ["a", "kept elsewhere"]
        assert f"1 link to {tmp_path}/real/extra (add that path to data.sources" in told(source)
        assert f"1 link to {tmp_path}/real/extra/b.txt (add that path" in told(source)
        assert "2 link to a file that is read at its own path" in told(
            source
        ) and "1 link to a missing file" in told(source)
    assert texts(f"{folder}/one.txt") == ["outside"] == texts(f"{folder}/on*.txt")
    snapshot = tmp_path / "datasets--me--set/snapshots/1a2b"
    written(snapshot.parents[1] / "blobs/abc", LINE)
    snapshot.mkdir(parents=True)
    (snapshot / "a.jsonl").symlink_to("../../blobs/abc")
    assert texts(snapshot) == ["a line"]


# Nothing is passed over in silence: each branch that leaves a file out, with what it is told as.
def folder(root: Path) -> Path:
    for name in (
        "a.txt",
        "b.pdf",
        "Makefile",
        ".hidden.txt",
        ".git/c.txt",
        "x/__pycache__/d.py",
        "e.txt.bz2",
        "F.TXT",
    ):
        written(root / name, b"text")
    written(root / "empty.txt", b"")
    os.mkfifo(root / "pipe.txt")
    return root


def archive(root: Path) -> Path:
    link = tarfile.TarInfo("link.txt")
    link.type, link.linkname = tarfile.SYMTYPE, "a.txt"
    names = (
        "a.txt",
        "b.pdf",
        "Makefile",
        "._a.txt",
        ".git/c.txt",
        "x/__pycache__/d.py",
        "e.txt.bz2",
        "F.TXT",
        "in.tar",
    )
    return tar(root / "a.tar", {**dict.fromkeys(names, b"text"), "empty.txt": b""}, link)


def bucket(root: Path) -> str:
    source = "s3://bucket/set"
    names = (
        "a.txt",
        "b.pdf",
        "Makefile",
        ".hidden.txt",
        ".git/c.txt",
        "x/__pycache__/d.py",
        "e.txt.bz2",
        "F.TXT",
        "empty.txt",
    )
    (root / "objects").write_text(
        json.dumps([[f"{source}/{name}", 0 if "empty" in name else 4, "1"] for name in names])
    )
    return source


COMMON = {".pdf", "without a suffix", "hidden", "__pycache__", "empty", ".bz2", ".TXT"}


@pytest.mark.parametrize(
    ("made", "others"),
    [
        (folder, {"pipe, socket or device"}),
        (archive, {"link or device", "tar inside a tar"}),
        (bucket, set()),
    ],
)
def test_nothing_is_passed_over_in_silence(
    made: Callable[[Path], Path | str],
    others: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = made(tmp_path)
    if made is bucket:
        objects = [s3.Object(*entry) for entry in json.loads((tmp_path / "objects").read_text())]
        monkeypatch.setattr(s3, "list_objects", lambda _: objects)
    said = told(source)
    assert all(f" {kind}" in said for kind in {*COMMON, *others}) and "2 hidden" in said, said


@pytest.mark.parametrize("kinds", [5, 20, 23])
def test_every_suffix_is_named_up_to_twenty_and_the_rest_counted(
    kinds: int, tmp_path: Path
) -> None:
    """The commonest first: four suffixes at most were named once, whatever else was not read."""
    names = [*(f"{kind}.kind{kind:02}" for kind in range(kinds)), "x.kind00"]
    members = dict.fromkeys(["a.txt", *names], b"text")
    for name, content in members.items():
        written(tmp_path / "data" / name, content)
    for source in (tmp_path / "data", tar(tmp_path / "a.tar", members)):
        said = told(source)
        assert ": 2 .kind00, 1 .kind" in said
        assert len(re.findall(r" 1 \.kind", said)) == min(kinds, 20) - 1
        assert ("3 more kinds" in said) == (kinds == 23)


def test_a_folder_that_may_not_be_read_or_that_a_pattern_matches_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "a.txt", b"text")
    written(tmp_path / "inner/b.txt", b"text")
    assert "1 folder, pipe or device that the pattern matches" in told(f"{tmp_path}/*")

    def forbidden(place: str) -> None:
        raise PermissionError(13, "Permission denied", place)

    monkeypatch.setattr(source_files.os, "scandir", forbidden)
    with pytest.raises(DataError, match="can't be read as a source") as caught:
        plan_units(data_of(tmp_path))
    assert "Permission denied" in str(caught.value)


def test_what_is_not_read_stands_in_the_dataset_and_in_the_refusal(tmp_path: Path) -> None:
    written(tmp_path / "text/a.txt", WORDS)
    written(tmp_path / "text/b.pdf", b"none")
    path = tar(tmp_path / "a.tar", {"a.cls": b"1", "b.cls": b"2", "c.txt": WORDS})
    found = tokenize(
        Data("set", (Source(str(tmp_path / "text")), Source(str(path))), "text", "bpe", 300, 0),
        Share(0, 1, 1),
        tmp_path,
    )
    notes = " ".join(found.notes if found else ())
    assert "1 .pdf" in notes and "skipped files: 2 .cls" in notes
    only = tar(tmp_path / "b.tar", {f"{number}.cls": b"1" for number in range(30)})
    with pytest.raises(DataError) as caught:
        tokenize(
            Data("none", (str(only),), "text", str(tmp_path / "set/tokenizer.json"), 300, 0),
            Share(0, 1, 1),
            tmp_path,
        )
    assert "30 .cls" in caught.value.why


@pytest.mark.parametrize("end", ["", "\n", " \n\n"])
def test_few_texts_of_one_line_validate_too(end: str) -> None:
    """A line's own newline is not where it can be divided: nothing would be left for validation."""
    texts = [WORDS.decode() + end for _ in range(5)]
    found = divide(
        [Document(text, number, 0, 0) for number, text in enumerate(texts)], 0.1, few=True
    )
    assert [a + b for a, b in zip(found["train"], found["validation"], strict=True)] == texts
    assert all(0 < len(text.split()) < 200 for text in found["validation"])
