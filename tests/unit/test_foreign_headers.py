"""A checkpoint of safetensors that somebody else made: whatever its index and headers say ends in one error, or in numbers.

Its checksums fit, as those of whoever makes one on purpose would. Two ranks wrote it, each the half of some tensors.
"""

from __future__ import annotations

import json
import os
import random
import resource
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from test_foreign_checkpoints import OLD, STEP, mutate
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

from trainfleet.checkpoints import headers, index, init_from, listing
from trainfleet.checkpoints.marker import MARKER, Broken, FileSum, parse, render
from trainfleet.checkpoints.pieces import ArchivePiece, CheckpointIndex, Tensor
from trainfleet.checkpoints.store import FolderStore
from trainfleet.config import load_resolved
from trainfleet.devices.cpu import Cpu
from trainfleet.engine.checkpoint import files, rng_state, verify
from trainfleet.engine.checkpoint.files import Reader
from trainfleet.engine.checkpoint.snapshot import Snapshot
from trainfleet.engine.checkpoint.tensors import DTYPES, NAMES
from trainfleet.trust.errors import TrainfleetError

PLACE = f"checkpoints/step-{STEP:08d}"
FIRST, SECOND = index.file_of(0), index.file_of(1)
NORM = "model.norm.weight"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with the old checkpoint in it, written again by this program."""
    (tmp_path / "config.yaml").write_text((OLD / "config.yaml").read_text())
    old, store = FolderStore(OLD), FolderStore(tmp_path / "checkpoints")
    found = dict(verify.tensors(Reader(old, listing.read(old, STEP))))
    halves: list[dict[str, Any]] = [{}, {}]
    entries, pieces = {}, {}
    for name, tensor in found.items():
        parts = tensor.chunk(2) if tensor.ndim > 1 else [tensor]
        starts = [(row, *(0,) * (tensor.ndim - 1)) for row in (0, len(parts[0]))] if tensor.ndim > 1 else [(0,) * tensor.ndim]
        chunks = tuple((start, tuple(part.shape)) for start, part in zip(starts, parts, strict=True))
        entries[name] = Tensor(tuple(tensor.shape), NAMES[tensor.dtype], chunks)
        for rank, (part, chunk) in enumerate(zip(parts, chunks, strict=True)):
            halves[rank][name] = replace(entries[name], chunks=(chunk,)), part.contiguous()
            pieces[name, chunk[0]] = ArchivePiece(name, index.file_of(rank), chunk[1], NAMES[tensor.dtype])
    store.begin(STEP)
    for rank, half in enumerate(halves):
        files.write_tensors(store, STEP, index.file_of(rank), half)
    files.write(store, STEP, index.FILE, [index.render(CheckpointIndex(entries, pieces))])
    store.commit(STEP, "")
    seal(tmp_path)
    return tmp_path


def seal(folder: Path) -> None:
    place = folder / PLACE
    commit = parse((OLD / place.name / MARKER).read_text(), "here")
    there = {
        path.name: FileSum(len(data := path.read_bytes()), zlib.crc32(data)) for path in place.iterdir() if path.name != MARKER
    }
    (place / MARKER).write_text(render(replace(commit, files=there, format=3)))


def rewrite(folder: Path, change: Change) -> None:
    """Changes what the index says."""
    path = folder / PLACE / index.FILE
    content = json.loads(path.read_bytes())
    path.write_text(json.dumps(change(content) or content))
    seal(folder)


def put_header(folder: Path, text: bytes, length: int | None = None) -> None:
    """Puts another header before the numbers of the first file."""
    path = folder / PLACE / FIRST
    data = path.read_bytes()
    numbers = data[8 + int.from_bytes(data[:8], "little") :]
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + numbers)
    seal(folder)


def header_of(folder: Path) -> dict[str, Any]:
    data = (folder / PLACE / FIRST).read_bytes()
    return dict(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]))


def verify_all(folder: Path) -> dict[str, torch.Tensor]:
    store = FolderStore(folder / "checkpoints")
    commit = listing.read(store, STEP)
    assert not any(listing.damage(store, STEP, name, file) for name, file in commit.files.items())
    return dict(verify.tensors(Reader(store, commit)))


def test_it_has_the_bits_that_were_written_and_torch_reads_them_too(folder: Path) -> None:
    old = FolderStore(OLD)
    expected = dict(verify.tensors(Reader(old, listing.read(old, STEP))))
    found = verify_all(folder)
    reader = HuggingFaceStorageReader(str(folder / PLACE))
    theirs = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    load(theirs, storage_reader=reader, no_dist=True)
    assert found.keys() == expected.keys() == reader.read_metadata().state_dict_metadata.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor) and torch.equal(theirs[name], tensor), name


def test_every_number_format_comes_back_and_nothing_is_a_pickle(tmp_path: Path) -> None:
    """Transposed tensors, tensors of no dimension and empty ones too; a rank's random state has one length at each save."""
    state: dict[str, Any] = {name: (torch.arange(6) % 2).to(dtype).reshape(2, 3).t() for name, dtype in DTYPES.items()}
    state |= {"count": torch.tensor(7), "empty": torch.empty(0, 3), "random": {"0": rng_state.read(Cpu())}}
    store, peers = FolderStore(tmp_path), alone()
    snapshot = Snapshot(peers, state)
    for step in (1, 2):
        torch.rand(3)
        state["random"]["0"] = rng_state.read(Cpu())
        snapshot.take(state, Cpu())
        store.begin(step)
        written = snapshot.write_index(store, step, [snapshot.write(store, step)])
        commit = replace(parse((OLD / f"step-{STEP:08d}" / MARKER).read_text(), "here"), files=written, format=3, step=step)
        store.commit(step, render(commit))
        found = dict(verify.tensors(Reader(store, commit)))
        flat = state | {"random.0": state["random"]["0"]}
        assert found.keys() == flat.keys() - {"random"}
        assert all(torch.equal(tensor, flat[name]) and tensor.dtype == flat[name].dtype for name, tensor in found.items())
        assert rng_state.restore(found["random.0"], Cpu())
        for path in (tmp_path / f"step-{step:08d}").iterdir():
            assert not any(sign in path.read_bytes() for sign in (b"torch._utils", b"collections", b"PK\x03\x04"))
        with safe_open(tmp_path / f"step-{step:08d}" / FIRST, framework="pt") as file:
            assert torch.equal(file.get_tensor("BF16"), state["BF16"])


