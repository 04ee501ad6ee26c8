"""A checkpoint that somebody else made runs nothing, and whatever its files say ends in one error, or in numbers.

Its checksums fit, as those of whoever makes one on purpose would. `old_checkpoint` is of two ranks: FSDP, AdamW.
"""

from __future__ import annotations

import base64
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
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader, load

import verbs
from s3server import serve
from trainfleet import models
from trainfleet.checkpoints import index, init_from
from trainfleet.checkpoints.marker import MARKER, Broken, FileSum, parse, render
from trainfleet.checkpoints.store import CheckpointStore
from trainfleet.config import load_resolved
from trainfleet.devices.cpu import Cpu
from trainfleet.engine.checkpoint import resuming, verify
from trainfleet.engine.checkpoint.checkpoint_group import Peers
from trainfleet.engine.checkpoint.files import DTYPES, Reader
from trainfleet.engine.checkpoint.saving import Snapshot
from trainfleet.engine.parallel.rank_model import TorchParts
from trainfleet.trust.errors import RunError, TrainfleetError

OLD, STEP, NAME = Path(__file__).parent / "old_checkpoint", 4, "step-00000004"
CANARY, NORM = "canary", "model.norm.weight"
FIRST, SECOND = index.file_of(0), index.file_of(1)
Change = Callable[[dict[str, Any]], object]


class Harm:
    """What runs code when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.command = f"touch {folder / CANARY}"

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with the checkpoint in it."""
    shutil.copytree(OLD / NAME, tmp_path / "checkpoints" / NAME)
    shutil.copy(OLD / "config.yaml", tmp_path)
    return tmp_path


def seal(folder: Path, **changes: Any) -> None:
    """Makes the marker fit the files again, as whoever damages them on purpose would."""
    place = folder / "checkpoints" / NAME
    commit = parse((OLD / NAME / MARKER).read_text(), "here")
    files = {
        path.name: FileSum(len(data := path.read_bytes()), zlib.crc32(data))
        for path in place.iterdir()
        if path.name != MARKER
    }
    (place / MARKER).write_text(render(replace(commit, **{"files": files} | changes)))


def rewrite(folder: Path, change: Change) -> None:
    """Changes what the index says."""
    path = folder / "checkpoints" / NAME / index.FILE
    content = json.loads(path.read_bytes())
    made = change(content)
    path.write_text(json.dumps(made if type(made) is list else content))
    seal(folder)


def harm(folder: Path, file: str) -> None:
    """Puts a pickle in place of a file."""
    (folder / "checkpoints" / NAME / file).write_bytes(pickle.dumps(Harm(folder)))
    seal(folder)


def verify_all(folder: Path) -> dict[str, torch.Tensor]:
    store = CheckpointStore(folder / "checkpoints")
    commit = store.read(STEP)
    assert not any(store.damage(STEP, name, file) for name, file in commit.files.items())
    return dict(verify.tensors(Reader(store, commit)))


def by_the_index(place: Path) -> dict[str, Any]:
    """All tensors of a checkpoint, by its index and numpy alone."""
    found, formats = {}, {"F32": np.float32, "U8": np.uint8}
    for name, tensor in json.loads((place / "index.json").read_text()).items():
        found[name] = np.empty(tensor["shape"], formats[tensor["dtype"]])
        for piece in tensor["pieces"]:
            numbers = np.memmap(
                place / piece["file"],
                found[name].dtype,
                "r",
                piece["begins"],
                tuple(piece["shape"]),
            )
            at = tuple(
                slice(begins, begins + length)
                for begins, length in zip(piece["offsets"], piece["shape"], strict=True)
            )
            found[name][at] = numbers
    return found


def by_torch(place: Path) -> dict[str, torch.Tensor]:
    """The same by torch's reader."""
    reader = HuggingFaceStorageReader(str(place))
    entries = reader.read_metadata().state_dict_metadata.items()
    found: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries
    }
    load(found, storage_reader=reader, no_dist=True)
    return found


def test_others_read_the_same_bits_by_the_index_and_by_the_headers(folder: Path) -> None:
    place, found = folder / "checkpoints" / NAME, verify_all(folder)
    theirs, plain = by_torch(place), by_the_index(place)
    assert found.keys() == theirs.keys() == plain.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, theirs[name]) and np.array_equal(tensor.numpy(), plain[name]), (
            name
        )


def alone() -> Any:
    """The only rank of a job."""
    same: Callable[[Any], Any] = lambda value: value  # noqa: E731
    return SimpleNamespace(
        rank=0, first=True, gather=lambda plan: [plan], tell=same, scatter=lambda shares: shares[0]
    )


