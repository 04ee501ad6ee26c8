"""What is fuzzed: each target takes any bytes and gives a value, or the one kind of error that its callers expect.

A target also says what its value must be, as a reader that takes nonsense is as wrong as one that crashes. `SEEDS` are the inputs
that a search begins with. test_fuzz_finds.py has what searches have found.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trainfleet.backends import job_starts
from trainfleet.backends.slurm import client as slurm
from trainfleet.backends.slurm.client import Said, SlurmClient
from trainfleet.checkpoints import index
from trainfleet.checkpoints.marker import FileSum
from trainfleet.config import Settings, load, weight_files
from trainfleet.config.types import Data
from trainfleet.data.documents import read_unit
from trainfleet.data.sources import plan_units
from trainfleet.hosts import facts, host_results
from trainfleet.run import records
from trainfleet.trust import untrusted_input
from trainfleet.trust.errors import TrainfleetError
from trainfleet.trust.validation import fit

DATA = Data("set", (), "text", "bpe", 300, 0.1)
KINDS = (
    ".txt",
    ".jsonl",
    ".jsonl.gz",
    ".jsonl.zst",
    ".json",
    ".csv",
    ".parquet",
    ".arrow",
    ".tar",
    ".tar.gz",
    ".txt.gz",
)
RECORDS = (records.Results, records.Event, records.Profile)
FILES = {index.file_of(0): FileSum(400, 1)}
FACTS = (
    "== facts\nclock=1000.50\nos=ubuntu 22.04\nhostname=n1\nboot_id=a\nuser=ubuntu\nroot=yes\ncores=96\nmemlock=unlimited\n"
    "disk=123 ext4 /dev/root\nshared=9 lustre 10.0.0.5@tcp:/fsx /fsx\ngpu=580.1, 32768, 0, Tesla\nneuron_ls=[{\"neuron_device\": 0}]\n"
    "neuron_ecc=neuron3/total 2\nefa=EFA installer version: 1.51\nfi_info=1\nmount=/fsx lustre x\nmtu=ens5 9001\naddress=ens5 172.31.4.7\n"
    "resolves=172.31.4.7 n1\n== end\n"
)  # fmt: skip
SQUEUE = (
    "7|RUNNING|None|0|n[1-2]|(null)|trainfleet|\n8|PENDING|Priority|1||afterok:7(unfulfilled)|x|\n"
)
SINFO = "n1|drained|disk a|b\nn2|down*|Not responding\n"
PARTITIONS = "PartitionName=a Default=YES MaxTime=1-00:30:00 State=UP TotalNodes=4\n"
CONFIG = (
    "name: a\nfleet: {backend: ssh, hosts: [n1, u@n2:22], instance_type: p4d.24xlarge, secrets: [HF_TOKEN]}\n"
    "data: {name: d, sources: [{path: stdlib, weight: 2}], tokenizer: bpe, vocab_size: 300}\n"
    "model: {preset: null, family: llama, layers: 2, width: 64, heads: 4}\ntrain: {steps: 5, parallelism: {fsdp: 2}}\n"
)  # fmt: skip


@cache
def scratch() -> Path:
    """A folder for this process's inputs, in memory where there is such a file system."""
    memory = Path("/dev/shm")
    return Path(
        tempfile.mkdtemp(prefix="trainfleet-fuzz-", dir=memory if memory.is_dir() else None)
    )


@contextlib.contextmanager
def refused(*kinds: type[Exception]) -> Iterator[None]:
    """An error of these kinds, or of trainfleet's, is an answer; its words can be printed as they are."""
    try:
        yield
    except (TrainfleetError, *kinds) as error:
        assert str(error), "an error without words"
        str(error).encode()


