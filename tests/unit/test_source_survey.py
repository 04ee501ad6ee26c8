"""What `make plan` finds out about sources, and the limit of memory of the processes that read them."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from requirement import need
from s3server import serve
from trainfleet.config import Settings, dump_resolved, load
from trainfleet.config.types import Data
from trainfleet.data.source_survey import SourceSurvey, look
from trainfleet.data.sources import MEMORY
from trainfleet.storage import s3
from trainfleet.trust.errors import DataError, NoSource, S3Error

LINES = "".join(
    json.dumps({"text": f"document {number} " * 30}) + "\n" for number in range(400)
).encode()
BOMB = """
import sys
from trainfleet.config.types import Data
from trainfleet.data.documents import read_unit
from trainfleet.data.sources import plan_units
from trainfleet.process.processes import limit_memory
from trainfleet.trust.errors import DataError
limit_memory(400 * 2**20)
try:
    for unit in plan_units(Data("set", (sys.argv[1],), "text", "bpe", 300, 0.1)).units:
        for document in read_unit(unit, "text"):
            pass
except DataError as error:
    print(error)
"""
# Stands for a library that reads what others wrote: it says how much memory its process may take.
LIBRARY = """
import resource
class Tokenizer:
    @staticmethod
    def from_json_str(definition):
        print("LIMIT", *resource.getrlimit(resource.RLIMIT_DATA), flush=True)
        raise ValueError("read it with another")
"""
SURVEY = """
import sys
from trainfleet.config.types import Data
from trainfleet.data.source_survey import look
print(look(Data("set", (sys.argv[1],), "text", "bpe", 300, 0.1)).files, "torch" in sys.modules)
"""


@pytest.fixture
def bucket() -> Iterator[None]:
    with serve(lambda application: application):
        for number in range(3):
            s3.write(f"s3://bucket/text/{number}.jsonl", LINES)
        yield


def enter(*words: str, library: str = "", workers: int = 1) -> str:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*filter(None, [library]), *sys.path]),
        "WORKERS": str(workers),
    }
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_plan_looks_at_sources_and_names_one_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    data = Data("set", (str(tmp_path / "a.txt"),), "text", "bpe", 300, 0.1)
    assert look(data) == SourceSurvey(
        1,
        9,
        1,
        9,
        (),
        ("there are few texts (1), so the last part of each is used for validation",),
        {0: 9},
    )
    with pytest.raises(NoSource, match="no such file") as missing:
        look(replace(data, sources=(str(tmp_path / "a.txt"), str(tmp_path / "c.txt"))))
    assert missing.value.entry == 1


@pytest.mark.parametrize("on_bad_record", ["stop", "skip"])
def test_the_text_of_a_compressed_source_is_estimated_from_its_first_records(
    tmp_path: Path, on_bad_record: str
) -> None:
    texts = [f"story {number**3} of {number}" * 9 for number in range(5000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "b.jsonl").write_text(lines[: len(lines) // 2].rpartition("\n")[0])
    sources = (str(tmp_path / "a.jsonl.gz"), str(tmp_path / "b.jsonl"))
    found = look(Data("set", sources, "text", "bpe", 300, 0.1, on_bad_record=on_bad_record))
    whole = sum(map(len, texts))
    assert found.by_source[0] == pytest.approx(whole, rel=0.01)
    assert found.by_source[1] == pytest.approx(whole / 2, rel=0.01)


def test_plan_looks_at_a_source_in_s3(bucket: None) -> None:
    data = Data("set", ("s3://bucket/text",), "text", "bpe", 300, 0.1)
    found = look(data)
    assert found.files == 3 and found.bytes == 3 * len(LINES)
    with pytest.raises(S3Error, match="the bucket does not exist"):
        look(replace(data, sources=("s3://none/text",)))


@pytest.mark.parametrize("form", ["{}", "hf://{}"])
def test_plan_loads_no_torch_for_it(form: str, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/train.jsonl").write_bytes(LINES)
    assert enter("-c", SURVEY, form.format(tmp_path / "set")) == "1 False\n"


def test_a_file_that_takes_too_much_memory_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"[" + b"{}," * 9_000_000 + b"{}]")  # a fortieth of what it takes as objects
    assert enter("-c", BOMB, str(path)).startswith(f"{path}: needs too much memory")


@pytest.mark.parametrize("workers", [1, 2])
def test_each_process_that_tokenizes_has_the_limit(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("text", "library", "runs/x"):
        Path(folder).mkdir(parents=True)
    for number in range(3):
        Path(f"text/{number}.jsonl").write_bytes(LINES)
    Path("library/fastokens.py").write_text(LIBRARY)
    Path("config.yaml").write_text(
        f"name: x\ndata: {{name: set, sources: ['{tmp_path}/text'], tokenizer: bpe, vocab_size: 300}}\ntrain: {{steps: 2}}\n"
    )
    Path("runs/x/config.yaml").write_text(dump_resolved(load(Settings(Path("config.yaml")))[0]))
    said = enter(
        "-m",
        "trainfleet.data",
        "runs/x/config.yaml",
        library=str(tmp_path / "library"),
        workers=workers,
    )
    limits = {line for line in said.splitlines() if line.startswith("LIMIT")}
    assert limits == {f"LIMIT {MEMORY} {MEMORY}"} and "finished:" in said, said


RECORD = {"messages": [{"role": "user", "content": "which field?"}]}
LINE = json.dumps(RECORD).encode() + b"\n"
FIRSTS = {"a.jsonl": LINE, "a.json": json.dumps([RECORD]).encode(), "a.jsonl.gz": gzip.compress(LINE),
          "a.csv": b"messages,id\nhello,1\n", "a.tsv": b"messages\tid\nhello\t1\n"}  # fmt: skip


@pytest.mark.parametrize("name", [*FIRSTS, "a.parquet", "a.tar"])
def test_a_record_with_which_tokenizing_would_end_at_once_ends_the_plan(
    name: str, tmp_path: Path
) -> None:
    """A chat in any format: `next: make train` would have failed."""
    path = tmp_path / name
    if name in FIRSTS:
        path.write_bytes(FIRSTS[name])
    elif name == "a.parquet":
        need("pyarrow.parquet").write_table(need("pyarrow").table({"messages": ["hello"]}), path)
    else:
        with tarfile.open(path, "w") as archive:
            about = tarfile.TarInfo("chat.jsonl")
            about.size = len(LINE)
            archive.addfile(about, io.BytesIO(LINE))
    data = Data("set", (str(path),), "text", "bpe", 300, 0.1)
    with pytest.raises(DataError, match="lacks the field `text`") as caught:
        look(data)
    assert "messages" in str(caught.value) and caught.value.next
    assert look(replace(data, on_bad_record="skip")).files == 1
