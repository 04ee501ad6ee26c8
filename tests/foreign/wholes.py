"""A run whose model, dataset and records are real, with one file that is not; and each verb that reads it, in this process."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from trainfleet import cli, models
from trainfleet.checkpoints import marker
from trainfleet.checkpoints.marker import MARKER, Commit, render
from trainfleet.checkpoints.store import CheckpointStore
from trainfleet.config import load_resolved
from trainfleet.devices.cpu import Cpu
from trainfleet.engine.checkpoint.saving import Snapshot
from trainfleet.run.run_folder import Run

from . import folders
from .cases import Case

STEP, NAME = 10, folders.NAME
CHECKPOINT = f"runs/{NAME}/checkpoints/step-{STEP:08d}"
MODEL = "model: {layers: 1, hidden_size: 16, heads: 2, kv_heads: 1, intermediate_size: 16, max_position_embeddings: 32}\n"
VERBS = {"sample": ("PROMPT=Document 1", ), "eval": (), "export": ("OUT=out",), "inspect": ("VERIFY=1",), "verify": (), "checkpoints": (), "report": (), "status": (), "logs": ()}  # fmt: skip
RUN, DATA = f"runs/{NAME}/", "data/small/"
READ = [
    f"{CHECKPOINT}/{name}" for name in (MARKER, "index.json", "rank-00000.safetensors")
]  # of a checkpoint, by who loads it
TOKENS = [f"{DATA}{name}" for name in ("manifest.json", "tokenizer.json")]
# file → the verbs that can do nothing sensible without it; others pass, or say what they lack
NEEDED = {
    f"{RUN}config.yaml": ("sample", "eval", "export", "verify", "checkpoints"), **dict.fromkeys(READ[:1], ("sample", "eval", "export", "verify", "checkpoints")),
    **dict.fromkeys(READ[1:], ("sample", "eval", "export", "verify", "checkpoints")), **dict.fromkeys(TOKENS, ("sample", "eval", "export", "inspect")),
    f"{DATA}train/00000.bin": ("inspect",), f"{DATA}validation/00000.bin": ("inspect", "eval"), f"{DATA}train/00000.idx": ("inspect",), f"{RUN}results.json": ("eval", "export", "report", "status"),
    f"{RUN}metrics.jsonl": (), f"{RUN}events/launcher-x.jsonl": (), f"{RUN}handle.json": (), f"{RUN}request.json": (), f"{RUN}head.json": (),
    f"{RUN}profile/summary.json": (), f"{RUN}logs/node-0.log": (), f"{DATA}plan.json": (), f"{DATA}units/00000.json": (), f"{RUN}given.yaml": (), "config.yaml": tuple(VERBS),
}  # fmt: skip
ABSENT = ("gone", "dangling", "itself")
WRONG = (b"", b"null", b"[]", b"3", b"{", b'"x"', b"[{}]", b"\xff\xfe{\0}\0", b"\0" * 100, b'{"a":' * 3000, b"x" * 3_000_000, b"\x1b[31m\n", b"--- !!python/object/apply:os.system ['touch canary']\n")  # fmt: skip


@cache
def template() -> Path:
    """A finished run with a checkpoint that loads, and its dataset."""
    root, here = Path(mkdtemp()), Path.cwd()
    torch.set_num_threads(1)  # those that wait for work would use up a case's seconds
    with (
        mock.patch.object(folders, "CONFIG", folders.CONFIG + MODEL),
        mock.patch.object(folders, "write_checkpoint"),
    ):
        shutil.copytree(folders.template.__wrapped__(), root, dirs_exist_ok=True)
    os.chdir(root)
    try:
        write_checkpoint(lambda tensor: tensor)
    finally:
        os.chdir(here)
    return root


def write_checkpoint(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A checkpoint of the run in this folder whose weights are `change` of a new model's."""
    config = load_resolved(Path(RUN) / "config.yaml")
    store = CheckpointStore(Path(RUN) / "checkpoints")
    store.begin(STEP)
    torch.manual_seed(1)
    weights = {
        name: change(tensor) for name, tensor in models.build(config.model).state_dict().items()
    }
    peers: Any = SimpleNamespace(
        rank=0,
        first=True,
        gather=lambda plan: [plan],
        tell=lambda failure: failure,
        scatter=lambda shares: shares[0],
    )
    snapshot = Snapshot(peers, {"model": weights})
    snapshot.take({"model": weights}, Cpu())
    files = snapshot.write_index(store, STEP, [snapshot.write(store, STEP)])
    commit = Commit(
        STEP,
        40,
        640,
        1.0,
        2.5,
        1.0,
        1,
        {"dp": 1},
        "0" * 64,
        marker.flatten(config),
        {"trainfleet": "0"},
        {},
    )
    store.commit(STEP, render(replace(commit, files=files)))


def typed(verb: str, *words: str) -> tuple[int, str]:
    """A verb's exit code, and what it says; the programs that it would start run in this process."""
    said = io.StringIO()

    def in_process(module: str, *arguments: str, **environment: str) -> int:
        with mock.patch.dict(os.environ, environment):
            return int(importlib.import_module(module).main(list(arguments)))

    with contextlib.ExitStack() as stack:
        for name in ("cli.models", "cli.jobs", "launch.run_location"):
            stack.enter_context(
                mock.patch.object(
                    importlib.import_module(f"trainfleet.{name}"), "run_module", in_process
                )
            )
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(said))
        stack.enter_context(mock.patch.object(sys, "argv", ["trainfleet"]))
        code = cli.main([verb, *words])
    return code, said.getvalue()