def test_every_number_format_comes_back_and_nothing_is_a_pickle(tmp_path: Path) -> None:
    """Transposed tensors, tensors of no dimension and empty ones too; a rank's random state has one length at each save."""
    state: dict[str, Any] = {
        name: (torch.arange(6) % 2).to(dtype).reshape(2, 3).t() for name, dtype in DTYPES.items()
    }
    state |= {
        "count": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "random": {"0": resuming.read(Cpu())},
    }
    store, place = CheckpointStore(tmp_path), tmp_path / NAME
    snapshot = Snapshot(alone(), state)
    for _ in range(2):
        torch.rand(3)
        state["random"]["0"] = resuming.read(Cpu())
        snapshot.take(state, Cpu())
        store.begin(STEP)
        written = snapshot.write_index(store, STEP, [snapshot.write(store, STEP)])
        commit = replace(parse((OLD / NAME / MARKER).read_text(), "here"), files=written)
        store.commit(STEP, render(commit))
        found, theirs = dict(verify.tensors(Reader(store, commit))), by_torch(place)
        flat = state | {"random.0": state["random"]["0"]}
        assert found.keys() == theirs.keys() == flat.keys() - {"random"}
        for name, tensor in found.items():
            assert (
                torch.equal(tensor, flat[name])
                and torch.equal(tensor, theirs[name])
                and tensor.dtype == flat[name].dtype
            )
        assert resuming.restore(found["random.0"], Cpu())
    for path in place.iterdir():
        assert not any(
            sign in path.read_bytes() for sign in (b"torch._utils", b"collections", b"PK\x03\x04")
        )
    with safe_open(place / FIRST, framework="pt") as file:
        assert torch.equal(file.get_tensor("BF16"), state["BF16"])


def test_what_is_not_a_tensor_is_not_saved() -> None:
    with pytest.raises(TrainfleetError) as caught:
        Snapshot(alone(), {"rate": 0.1})
    assert "rate is not a tensor" in caught.value.why


def test_an_index_too_large_to_be_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "LARGEST", 100)
    store, snapshot = CheckpointStore(tmp_path), Snapshot(alone(), {"a": torch.zeros(3)})
    store.begin(STEP)
    with pytest.raises(ValueError, match="its index has more than 100 bytes"):
        snapshot.write_index(store, STEP, [])


@pytest.mark.parametrize("file", [index.FILE, FIRST, MARKER])
def test_a_pickle_in_a_checkpoint_runs_nothing(folder: Path, file: str) -> None:
    harm(folder, file)
    if file == MARKER:
        (folder / "checkpoints" / NAME / MARKER).write_bytes(pickle.dumps(Harm(folder)))
    with pytest.raises(Broken) as caught:
        verify_all(folder)
    assert file in str(caught.value) and caught.value.next and len(str(caught.value)) < 600
    assert not (folder / CANARY).exists()


def test_a_checkpoint_of_another_format_is_one_message(folder: Path) -> None:
    seal(folder, format=3)
    with pytest.raises(RunError, match="format 3, but this program reads format 5") as caught:
        verify_all(folder)
    assert NAME in str(caught.value) and "make export" in caught.value.next


