"""A checkpoint that somebody else made runs nothing, and whatever its files say ends in an error or in numbers.

`old_checkpoint` was written by the program before its index was read as data: FSDP over two ranks, AdamW.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import random
import resource
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

import verbs
from s3server import serve
from trainfleet import models
from trainfleet.checkpoints import init_from, listing
from trainfleet.checkpoints.marker import MARKER, STATES, Broken, FileSum, parse, render
from trainfleet.checkpoints.s3_store import BucketStore
from trainfleet.checkpoints.store import FolderStore
from trainfleet.checkpoints.torch_saved import pickled
from trainfleet.config import load_resolved
from trainfleet.devices.cpu import Cpu
from trainfleet.engine.checkpoint import load_model, resuming, rng_state, verify
from trainfleet.engine.checkpoint.checkpoint_group import Peers
from trainfleet.engine.checkpoint.files import Reader
from trainfleet.engine.parallel.rank_model import TorchParts
from trainfleet.trust.errors import RunError, TrainfleetError

OLD, STEP, NAME = Path(__file__).parent / "old_checkpoint", 4, "step-00000004"
CANARY = "canary"


class Harm:
    """What runs code when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.command = f"touch {folder / CANARY}"

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with the old checkpoint in it."""
    shutil.copytree(OLD / NAME, tmp_path / "checkpoints" / NAME)
    shutil.copy(OLD / "config.yaml", tmp_path)
    return tmp_path


def seal(folder: Path, **changes: Any) -> None:
    """Makes the marker fit the files again, as whoever damages them on purpose would."""
    place = folder / "checkpoints" / NAME
    commit = parse((OLD / NAME / MARKER).read_text(), "here")
    files = {
        path.name: FileSum(len(data := path.read_bytes()), zlib.crc32(data)) for path in place.iterdir() if path.name != MARKER
    }
    (place / MARKER).write_text(render(replace(commit, **{"files": files} | changes)))


def rewrite(folder: Path, change: Callable[[Metadata], object]) -> None:
    """Changes what the index says."""
    path = folder / "checkpoints" / NAME / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(metadata) or metadata))
    seal(folder)


def put_piece(folder: Path, name: str, value: object) -> None:
    """Puts an object in place of a tensor or of a rank's random numbers."""
    place = folder / "checkpoints" / NAME
    buffer = io.BytesIO()
    torch.save(value, buffer)
    (place / "__2_0.distcp").write_bytes(buffer.getvalue())

    def point(metadata: Metadata) -> None:
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        keys = [key for key in metadata.storage_data if key.fqn == name]
        entry, *_ = [metadata.storage_data.pop(key) for key in keys]
        entry.relative_path, entry.offset, entry.length = "__2_0.distcp", 0, len(buffer.getvalue())
        metadata.storage_data[type(keys[0])(name)] = entry

    rewrite(folder, point)


def fill_model(folder: Path) -> torch.nn.Module:
    model = models.build(load_resolved(folder / "config.yaml").model)
    store = FolderStore(folder / "checkpoints")
    load_model(store, listing.read(store, STEP), model)
    return model


def test_a_checkpoint_of_before_loads_to_the_last_bit(folder: Path) -> None:
    model = fill_model(folder)
    expected = {"model": {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()}}
    load(expected, storage_reader=FileSystemReader(OLD / NAME), no_dist=True)
    assert all(torch.equal(tensor, expected["model"][name]) for name, tensor in model.state_dict().items())


def test_every_tensor_of_a_checkpoint_of_before_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.main([str(folder / "checkpoints" / NAME)]) == 0
    assert "every tensor is whole and finite" in capsys.readouterr().out


@pytest.mark.parametrize("harmed", ["index", "weights", "random"])
def test_a_foreign_checkpoint_runs_nothing(folder: Path, harmed: str) -> None:
    harm = Harm(folder)
    if harmed == "index":
        rewrite(folder, lambda metadata: setattr(metadata, "planner_data", harm))
        path = folder / "checkpoints" / NAME / ".metadata"
        assert b"system" in path.read_bytes()
    else:
        put_piece(folder, {"weights": "model.norm.weight", "random": "random.0"}[harmed], harm)
    for look in (lambda: fill_model(folder), lambda: verify.main([str(folder / "checkpoints" / NAME)])):
        try:
            look()
        except TrainfleetError:
            pass
    if harmed == "random":
        state = {"random": {"0": ""}}
        store = FolderStore(folder / "checkpoints")
        with pytest.raises(Broken, match="can't be believed"):
            resuming.fill(state, Reader(store, listing.read(store, STEP)))
    assert not (folder / CANARY).exists()