def alone() -> Any:
    """The only rank of a job."""
    same: Callable[[Any], Any] = lambda value: value  # noqa: E731
    return SimpleNamespace(rank=0, first=True, gather=lambda plan: [plan], tell=same, scatter=lambda shares: shares[0])


def test_what_is_not_a_tensor_is_not_saved() -> None:
    with pytest.raises(TrainfleetError) as caught:
        Snapshot(alone(), {"rate": 0.1})
    assert "rate is not a tensor" in caught.value.why


def entry(content: dict[str, Any], name: str = NORM) -> dict[str, Any]:
    return dict.__getitem__(content, name)  # type: ignore[no-any-return]


LIES: dict[str, Change] = {
    "a file elsewhere": lambda content: entry(content)["pieces"][0].__setitem__(0, "../../../etc/passwd"),
    "the marker": lambda content: entry(content)["pieces"][0].__setitem__(0, MARKER),
    "itself": lambda content: entry(content)["pieces"][0].__setitem__(0, index.FILE),
    "another rank's file": lambda content: entry(content)["pieces"][0].__setitem__(0, SECOND),
    "a terabyte": lambda content: entry(content).update(shape=[2**38], pieces=[[FIRST, [0], [2**38]]]),
    "more than there is": lambda content: content.update({f"more.{i}": content[NORM] for i in range(10_000)}),
    "negative": lambda content: entry(content).update(shape=[-16]),
    "a shape that is not a number": lambda content: entry(content).update(shape=[float("nan")]),
    "a shape of truths": lambda content: entry(content).update(shape=[True]),
    "a shape of text": lambda content: entry(content).update(shape="16"),
    "nine dimensions": lambda content: entry(content).update(shape=[1] * 9),
    "no pieces": lambda content: entry(content).update(pieces=[]),
    "a piece twice": lambda content: entry(content)["pieces"].append(entry(content)["pieces"][0]),
    "complex": lambda content: entry(content).update(dtype="C64"),
    "another format": lambda content: entry(content).update(dtype="F64"),
    "a format that is a list": lambda content: entry(content).update(dtype=[]),
    "a field more": lambda content: entry(content).update(more=1),
    "a name with an escape": lambda content: content.update({"\x1b]0;x": content[NORM]}),
    "a tensor that is not there": lambda content: content.update({"model.more.weight": content[NORM]}),
    "a list": lambda content: [content],
    "a piece that is a number": lambda content: entry(content).update(pieces=[7]),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_what_an_index_says_is_held_against_the_files(folder: Path, lie: str) -> None:
    rewrite(folder, LIES[lie])
    with pytest.raises(Broken, match="can't be believed") as caught:
        verify_all(folder)
    assert caught.value.next and len(str(caught.value)) < 600


def moved(name: str, by: int) -> Change:
    """A header in which a tensor lies elsewhere."""
    return lambda header: entry(header, name).update(data_offsets=[at + by for at in header[name]["data_offsets"]])


HEADERS: dict[str, Change] = {
    "overlapping": moved(NORM, -4),
    "a gap": moved(NORM, 4),
    "behind the end": moved(NORM, 2**40),
    "before the beginning": moved(NORM, -(2**40)),
    "backwards": lambda header: entry(header)["data_offsets"].reverse(),
    "a terabyte": lambda header: entry(header).update(shape=[2**38]),
    "another shape": lambda header: entry(header).update(shape=[4, 4]),
    "negative": lambda header: entry(header).update(shape=[-16]),
    "a shape that is not a number": lambda header: entry(header).update(shape=[float("nan")]),
    "a shape of more than all": lambda header: entry(header).update(shape=[2**59] * 8),
    "another format": lambda header: entry(header).update(dtype="I32"),
    "an unknown format": lambda header: entry(header).update(dtype="F4"),
    "three offsets": lambda header: entry(header)["data_offsets"].append(9),
    "without it": lambda header: header.pop(NORM),
    "a name with an escape": lambda header: header.update({"\x1b": header.pop(NORM)}),
    "a list": lambda header: [header],
}


@pytest.mark.parametrize("lie", HEADERS)
def test_what_a_header_says_is_held_against_the_index_and_the_file(
    folder: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever reads the weights, and by the plan before it."""
    header = header_of(folder)
    put_header(folder, json.dumps(HEADERS[lie](header) if lie == "a list" else (HEADERS[lie](header), header)[1]).encode())
    refuse(folder, monkeypatch)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        (b"", 0),
        (b"{", None),
        (b"{}", 2**32),  # four GB
        (b"{}", 2**64 - 1),
        (b"{}", 2**26 + 8),
        (b"[" * 10**6, None),
        (b'{"a":' * 10**5, None),
        (b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "a": {}}', None),
        (b'{"__metadata__": {"a": 1e999}}', None),
        (b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 0]}}', None),
        (b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 0]}}', None),
        (b"\xff\xfe{}", None),
        (b'{"\\ud800": {}}', None),
    ],
)  # fmt: skip
def test_headers_that_are_none_are_refused_in_one_sentence(
    folder: Path, text: bytes, length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_header(folder, text, length)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refuse(folder, monkeypatch)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes"


def refuse(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Broken, match="can't be believed") as caught:
        verify_all(folder)
    assert FIRST in caught.value.why and "made to do harm" in caught.value.why and len(caught.value.why) < 400
    monkeypatch.chdir(folder)
    config = load_resolved(folder / "config.yaml")
    config = replace(config, name="new", train=replace(config.train, init_from=str(folder / PLACE)))
    said = [message for _, message in init_from.faults(config)]
    assert len(said) == 1 and "can't be believed" in said[0], said


def test_a_file_that_is_only_a_length_is_refused(folder: Path) -> None:
    for data in (b"", b"\x02", (2**40).to_bytes(8, "little")):
        (folder / PLACE / FIRST).write_bytes(data)
        seal(folder)
        with pytest.raises(Broken, match="can't be believed"):
            verify_all(folder)


@pytest.mark.parametrize("name", [index.FILE, FIRST, SECOND])
def test_changed_files_end_in_an_error_or_in_numbers(folder: Path, name: str) -> None:
    """A MemoryError, a hang or any error that is not ours would be a defect."""
    draw, path = random.Random(1), folder / PLACE / name
    whole, before = path.read_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for _ in range(int(os.environ.get("FUZZ", "30"))):
        path.write_bytes(mutate(whole, draw))
        seal(folder)
        try:
            verify_all(folder)
        except TrainfleetError:
            refused += 1
    assert refused > 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes, for files of 300"


def test_a_header_is_as_safetensors_writes_it(tmp_path: Path) -> None:
    piece = Tensor((4, 3), "F32", (((2, 0), (2, 3)),))
    (tmp_path / "a").write_bytes(headers.render({"w": piece}) + bytes(24))
    with (tmp_path / "a").open("rb") as stream:
        place = headers.read(stream, (tmp_path / "a").stat().st_size, "a")["w"]
    assert place.size == (2, 3) and place.strides == (3, 1) and place.first % 8 == 0
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert file.get_tensor("w").shape == (2, 3) and file.metadata()["format"] == "pt"
