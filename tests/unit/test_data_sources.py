"""Listing, cutting and reading sources: nothing lost, nothing twice, and bad input named by file and line."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from requirement import need
from trainfleet.config.types import Data, Source
from trainfleet.data import formats, sources
from trainfleet.data.documents import is_table, left_out, read_piece, read_unit
from trainfleet.data.source_files import list_files, stat
from trainfleet.data.sources import SourcePiece, have_changed, plan_units
from trainfleet.trust.errors import DataError

DATA = Data("set", (), "text", "bpe", 300, 0.1)


def data_of(*paths: Path | str) -> Data:
    return replace(DATA, sources=tuple(map(str, paths)))


def texts_of(data: Data) -> list[str]:
    return [
        document.text
        for unit in plan_units(data).units
        for document in read_unit(unit, data.text_field)
    ]


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text(
        "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts))
    )
    return path


def write_any(path: Path, texts: list[str]) -> None:
    """The texts in a file of the kind that its name says."""
    content = write_lines(path, texts).read_bytes()
    if path.suffix == ".parquet":
        parquet, arrow = need("pyarrow.parquet"), need("pyarrow")
        parquet.write_table(arrow.table({"text": texts}), path)
    elif path.suffix == ".zst":
        path.write_bytes(need("zstandard").ZstdCompressor().compress(content))
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))


def some_texts(count: int, seed: int = 1) -> list[str]:
    draw = random.Random(seed)
    return [
        f"{i} " + "".join(draw.choices('ab é日😀\n\t"\\', k=draw.randrange(1, 80)))
        for i in range(count)
    ]


def test_every_kind_of_file_is_read_whole(tmp_path: Path) -> None:
    texts = some_texts(30)
    write_lines(tmp_path / "a.jsonl", texts)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write((tmp_path / "a.jsonl").read_text())
    (tmp_path / "c.md").write_text("# title\n\0null")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    (tmp_path / ".hidden.txt").write_text("no")
    assert texts_of(data_of(tmp_path, tmp_path / "c.md")) == [*texts, *texts, "# title\n\0null"]
    assert texts_of(data_of(f"{tmp_path}/*.md", tmp_path / "a.jsonl")) == [
        "# title\n\0null",
        *texts,
    ]


@pytest.mark.parametrize("ending", ["\n", ""])
def test_ranges_of_a_jsonl_file_hold_each_line_once(tmp_path: Path, ending: str) -> None:
    texts = some_texts(40)
    path = write_lines(tmp_path / "a.jsonl", texts)
    path.write_text(path.read_text().rstrip("\n") + ending)
    size = path.stat().st_size
    for step in (1, 2, 7, 64, 1000, size):
        pieces = [
            SourcePiece(stat(str(path)), start, min(start + step, size))
            for start in range(0, size, step)
        ]
        found = [document for piece in pieces for document in read_piece(piece, "text")]
        assert [document.text for document in found] == texts
        assert sum(document.consumed for document in found) == size


def test_a_long_text_is_cut_into_documents_that_join_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "GRID", 256)
    monkeypatch.setattr(sources, "LARGEST_TEXT", 1024)
    monkeypatch.setattr(formats, "SEEK_BLANK", 100)
    for text in (
        "\n".join(some_texts(100)),
        "é日😀" * 900,
        "word " * 90 + "\n\n" + "x" * 2000 + "\n",
    ):
        path = tmp_path / "long.txt"
        path.write_text(text)
        plan = plan_units(data_of(path))
        assert "cut at blank lines" in plan.warnings[0]
        found = texts_of(data_of(path))
        assert "".join(found) == text
        assert len(found) >= 3
        whole = SourcePiece(stat(str(path)), 0, path.stat().st_size)
        assert [document.text for document in read_piece(whole, "text")] == found, (
            "the units' bounds must not matter"
        )


def test_units_gather_small_files_and_cut_large_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "GRID", 1000)
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_text("x" * 300)
    write_lines(tmp_path / "big.jsonl", ["y" * 90] * 50)
    plan = plan_units(data_of(tmp_path))
    assert plan == plan_units(data_of(tmp_path))
    assert [unit.index for unit in plan.units] == list(range(len(plan.units)))
    assert (
        sum(unit.bytes for unit in plan.units)
        == plan.bytes
        == sum(path.stat().st_size for path in tmp_path.iterdir())
    )
    assert all(unit.bytes <= 1000 for unit in plan.units)
    assert plan.files == 21 and len(plan.units) < 15


def test_the_standard_library_is_a_source() -> None:
    plan = plan_units(data_of("stdlib"))
    assert plan.bytes > 5_000_000
    assert all(piece.path.startswith("stdlib:") for unit in plan.units for piece in unit.pieces)
    assert not any("site-packages" in piece.path for unit in plan.units for piece in unit.pieces)
    json_files = [
        unit
        for unit in plan.units
        if any(piece.path == "stdlib:json/__init__.py" for piece in unit.pieces)
    ]
    assert any(
        "JavaScript Object Notation" in document.text
        for document in read_unit(json_files[0], "text")
    )


def test_the_stories_of_the_first_run_are_those_of_their_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Listed alike on every machine, wherever trainfleet is and whenever it was installed."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    import stories

    ((file,), unread) = list_files("toy-stories")
    assert not unread and not file.version and "/" not in file.path
    dice = random.Random(stories.SEED)
    assert texts_of(data_of("toy-stories")) == [stories.story(dice) for _ in range(stories.COUNT)]


def test_tables_of_the_standard_library_are_no_documents_and_that_is_said() -> None:
    units = plan_units(data_of("stdlib")).units
    unit = next(
        unit
        for unit in units
        if any(piece.path == "stdlib:encodings/cp437.py" for piece in unit.pieces)
    )
    texts = [document.text for document in read_unit(unit, "text")]
    assert (
        not any("Python Character Mapping Codec cp437" in text for text in texts)
        and len(texts) > 20
    )
    assert left_out(unit, len(texts))[0].endswith(
        f"{len(unit.pieces) - len(texts)} of {len(unit.pieces)} files skipped: a table of literals, empty, or not UTF-8"
    )
    assert (
        is_table("# codes\n" + "    0x41: 'a',\n" * 9)
        and not is_table("import os\n\nNAMES = [\n    'a',\n]\n")
        and not is_table("")
    )


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_a_record_that_is_too_long_is_named_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(formats, "LONGEST", 50_000)
    path, texts = tmp_path / f"a{ending}", ["short", "x y " * 10_000, "0 " * 30_000, "short"]
    write_any(path, texts[:2])
    assert texts_of(data_of(path)) == texts[:2]
    write_any(path, texts)
    row = "row 2" if ending == ".parquet" else f"a{ending}:3"
    refused(data_of(path), row, "too long for one document", ".txt")


def refused(data: Data, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        texts_of(data)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_bad_sources_are_named(tmp_path: Path) -> None:
    refused(data_of(tmp_path / "gone.txt"), "gone.txt", "no such file")
    refused(data_of(tmp_path / "*.txt"), "*.txt", "no file matches")
    (tmp_path / "folder").mkdir()
    refused(data_of(tmp_path / "folder"), "folder", "it has no")
    (tmp_path / "empty.txt").write_text("")
    refused(data_of(tmp_path / "empty.txt"), "empty.txt", "it is empty")
    (tmp_path / "a.docx").write_text("x")
    refused(data_of(tmp_path / "a.docx"), "a.docx", ".jsonl.gz")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{broken", ["is not valid JSON"]),
        (b'["text"]', ["is not a JSON object"]),
        (b'{"body": "x"}', ["lacks the field `text`", "body"]),
        (b'{"text": 0}', ["`text` is 0, not a string"]),
        (b'{"text": "\xff"}', ["is not valid UTF-8", "0xff"]),
        (b'{"text": "\\ud800"}', ["surrogate"]),
    ],
)
def test_a_bad_line_is_named_in_whichever_range_it_is(
    tmp_path: Path, line: bytes, words: list[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n{"text": "two"}\n' + line + b'\n{"text": "three"}\n')
    size = path.stat().st_size
    refused(data_of(path), f"{path}:4", *words)
    for start in (5, 15, 16, 17, 30, 33):
        with pytest.raises(DataError) as caught:
            list(read_piece(SourcePiece(stat(str(path)), start, size), "text"))
        assert f"{path}:4" in str(caught.value)


def test_bad_utf8_in_a_text_is_named_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("é\nfine\n".encode() + b"caf\xe9\n")
    refused(data_of(tmp_path / "a.txt"), f"{tmp_path}/a.txt:3", "0xe9 at byte 11", "iconv")


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    plain = write_lines(tmp_path / "a.jsonl", some_texts(2000)).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain)[:-2000])
    refused(data_of(tmp_path / "a.jsonl.gz"), "a.jsonl.gz:", "damaged compressed file")


def test_a_file_that_grows_or_vanishes_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", some_texts(10))
    plan = plan_units(data_of(path))
    path.write_text(path.read_text() + '{"text": "late"}\n')
    with pytest.raises(DataError, match="changed after"):
        list(read_unit(plan.units[0], "text"))
    path.unlink()
    with pytest.raises(DataError, match="can't be read"):
        list(read_unit(plan.units[0], "text"))


def test_listing_and_finding_load_neither_torch_nor_numpy() -> None:
    code = "import trainfleet.data.sources, trainfleet.data.dataset, trainfleet.data.progress, trainfleet.data.tokenizer;"
    code = f"import sys; sys.path[:0] = {sys.path}; {code} print(*({{'torch', 'numpy', 'tokenizers'}} & set(sys.modules)))"
    heavy = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert heavy.returncode == 0, heavy.stderr
    assert heavy.stdout.split() == []


def test_zstd_in_several_frames_is_read_whole_and_a_cut_one_refused(tmp_path: Path) -> None:
    zstandard = need("zstandard")
    texts = some_texts(3000)
    plain = write_lines(tmp_path / "a.jsonl", texts).read_bytes()
    half = plain.index(b"\n", len(plain) // 2) - 5  # frames need not end with lines
    packed = b"".join(
        zstandard.ZstdCompressor().compress(part) for part in (plain[:half], plain[half:])
    )
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(packed)
    assert texts_of(data_of(path)) == texts
    path.write_bytes(packed[:-3])
    refused(data_of(path), f"{path}:", "damaged compressed file", "middle of a frame")


def test_parquet_is_read_by_row_groups_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = some_texts(1000)
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"id": range(1000), "text": texts}), path, row_group_size=90)
    for grid in (1, 5000, 10**7):
        monkeypatch.setattr(sources, "GRID", grid)
        assert texts_of(data_of(path)) == texts
    refused(
        replace(data_of(path), text_field="body"), "a.parquet", "lacks the field `body`", "id, text"
    )
    refused(
        replace(data_of(path), text_field="id"), "a.parquet", "is not text", "its type is int64"
    )
    path.write_bytes(path.read_bytes()[:-40])
    refused(data_of(path), "a.parquet", "damaged Parquet file")


def test_a_hugging_face_dataset_is_streamed_by_its_shards(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    texts = some_texts(60)
    for i in range(3):
        write_lines(tmp_path / f"train-{i}.jsonl", texts[i * 20 : i * 20 + 20])
    source = data_of(f"hf://{tmp_path}")
    assert plan_units(source).files == 3
    assert texts_of(source) == texts
    refused(replace(source, text_field="body"), "lacks the field `body`")
    refused(data_of(f"hf://{tmp_path}/gone"), "gone", "Hugging Face")


def test_each_source_may_have_its_own_text_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "b.jsonl").write_text('{"body": "two"}\n')
    data = replace(
        DATA,
        sources=(str(tmp_path / "a.jsonl"), Source(str(tmp_path / "b.jsonl"), text_field="body")),
    )
    units = plan_units(data).units
    assert [unit.source for unit in units] == [0, 1], "a unit belongs to one source"
    assert [
        document.text
        for unit in units
        for document in read_unit(unit, data.text_field_of(unit.source))
    ] == ["one", "two"]


def test_a_source_that_is_named_again_and_again_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / f"text/{number}.txt").write_text("some words")
    looked, look = list[int](), sources._entry
    monkeypatch.setattr(
        sources, "_entry", lambda number, source: looked.append(number) or look(number, source)
    )  # type: ignore[func-returns-value]
    plan = plan_units(data_of(*[tmp_path / "text"] * 5000, tmp_path / "text/7.txt"))
    assert (
        looked == [0, 5000]
        and plan.files == 20
        and [unit.source for unit in plan.units] == [0] * len(plan.units)
    )
    assert [warning for warning in plan.warnings if "more than once" in warning] == [
        f"{path} is in data.sources more than once; it is read once"
        for path in (tmp_path / "text", tmp_path / "text/7.txt")
    ]


def test_the_same_file_twice_is_read_once_and_said(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["x"])
    plan = plan_units(data_of(path, f"{tmp_path}/*.jsonl"))
    assert plan.files == 1 and "more than once; it is read once" in plan.warnings[0]


def test_sources_that_change_after_the_listing_are_noticed_and_ones_that_are_gone_are_not_missed(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.txt").write_text("one")
    data = data_of(tmp_path)
    listed = plan_units(data).identity
    assert not have_changed(data, listed)
    (tmp_path / "b.txt").write_text("two")
    assert have_changed(data, listed)
    for path in tmp_path.iterdir():
        path.unlink()
    assert not have_changed(data, listed)