def untrusted_texts(content: bytes) -> None:
    """Text, JSON and lines of it come in through untrusted_input; what it shows is printable and short."""
    with refused():
        text = untrusted_input.decode(content, "it")
        shown = untrusted_input.printable(text)
        assert untrusted_input.unprintable(shown) is None
        assert len(untrusted_input.show(text)) <= untrusted_input.SHOWN
        value = untrusted_input.parse_json(text, "it")
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    for line in untrusted_input.lines_of(io.BytesIO(content)):
        with refused():
            json.dumps(untrusted_input.parse_line(line, "it"), ensure_ascii=False).encode()


def shaped_records(content: bytes) -> None:
    """Any JSON is a record of the run folder's, or none."""
    value: Any = None
    with refused():
        value = untrusted_input.parse_json(untrusted_input.decode(content, "it"), "it")
    for kind in RECORDS:
        with refused():
            fit(kind, value)
    for check in (records.check_event, records.check_metric):
        with refused():
            assert check(value) == value


def answers_of_nodes(content: bytes) -> None:
    """What facts.sh is said to have printed."""
    text = content.decode(errors="replace")
    with refused(host_results.Implausible):
        found = facts.parse(text, 0.1, 1000.0)
        assert abs(found.clock_offset) < 1e12
    with refused(host_results.Implausible):
        host_results.fitted(float, text)


def slurms_answers(content: bytes) -> None:
    """What Slurm's commands are said to have printed, each by each of their readers, and what a job's folder holds."""
    text = content.decode(errors="replace")

    def ask(words: Sequence[str], stdin: str = "", environment: Any = None) -> Said:
        return Said(0, text, "")

    with refused():
        for job in slurm.parse(text).values():
            slurm.how_it_ended(job)
    with refused():
        for partition in slurm.read_partitions(text):
            assert partition.nodes >= 0
    with refused():
        slurm.minutes(text)
    with refused():
        engine = SlurmClient(ask)
        engine.unavailable("a")
        engine.look("7")
    _starts(content)


def _starts(content: bytes) -> None:
    folder = scratch() / "job"
    start = job_starts.claim(folder, "t").parent / "slurm-7-0"
    start.mkdir(parents=True, exist_ok=True)
    for path in (start / "logs", start / "node-0.exit", job_starts.claim(folder, "t")):
        path.write_bytes(content)
    with refused():
        job_starts.number(folder, "t"), job_starts.exits(folder, "7"), job_starts.lengths(start)
        job_starts.why_cancelled(folder, "7", 0), job_starts.ends(folder, "7", 0, 4)


def indexes(content: bytes) -> None:
    """Any bytes are a checkpoint's index or refused, and its pieces lie in the files that are there."""
    with refused(ValueError):
        for tensor in index.parse(content, FILES).values():
            assert all(0 <= piece.begins <= FILES[piece.file].size for piece in tensor.pieces)


def configs(content: bytes) -> None:
    """Any file is a config or refused, and so is any SET."""
    path = scratch() / "config.yaml"
    path.write_bytes(content)
    with refused():
        load(Settings(path))
    with refused():
        path.write_text("name: a\n")
        load(Settings(path, content.decode(errors="replace")))


def sources(content: bytes) -> None:
    """Any bytes in a file of each kind (the first byte says which) are texts or a refusal that names the file."""
    if not content:
        return
    path = scratch() / f"source{KINDS[content[0] % len(KINDS)]}"
    path.write_bytes(content[1:])
    try:
        for unit in plan_units(Data("set", (str(path),), "text", "bpe", 300, 0.1)).units:
            for document in read_unit(unit, "text"):
                document.text.encode()
    except TrainfleetError as error:
        assert path.name in str(error), error


def weights(content: bytes) -> None:
    """Any bytes are a file of weights or refused."""
    folder = scratch() / "model"
    folder.mkdir(exist_ok=True)
    (folder / weight_files.WEIGHTS).write_bytes(content)
    with refused():
        for size in weight_files._sizes(folder / weight_files.WEIGHTS).values():
            assert all(type(part) is int and part >= 0 for part in size)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "untrusted_input": untrusted_texts, "records": shaped_records, "answers": answers_of_nodes, "slurm": slurms_answers, "indexes": indexes,
    "configs": configs, "sources": sources, "weights": weights,
}  # fmt: skip