def files() -> Iterator[Case]:
    """Each file that is read, with other contents, as no file, and not there; and each verb after that."""
    for name, needed in NEEDED.items():
        contents = {f"is {content[:20]!r}": folders.replaced(content) for content in WRONG}
        kinds = {
            f"is {label}": change
            for label, change in folders.KINDS.items()
            if needed or label != "gone"
        }
        for label, change in (contents | kinds).items():
            lacks = (
                name.endswith("results.json") and label.removeprefix("is ") in ABSENT
            )  # a run that has just begun
            yield from looks("whole", f"{name} {label}", name, change, () if lacks else needed)


def looks(
    group: str,
    label: str,
    name: str,
    change: Callable[[Path], object],
    needed: tuple[str, ...] = (),
    verbs: Iterable[str] = VERBS,
) -> Iterator[Case]:
    """Each verb after a change of one file of the template."""
    for verb in verbs:
        yield Case(
            group,
            f"make {verb} where {label}",
            _looked_at(verb, name, change, verb in needed),
            refused=False,
        )


def _looked_at(
    verb: str, name: str, change: Callable[[Path], object], must: bool
) -> Callable[[Path], object]:
    def run(folder: Path) -> None:
        shutil.copytree(template(), folder, dirs_exist_ok=True)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        change(folder / name)
        code, said = typed(verb, *VERBS[verb])
        assert "Traceback" not in said and "the program has a bug" not in said, said[-300:]
        assert code or not must, f"it ended well: {said[-300:]}"
        if code and "error: " in said:
            places = {
                Path(name).name,
                Path(name).parent.name,
                NAME if name.startswith(CHECKPOINT) else "",
            } - {""}
            assert any(place in said for place in places), f"it does not name {name}: {said[-300:]}"
        assert not any(ord(letter) < 32 and letter not in "\n\t" for letter in said), (
            f"it says a control character: {said!r:.300}"
        )
        assert not (folder / "canary").exists()
        if verb == "eval" and not code:
            Run(folder / RUN).read_results()  # it has written there

    return run


def weights() -> Iterator[Case]:
    """Checkpoints whose numbers are none: each verb says so, or shows them, and none of them spoils results.json."""
    for label, change in {
        "not numbers": lambda tensor: tensor * float("nan"), "infinite": lambda tensor: tensor + float("inf"), "huge": lambda tensor: tensor.sign() * 3e38, "none": lambda tensor: tensor * 0,
        "tiny": lambda tensor: tensor * 1e-44, "but for one numbers": lambda tensor: tensor.clone().index_put_((torch.tensor([0]),), torch.tensor(float("nan"))),
    }.items():  # fmt: skip
        yield from looks(
            "weights",
            f"weights are {label}",
            CHECKPOINT,
            _weighed(change),
            verbs=("sample", "eval", "export", "verify"),
        )


def _weighed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        shutil.rmtree(path)
        write_checkpoint(change)

    return make


def manifests() -> Iterator[Case]:
    """Manifests and configs that are right one by one and don't belong to each other or to the model."""
    manifest = json.loads((template() / DATA / "manifest.json").read_text())
    shards = manifest["shards"]
    for label, content in {
        "no validation": manifest | {"shards": [s for s in shards if s["path"].startswith("train")], "validation_tokens": 0},
        "another end": manifest | {"end_of_document": 299}, "larger ids": manifest | {"shards": [s | {"max_id": 9999} for s in shards]}, "wider": manifest | {"dtype": "int32"},
        "fewer tokens": manifest | {"tokens": 3, "shards": [s | {"tokens": 3} if s["path"].startswith("train") else s for s in shards]},
        "a shard of another source": manifest | {"shards": [s | {"source": 7} for s in shards]}, "another vocabulary": manifest | {"vocabulary_size": 10**9},
        "a shard twice": manifest | {"shards": [*shards, shards[0]]}, "a shard that is not there": manifest | {"shards": [s | {"path": s["path"][:-1] + "7"} for s in shards]},
        "large tokens": manifest | {"tokens": 2**62, "shards": [s | {"tokens": 2**62, "blocks": []} for s in shards]},
    }.items():  # fmt: skip
        text = json.dumps(content).encode()
        yield from looks(
            "manifest",
            f"it has {label}",
            f"{DATA}manifest.json",
            folders.replaced(text),
            verbs=("sample", "eval", "export", "inspect"),
        )
    resolved = (template() / RUN / "config.yaml").read_text()
    for old, new in (("vocab_size: 320", "vocab_size: 64"), ("sequence_length: 16", "sequence_length: 32"), ("max_position_embeddings: 32", "max_position_embeddings: 16"), ("layers: 1", "layers: 3"), ("layers: 1", "layers: 1000"),
                     ("hidden_size: 16", "hidden_size: 131072"), ("family: llama", "family: bert"), ("family: llama", "family: gpt2"), ("micro_batch_size: 2", "micro_batch_size: 1000000"), ("tie_word_embeddings: true", "tie_word_embeddings: false")):  # fmt: skip
        assert old in resolved, old
        yield from looks(
            "other config",
            new,
            f"{RUN}config.yaml",
            folders.replaced(resolved.replace(old, new, 1).encode()),
            verbs=("sample", "eval", "export", "verify", "checkpoints"),
        )