@pytest.mark.parametrize(
    "verb",
    [
        "verify",
        "checkpoints",
        *(pytest.param(verb, marks=pytest.mark.thorough) for verb in ("sample", "export", "eval")),
    ],
)
def test_verbs_tell_what_is_wrong_with_a_foreign_checkpoint(folder: Path, verb: str) -> None:
    run = folder / "runs" / "old"
    run.mkdir(parents=True)
    (folder / "checkpoints").rename(run / "checkpoints")
    (folder / "config.yaml").rename(run / "config.yaml")
    shutil.copy(run / "config.yaml", folder)
    (folder / "checkpoints").symlink_to(run / "checkpoints")
    harm(folder, index.FILE)
    words = ["SET=name=old", *(["OUT=out"] if verb == "export" else [])]
    said = verbs.enter(folder, verb, *words, code=0 if verb == "checkpoints" else 1)
    assert "Traceback" not in said and not (folder / CANARY).exists()
    assert verb == "checkpoints" or (
        "can't be trusted" in said and NAME in said and "next: " in said
    )


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    """This process as the only rank of a job."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
    )
    yield Peers()
    dist.destroy_process_group()


def test_a_run_neither_goes_on_from_nor_begins_with_a_foreign_index(
    folder: Path, peers: Peers
) -> None:
    place, config = folder / "checkpoints" / NAME, load_resolved(folder / "config.yaml")
    model = models.build(config.model)
    parts = TorchParts(model, torch.optim.AdamW(model.parameters()))
    resuming.load_weights(peers, str(place), parts, config)
    harm(folder, index.FILE)
    store = CheckpointStore(folder / "checkpoints")
    for begin in (
        lambda: resuming.load_weights(peers, str(place), parts, config),
        lambda: resuming.load(peers, store, store.read(STEP), parts, Cpu()),
    ):
        with pytest.raises(RunError) as caught:
            begin()
        assert "can't be trusted" in caught.value.why and "make checkpoints" in caught.value.next
    assert not (folder / CANARY).exists()


@pytest.mark.parametrize("harmed", [index.FILE, FIRST, "marker", "names"])
def test_a_run_does_not_begin_with_a_foreign_checkpoint_in_a_bucket(
    folder: Path, peers: Peers, harmed: str
) -> None:
    config, place = load_resolved(folder / "config.yaml"), folder / "checkpoints" / NAME
    model = models.build(config.model)
    parts = TorchParts(model, torch.optim.AdamW(model.parameters()))
    with serve(lambda application: application):
        upload(place)
        for address in (
            "s3://bucket/run",
            f"s3://bucket/run/{NAME}",
        ):  # the newest of a run, or one
            assert resuming.load_weights(peers, address, parts, config).endswith(NAME)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        match harmed:
            case "marker":
                (place / MARKER).write_bytes(pickle.dumps(Harm(folder)))
            case "names":
                rewrite(folder, LIES["a file elsewhere"])
            case _:
                harm(folder, harmed)
        upload(place)
        with pytest.raises(RunError) as caught:
            resuming.load_weights(peers, f"s3://bucket/run/{NAME}", parts, config)
        assert NAME in f"{caught.value}" and "make checkpoints" in caught.value.next
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not (folder / CANARY).exists()


def upload(place: Path) -> None:
    bucket = CheckpointStore("s3://bucket/run")
    for path in place.iterdir():
        with bucket.create(STEP, path.name) as stream:
            stream.write(path.read_bytes())
    bucket.commit(STEP, (place / MARKER).read_text(errors="replace"))


def entry(content: dict[str, Any]) -> dict[str, Any]:
    return dict.__getitem__(content, NORM)  # type: ignore[no-any-return]


def piece(content: dict[str, Any], **changes: Any) -> None:
    entry(content)["pieces"][0].update(changes)


LIES: dict[str, Change] = {
    "a file elsewhere": lambda content: piece(content, file="../../../etc/passwd"),
    "the marker": lambda content: piece(content, file=MARKER),
    "itself": lambda content: piece(content, file=index.FILE),
    "behind the end": lambda content: piece(content, begins=2**40),
    "over the end": lambda content: piece(content, begins=(OLD / NAME / FIRST).stat().st_size - 31),
    "before the beginning": lambda content: piece(content, begins=-1),
    "a beginning of text": lambda content: piece(content, begins="9"),
    "a terabyte": lambda content: (entry(content).update(shape=[2**38], pieces=entry(content)["pieces"][:1]), piece(content, shape=[2**38])),
    "more than there is": lambda content: content.update({f"more.{i}": content[NORM] for i in range(10_000)}),
    "empty and absurd": lambda content: (entry(content).update(shape=[2**59, 2**59, 0], pieces=entry(content)["pieces"][:1]),
                                         piece(content, shape=[2**59, 2**59, 0], offsets=[0, 0, 0])),
    "negative": lambda content: entry(content).update(shape=[-16]),
    "negative pieces": lambda content: (entry(content).update(shape=[0]), piece(content, shape=[8]), entry(content)["pieces"][1].update(shape=[-8])),
    "a shape that is not a number": lambda content: entry(content).update(shape=[float("nan")]),
    "a shape of truths": lambda content: entry(content).update(shape=[True]),
    "a shape of text": lambda content: entry(content).update(shape="16"),
    "nine dimensions": lambda content: (entry(content).update(shape=[1] * 9, pieces=entry(content)["pieces"][:1]),
                                        piece(content, shape=[1] * 9, offsets=[0] * 9)),
    "no pieces": lambda content: entry(content).update(pieces=[]),
    "half of it": lambda content: entry(content)["pieces"].pop(),
    "a piece twice": lambda content: entry(content)["pieces"].append(entry(content)["pieces"][0]),
    "complex": lambda content: entry(content).update(dtype="C64"),
    "a format that is a list": lambda content: entry(content).update(dtype=[]),
    "a field more": lambda content: entry(content).update(more=1),
    "a field less": lambda content: entry(content).pop("dtype"),
    "a name with an escape": lambda content: content.update({"\x1b]0;x": content[NORM]}),
    "a list": lambda content: [content],
    "a piece that is a number": lambda content: entry(content).update(pieces=[7]),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_what_an_index_says_is_held_against_the_files(
    folder: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever reads the weights, and by the plan before it."""
    rewrite(folder, LIES[lie])
    refuse(folder, monkeypatch)


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 10**6, b'{"a":' * 10**5, b'{"a": {}, "a": {}}', b'{"a": 1e999}', b"\xff\xfe{}",
                                  b'{"\\ud800": {}}', b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "pieces": []}}'])  # fmt: skip