@pytest.mark.parametrize("verb", ["verify", "sample", "export", "checkpoints", "eval"])
def test_verbs_tell_what_is_wrong_with_a_foreign_checkpoint(folder: Path, verb: str) -> None:
    run = folder / "runs" / "old"
    run.mkdir(parents=True)
    (folder / "checkpoints").rename(run / "checkpoints")
    (folder / "config.yaml").rename(run / "config.yaml")
    shutil.copy(run / "config.yaml", folder)
    place, path = run / "checkpoints", run / "checkpoints" / NAME / ".metadata"
    path.write_bytes(pickle.dumps(Harm(folder)))
    (folder / "checkpoints").symlink_to(place)
    seal(folder)
    words = ["SET=name=old", *(["OUT=out"] if verb == "export" else [])]
    said = verbs.enter(folder, verb, *words, code=0 if verb == "checkpoints" else 1)
    assert "Traceback" not in said and not (folder / CANARY).exists()
    assert verb == "checkpoints" or ("can't be believed" in said and NAME in said and "next: " in said)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    """This process as the only rank of a job."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield Peers()
    dist.destroy_process_group()


def test_a_run_neither_goes_on_from_nor_begins_with_a_foreign_index(folder: Path, peers: Peers) -> None:
    path, config = folder / "checkpoints" / NAME / ".metadata", load_resolved(folder / "config.yaml")
    model = models.build(config.model)
    parts = TorchParts(model, torch.optim.AdamW(model.parameters()))
    resuming.load_weights(peers, str(path.parent), parts, config)
    path.write_bytes(pickle.dumps(Harm(folder)))
    seal(folder)
    store = FolderStore(folder / "checkpoints")
    for begin in (
        lambda: resuming.load_weights(peers, str(path.parent), parts, config),
        lambda: resuming.load(peers, store, listing.read(store, STEP), parts, Cpu()),
    ):
        with pytest.raises(RunError) as caught:
            begin()
        assert "can't be believed" in caught.value.why and "make checkpoints" in caught.value.next
    assert not (folder / CANARY).exists()


@pytest.mark.parametrize("harmed", ["index", "weights", "marker", "names"])
def test_a_run_does_not_begin_with_a_foreign_checkpoint_in_a_bucket(folder: Path, peers: Peers, harmed: str) -> None:
    config, place = load_resolved(folder / "config.yaml"), folder / "checkpoints" / NAME
    model = models.build(config.model)
    parts = TorchParts(model, torch.optim.AdamW(model.parameters()))
    with serve(lambda application: application):
        upload(place)
        for address in ("s3://bucket/run", f"s3://bucket/run/{NAME}"):  # the newest of a run, or one
            assert resuming.load_weights(peers, address, parts, config).endswith(NAME)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        match harmed:
            case "index":
                rewrite(folder, lambda metadata: setattr(metadata, "planner_data", Harm(folder)))
                (place / ".metadata").write_bytes(pickle.dumps(Harm(folder)))
                seal(folder)
            case "weights":
                put_piece(folder, "model.norm.weight", Harm(folder))
            case "marker":
                (place / MARKER).write_bytes(pickle.dumps(Harm(folder)))
            case "names":
                rewrite(folder, lambda metadata: setattr(_entry(metadata), "relative_path", "../../../etc/passwd"))
        upload(place)
        with pytest.raises(RunError) as caught:
            resuming.load_weights(peers, f"s3://bucket/run/{NAME}", parts, config)
        assert NAME in f"{caught.value}" and "make checkpoints" in caught.value.next
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not (folder / CANARY).exists()


def upload(place: Path) -> None:
    bucket = BucketStore("s3://bucket/run")
    for path in place.iterdir():
        with bucket.create(STEP, path.name) as stream:
            stream.write(path.read_bytes())
    bucket.commit(STEP, (place / MARKER).read_text(errors="replace"))


def _entry(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data.values()))


LIES: dict[str, Callable[[Metadata], object]] = {
    "a file elsewhere": lambda metadata: setattr(_entry(metadata), "relative_path", "../../../etc/passwd"),
    "an absolute file": lambda metadata: setattr(_entry(metadata), "relative_path", "/etc/passwd"),
    "behind the end": lambda metadata: setattr(_entry(metadata), "offset", 2**40),
    "before the beginning": lambda metadata: setattr(_entry(metadata), "offset", -1),
    "without an end": lambda metadata: setattr(_entry(metadata), "length", 2**62),
    "a length of text": lambda metadata: setattr(_entry(metadata), "length", "9"),
    "packed": lambda metadata: setattr(_entry(metadata), "transform_descriptors", ["zstd"]),
    "a terabyte": lambda metadata: setattr(metadata.state_dict_metadata["model.norm.weight"], "size", torch.Size([2**38])),
    "negative": lambda metadata: setattr(metadata.state_dict_metadata["model.norm.weight"], "size", torch.Size([-16])),
    "no pieces": lambda metadata: setattr(metadata.state_dict_metadata["model.norm.weight"], "chunks", []),
    "a piece twice": lambda metadata: metadata.state_dict_metadata["model.norm.weight"].chunks.append(
        metadata.state_dict_metadata["model.norm.weight"].chunks[0]
    ),
    "complex": lambda metadata: setattr(metadata.state_dict_metadata["model.norm.weight"].properties, "dtype", torch.complex64),
    "another format": lambda metadata: setattr(
        metadata.state_dict_metadata["model.norm.weight"].properties, "dtype", torch.float64
    ),
    "no place": lambda metadata: metadata.storage_data.clear(),
    "no tables": lambda metadata: setattr(metadata, "state_dict_metadata", None),
    "a name with an escape": lambda metadata: metadata.state_dict_metadata.update({"\x1b]0;x": BytesStorageMetadata()}),
    "a number": lambda metadata: 7,
    "nested": lambda metadata: nested(5000),
}


def nested(depth: int) -> Any:
    """A dict whose key is as deep as that, which a recursive hash does not survive."""
    value: Any = ()
    for _ in range(200):
        value = (value,)
    return {value: depth}


@pytest.mark.parametrize("lie", LIES)
def test_what_an_index_says_is_held_against_the_files(folder: Path, lie: str) -> None:
    rewrite(folder, LIES[lie])
    with pytest.raises(Broken):
        verify_all(folder)


@pytest.mark.parametrize("lie", ["", "weights", "numbers", *LIES])
def test_what_ranks_would_refuse_to_begin_from_the_plan_refuses(folder: Path, lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With checksums that fit. Nothing runs, and what reads it can read nothing else."""
    monkeypatch.chdir(folder)
    place = folder / "checkpoints" / NAME
    match lie:
        case "weights":
            path = place / "__0_0.distcp"
            path.write_bytes(path.read_bytes().replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"))
            seal(folder)
        case "numbers":
            path = place / "__0_0.distcp"
            path.write_bytes(path.read_bytes().replace(b"FloatStorage", b"LongStorage\n"))
            seal(folder)
        case _ if lie:
            rewrite(folder, LIES[lie])
    config = load_resolved(folder / "config.yaml")
    config = replace(config, name="new", train=replace(config.train, init_from=str(place)))
    said = [message for _, message in init_from.faults(config)]
    assert len(said) == bool(lie) and ("can't be believed" in "".join(said)) == bool(lie), said


def verify_all(folder: Path) -> None:
    store = FolderStore(folder / "checkpoints")
    commit = listing.read(store, STEP)
    assert not any(listing.damage(store, STEP, name, file) for name, file in commit.files.items())
    for _ in verify.tensors(Reader(store, commit)):
        pass


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, cut out, put in twice or made as large as they can be."""
    content = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at = draw.randrange(len(content))
        match draw.randrange(4):
            case 0:
                content[at] = draw.randrange(256)
            case 1:
                del content[at : at + draw.randrange(1, 40)]
            case 2:
                content[at:at] = content[at : at + draw.randrange(1, 40)]
            case _:
                content[at : at + 8] = b"\xff" * 8
    return bytes(content)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__1_0.distcp"])
def test_changed_files_end_in_an_error_or_in_numbers(folder: Path, name: str) -> None:
    """With checksums that fit. A MemoryError, a hang or any error that is not ours would be a defect."""
    draw, path = random.Random(1), folder / "checkpoints" / NAME / name
    whole, before = path.read_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for _ in range(int(os.environ.get("FUZZ", "60"))):
        path.write_bytes(mutate(whole, draw))
        seal(folder)
        try:
            verify_all(folder)
        except TrainfleetError:
            refused += 1
    assert refused > 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes, for files of 300"


def test_changed_markers_are_refused_whatever_their_checksum_says() -> None:
    draw, whole = random.Random(2), json.loads((OLD / NAME / MARKER).read_text())["commit"] | {"scale": [65536.0, 3, 1, 2]}
    strange = [
        None,
        -1,
        2**70,
        1e400,
        float("nan"),
        "x\x1b[2J",
        [],
        {},
        [[[[[[]]]]]],
        {"../x": {"size": 1, "crc32": 1}},
        True,
        "9" * 20000,
    ]
    for _ in range(2000):
        content = dict(whole)
        key = draw.choice([*content, "unknown", "files"])
        content[key] = draw.choice([*strange, {key: draw.choice(strange)}])
        if draw.random() < 0.2:
            content.pop(draw.choice(list(whole)), None)
        body = json.dumps(content, indent=1)
        text = f'{{"crc32": "{zlib.crc32(body.encode()):08x}",\n"commit": {body}}}\n'
        try:
            commit = parse(text, "here")
        except RunError:
            continue
        assert all(name.isascii() and "/" not in name for name in commit.files) and abs(commit.time) < 1e12
        assert render(commit) == text or key in STATES or not STATES.keys() <= content.keys()


def test_a_marker_of_another_step_or_with_files_elsewhere_is_refused(folder: Path) -> None:
    seal(folder, step=8)
    with pytest.raises(Broken, match="that of step 8"):
        verify_all(folder)
    for name in ("../../victim", "/etc/passwd", "..", MARKER, "a\n", "a b"):
        seal(folder, files={name: FileSum(1, 1)})
        with pytest.raises(Broken, match="its files"):
            verify_all(folder)
    (folder / "checkpoints" / NAME / MARKER).write_text("[" * 10**6)
    with pytest.raises(Broken):
        verify_all(folder)


def test_links_and_pipes_are_no_files_of_a_checkpoint(folder: Path) -> None:
    place = folder / "checkpoints" / NAME
    for path in (place / "__1_0.distcp", place / MARKER):
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")
        with pytest.raises((Broken, AssertionError)):
            verify_all(folder)
        path.unlink()
        os.mkfifo(path)
        entry = next(listing.look(FolderStore(folder / "checkpoints")))
        assert path.name in entry.fault
        path.unlink()
        (folder / "elsewhere").rename(path)
    verify_all(folder)


def test_a_pickle_is_data_here() -> None:
    for value in ("text", 7, -5, 2**40, 1.5, None, True, [1, [2]], {"a": {"b": ()}}, (1, 2, 3, 4)):
        for protocol in (2, 4, 5):
            assert pickled.read(pickle.dumps(value, protocol)) == value
    harm = pickled.read(pickle.dumps(Harm(Path("/nowhere"))))
    assert harm.of == "posix.system" and harm.arguments == ("touch /nowhere/canary",)
    for data in (
        b"",
        b"\x80",
        b"\x80\x04",
        b".",
        b"r\xff\xff\xff\xff.",
        b"X\xff\xff\xff\xffabc.",
        b"\x8e" + b"\xff" * 8,
        pickle.dumps(nested(1)),
    ):
        with pytest.raises(ValueError, match="damaged at byte"):
            pickled.read(data)


def test_states_of_random_numbers_are_held_to_their_form() -> None:
    device, state = Cpu(), bytes(rng_state.read(Cpu()).numpy()).decode()
    assert rng_state.restore(rng_state.read(device), device) and rng_state.restore(state, device)
    whole = json.loads(state)
    numpy = whole["numpy"]
    for change in (
        {"numpy": [numpy[0], numpy[1], 10**9, *numpy[3:]]}, {"numpy": [numpy[0], numpy[1][:5], *numpy[2:]]}, {"python": [3, [1], None]},
        {"torch": [base64.b64encode(b"x").decode()]}, {"torch": 3}, {"python": None},
    ):  # fmt: skip
        with pytest.raises(RunError, match="can't be read"):
            rng_state.restore(json.dumps(whole | change), device)
    for text in (None, 3, "", "[]", "[" * 10**6):
        with pytest.raises(RunError):
            rng_state.restore(text, device)