def seeds(target: str) -> list[bytes]:
    """Inputs that are right: a search that begins with them is at once behind the first checks."""
    return SEEDS[target]()


def _sources() -> list[bytes]:
    lines = b'{"text": "a"}\n{"text": "b"}\n'
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("a.txt", f"{'long' * 60}.json"):
            entry = tarfile.TarInfo(name)
            entry.size = len(lines)
            archive.addfile(entry, io.BytesIO(lines))
    of_kind = {".csv": b"id,text\n1,a\n", ".jsonl.gz": gzip.compress(lines), ".tar": packed.getvalue(),
               ".tar.gz": gzip.compress(packed.getvalue()), ".txt.gz": gzip.compress(b"text")}  # fmt: skip
    return [
        bytes([number]) + of_kind.get(kind, lines) for number, kind in enumerate(KINDS)
    ] + _tables()


def _tables() -> list[bytes]:
    import pyarrow
    import pyarrow.feather
    import pyarrow.parquet

    table, parquet, arrow = pyarrow.table({"text": ["a", "b"]}), io.BytesIO(), io.BytesIO()
    pyarrow.parquet.write_table(table, parquet)
    pyarrow.feather.write_feather(table, arrow, compression="uncompressed")
    return [
        bytes([KINDS.index(".parquet")]) + parquet.getvalue(),
        bytes([KINDS.index(".arrow")]) + arrow.getvalue(),
    ]


def _indexes() -> list[bytes]:
    pieces = tuple(
        index.TensorPiece(index.file_of(0), 100 * row, (row, 0), (1, 3)) for row in (0, 1)
    )
    return [index.render({"a.weight": index.IndexedTensor("F32", (2, 3), pieces)})]


def _weights() -> list[bytes]:
    header = json.dumps(
        {"a.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    ).encode()
    return [struct.pack("<Q", len(header)) + header + b"\0\0\0\0"]


def _zip() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("data.pkl", b"x")
    return packed.getvalue()


def _records() -> list[bytes]:
    values: list[Any] = [
        {"name": "a", "status": "running", "layout": {"dp": 2}, "model": {"family": "x", "parameters": 4}, "started": 1.5},
        {"time": 4.0, "event": "fault", "rank": 0, "traceback": ["x"]}, {"step": 4, "loss": 1.5, "lr": None},
        {"micro_batch": 4, "ground": {}},
        {"seconds": 4, "steps": [1, 2], "parts": {"a": 1}, "communication": {"seconds": 1, "not_hidden": 0}, "kinds": {}, "top": []},
    ]  # fmt: skip
    return [json.dumps(value).encode() for value in values]


SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "untrusted_input": lambda: [b'{"a": [1, 2.5e3, "\\ud83d\\ude00", null, true]}', b"\xef\xbb\xbf{}\n[]", b'{"a":1,"a":2}', b"\x1b[31m\n"],
    "records": _records,
    "answers": lambda: [FACTS.encode(), b"4.5"],
    "slurm": lambda: [SQUEUE.encode(), SINFO.encode(), PARTITIONS.encode(), b"7|CANCELLED by 0|n1\n", b"1-00:30:00", b"12 a/b\n",
                      b"srun: error: n1: tasks 0-3: Exited with exit code 1\n"],
    "indexes": _indexes,
    "configs": lambda: [CONFIG.encode(), b"train.steps=4 data.sources=[a, b]", b"a: &a [1]\nb: *a\n"],
    "sources": _sources,
    "weights": _weights,
}  # fmt: skip


def tidy() -> None:
    """Removes what targets have written."""
    shutil.rmtree(scratch(), ignore_errors=True)