def test_an_index_that_is_none_or_is_cut_off_is_refused_in_one_sentence(
    folder: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before = (
        folder / "checkpoints" / NAME / index.FILE,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )
    path.write_bytes(data or path.read_bytes()[:-100])
    seal(folder)
    refuse(folder, monkeypatch)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes"


def refuse(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Broken, match="can't be trusted") as caught:
        verify_all(folder)
    error = caught.value
    assert (
        NAME in error.where
        and index.FILE in error.why
        and "tampered" in error.why
        and error.next
        and len(error.why) < 400
    )
    monkeypatch.chdir(folder)
    config = load_resolved(folder / "config.yaml")
    config = replace(
        config,
        name="new",
        train=replace(config.train, init_from=str(folder / "checkpoints" / NAME)),
    )
    said = [message for _, message in init_from.faults(config)]
    assert len(said) == 1 and "can't be trusted" in said[0], said


def test_pieces_of_another_step_are_refused(folder: Path) -> None:
    """A file of the same size, which the marker's checksum tells apart."""
    path = folder / "checkpoints" / NAME / SECOND
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    path.write_bytes(data)
    store = CheckpointStore(folder / "checkpoints")
    commit = store.read(STEP)
    with pytest.raises(Broken, match=f"{SECOND} does not match its checksum"):
        resuming.load_model(
            store, commit, models.build(load_resolved(folder / "config.yaml").model)
        )


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


@pytest.mark.parametrize("name", [index.FILE, FIRST])
def test_changed_files_end_in_an_error_or_in_numbers(folder: Path, name: str) -> None:
    """With checksums that fit. A MemoryError, a hang or any error that is not ours would be a defect."""
    draw, path = random.Random(1), folder / "checkpoints" / NAME / name
    whole, before = path.read_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for _ in range(int(os.environ.get("FUZZ", "30"))):
        path.write_bytes(mutate(whole, draw))
        seal(folder)
        try:
            verify_all(folder)
        except TrainfleetError:
            refused += 1
    assert refused > 5 or name != index.FILE
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, (
        "kilobytes, for files of 300"
    )


def test_changed_markers_are_refused_whatever_their_checksum_says() -> None:
    draw, whole = (
        random.Random(2),
        json.loads((OLD / NAME / MARKER).read_text())["commit"] | {"scale": [65536.0, 3, 1, 2]},
    )
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
        assert (
            all(name.isascii() and "/" not in name for name in commit.files)
            and abs(commit.time) < 1e12
        )
        assert parse(render(commit), "here") == commit


def test_a_marker_of_another_step_or_with_files_elsewhere_is_refused(folder: Path) -> None:
    seal(folder, step=8)
    with pytest.raises(Broken, match="belongs to step 8"):
        verify_all(folder)
    for name in ("../../victim", "/etc/passwd", "..", MARKER, "a\n", "a b"):
        seal(folder, files={name: FileSum(1, 1)})
        with pytest.raises(Broken, match="files must be of the form"):
            verify_all(folder)
    (folder / "checkpoints" / NAME / MARKER).write_text("[" * 10**6)
    with pytest.raises(Broken):
        verify_all(folder)


def test_links_and_pipes_are_no_files_of_a_checkpoint(folder: Path) -> None:
    place = folder / "checkpoints" / NAME
    for path in (place / SECOND, place / MARKER):
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")
        with pytest.raises((Broken, AssertionError)):
            verify_all(folder)
        path.unlink()
        os.mkfifo(path)
        entry = next(CheckpointStore(folder / "checkpoints").look())
        assert path.name in entry.fault
        path.unlink()
        (folder / "elsewhere").rename(path)
    verify_all(folder)


def test_states_of_random_numbers_are_held_to_their_form() -> None:
    device, state = Cpu(), bytes(resuming.read(Cpu()).numpy()).decode()
    assert resuming.restore(resuming.read(device), device)
    whole = json.loads(state)
    numpy = whole["numpy"]
    for change in (
        {"numpy": [numpy[0], numpy[1], 10**9, *numpy[3:]]}, {"numpy": [numpy[0], numpy[1][:5], *numpy[2:]]}, {"python": [3, [1], None]},
        {"torch": [base64.b64encode(b"x").decode()]}, {"torch": 3}, {"python": None},
    ):  # fmt: skip
        with pytest.raises(RunError, match="can't read the state of the random number generators"):
            resuming.restore(as_tensor(json.dumps(whole | change)), device)
    for text in (" ", "[]", "[" * 10**6, "3", "\x80"):
        with pytest.raises(RunError):
            resuming.restore(as_tensor(text), device)


def as_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode("latin-1")), dtype=torch.uint8)
