"""Resumes from the newest valid checkpoint after verifying all its checksums.

Also saves, restores and seeds a rank's random number generators.
"""

from __future__ import annotations

import base64
import json
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_parts

from ...checkpoints import marker
from ...checkpoints.init_from import locate, notes, require_fit, require_shape
from ...checkpoints.marker import Broken, Commit
from ...checkpoints.store import CheckpointStore, believed, store_of
from ...config import Config, platforms
from ...config import huggingface_config as shapes
from ...config.addresses import HUB, folder_of, pinned
from ...config.types import Model
from ...devices import Device
from ...models import huggingface_weights
from ...run.run_folder import Run
from ...trust.errors import RunError
from ..parallel.rank_model import Parts, State
from .checkpoint_group import Peers
from .files import Reader

# Padded size of the serialized state in bytes, excluding torch's generators. The state consists of
# 1,249 numbers with at most ten digits each.
WIDTH = 2**14


@dataclass(frozen=True)
class Damage:
    """Damaged checkpoint that was skipped, and the reason."""

    step: int
    address: str
    why: str


@dataclass(frozen=True)
class ResumePoint:
    """Checkpoint to resume from, and the config keys that changed since it was saved."""

    commit: Commit
    changed: dict[str, tuple[Any, Any]]


def find(
    peers: Peers, store: CheckpointStore, config: Config, dataset: str
) -> tuple[ResumePoint | None, list[Damage]]:
    """Finds the newest valid checkpoint and any newer damaged ones. Must be called on all ranks.

    Returns None for the valid one if the run has no checkpoints.

    Raises:
        RunError: all checkpoints are damaged, or the config belongs to a different run.
    """
    passed: list[Damage] = []
    for step in reversed(peers.one("can't list the checkpoints", store.steps)):
        address = store.address(step)
        try:
            commit = examine(peers, store, step)
        except Broken as error:
            passed.append(
                Damage(step, address, f"{error.what}: {error.why}" if error.why else error.what)
            )
            continue
        found = ResumePoint(commit, marker.check(commit, config, dataset, address))
        peers.one("can't set a damaged checkpoint aside", lambda: set_aside(store, passed))
        return found, passed
    if passed:
        raise RunError(
            "all checkpoints are damaged; trainfleet does not start over automatically",
            where=passed[0].address,
            why="; ".join(f"step {damage.step}: {damage.why}" for damage in passed),
            next="run make checkpoints to list them; restore one, or train under another name: "
            "make train SET='name=again'",
        )
    return None, []


def set_aside(store: CheckpointStore, passed: list[Damage]) -> None:
    for damage in passed:
        store.set_aside(damage.step)


def examine(peers: Peers, store: CheckpointStore, step: int) -> Commit:
    """Verifies the checksums of a checkpoint's files and returns its marker.

    Each rank verifies a share of the files.

    Raises:
        Broken: a file is damaged. Raised on all ranks.
    """
    text = peers.one("can't read a checkpoint", lambda: store.marker(step))
    address = store.address(step)
    commit = believed(text, step, address)
    mine = sorted(commit.files.items())[peers.rank :: peers.size]
    faults = peers.all(
        "can't read a checkpoint",
        lambda: [store.damage(step, name, file) for name, file in mine],
    )
    if found := peers.tell([fault for several in faults for fault in several if fault]):
        raise Broken("; ".join(found), where=address)
    return commit


def load(peers: Peers, store: CheckpointStore, found: Commit, parts: Parts, device: Device) -> bool:
    """Loads this rank's part of a checkpoint, regardless of the layout that wrote it.

    Returns whether the random number generators were also restored. Their state depends on the
    world size and the kind of device. If either differs, the caller must reseed them.
    """
    state, rank = parts.state(), str(peers.rank)
    same = found.world_size == peers.size

    def read() -> None:
        reader = Reader(store, found)
        if same:
            state["random"] = {rank: reader.room(f"random.{rank}")}
        fill(state, reader)

    peers.all("can't load a checkpoint", read)
    parts.restore(state)
    return same and restore(state["random"][rank], device)


def load_weights(peers: Peers, address: str, parts: Parts, config: Config) -> str:
    """Loads the weights that `train.init_from` names and returns their address."""
    if found := peers.one(
        "can't check train.init_from for a platform's checkpoint",
        lambda: platforms.checkpoint_at(address),
    ):
        load_whole(
            peers,
            parts,
            "can't load a platform's checkpoint",
            lambda: load_foreign(*found, parts, config),
        )
        return str(found[1])
    if address.startswith(HUB) or (Path(address) / shapes.CONFIG).is_file():
        load_whole(
            peers,
            parts,
            "can't load a Hugging Face folder",
            lambda: load_folder(address, parts, config.model),
        )
        for line in notes(folder_of(address), config.model) if peers.first else ():
            print(line)
        return pinned(address)
    store, step = peers.one("can't find the checkpoint in train.init_from", lambda: locate(address))
    commit = examine(peers, store, step)
    require_fit(commit, config, store.address(step))
    state = {"model": parts.weights()}
    peers.all("can't load a checkpoint", lambda: fill(state, Reader(store, commit)))
    parts.set_weights(state["model"])
    return store.address(step)


def load_whole(peers: Peers, parts: Parts, what: str, read: Callable[[], State]) -> None:
    """Loads unsharded weights, which `read` returns on each rank."""
    held: State = {}
    peers.all(what, lambda: held.update(read()))
    # not inside `all`, because a sharded model distributes weights in collectives
    parts.set_weights(held, whole=True)


def load_foreign(name: str, checkpoint: Path, parts: Parts, config: Config) -> State:
    """Reads weights from a checkpoint written by another platform.

    If it includes a config.json, the model's shape must match.
    """
    platform = platforms.named(name)
    for folder in platform.described(checkpoint):
        require_shape(folder, config.model)
    return read_whole(
        parts, config.model, lambda sizes: platform.load(checkpoint, config.model, sizes)
    )


def load_model(store: CheckpointStore, commit: Commit, model: nn.Module) -> None:
    """Verifies a checkpoint's checksums and loads the entire model.

    Runs in a single process without collectives.
    """
    if faults := [
        fault
        for name, file in commit.files.items()
        if (fault := store.damage(commit.step, name, file))
    ]:
        raise Broken("; ".join(faults), where=store.address(commit.step))
    weights = model.state_dict()
    fill({"model": weights}, Reader(store, commit))
    model.load_state_dict(weights)


def newest(run: Run, config: Config) -> tuple[CheckpointStore, int] | None:
    """Returns the store and step of the run's newest checkpoint that looks complete, if any.

    Raises:
        Broken: the run has checkpoints, but all are incomplete.
    """
    store = store_of(run, config.checkpoint.path)
    entries = list(store.look())
    if whole := [entry.step for entry in entries if not entry.fault]:
        for entry in entries:
            if entry.step > whole[-1] and entry.commit:
                print(
                    f"{entry.address} is damaged ({entry.fault}); using step {whole[-1]:,}",
                    file=sys.stderr,
                )
        return store, whole[-1]
    if entries:
        raise Broken(
            "is incomplete, and the run has no complete checkpoint",
            where=entries[-1].address,
            why=entries[-1].fault,
        )
    return None


def fill(state: State, reader: Reader) -> None:
    """Reads this rank's pieces of a checkpoint into the tensors of `state`.

    Raises:
        Broken: the checkpoint is damaged, or lacks a tensor of `state`.
    """
    reader.read_metadata()  # read the index here, because torch would wrap the error in another one
    try:
        with warnings.catch_warnings():
            # No collectives are needed, because each rank knows which tensors it needs.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load_parts(state, storage_reader=reader, no_dist=True)
    except (
        CheckpointException
    ) as failure:  # not an Exception subclass; contains torch's error and traceback
        error = next(iter(failure.failures.values()))[0]
        if type(error) in (RuntimeError, ValueError):  # missing tensor or size mismatch
            raise Broken(
                "does not match the tensors of this model",
                where=reader.store.address(reader.step),
                why=str(error),
            ) from error
        raise error from None


Load = Callable[[dict[str, torch.Size]], dict[str, torch.Tensor]]


def load_folder(address: str, parts: Parts, shape: Model) -> State:
    """Reads weights from a Hugging Face model folder.

    Each rank reads only the tensors that its parameters need.

    Raises:
        RunError: the shape differs, or a file or weight is missing. The message names it.
    """
    folder = folder_of(address, weights=True)
    require_shape(folder, shape)
    return read_whole(parts, shape, lambda sizes: huggingface_weights.load(folder, shape, sizes))


def read_whole(parts: Parts, shape: Model, load: Load) -> State:
    """Reads the unsharded weights of this rank's parameters, reading tied ones only once."""
    tied = {"lm_head.weight", "head.lm_head.weight"} if shape.tie_word_embeddings else set()
    named: dict[str, Any] = {
        name: tensor for name, tensor in parts.weights().items() if name not in tied
    }
    return dict(load(huggingface_weights.sizes_of(named.items())))


def read(device: Device) -> Tensor:
    """Serializes this rank's RNG state as JSON, padded to a constant size because saves are planned
    only once.
    """
    state: dict[str, Any] = {
        "device": device.kind,
        "python": random.getstate(),
        "numpy": [
            part.tolist() if isinstance(part, np.ndarray) else part
            for part in np.random.get_state(legacy=True)
        ],
        "torch": [
            base64.b64encode(generator.get_state().numpy().tobytes()).decode()
            for generator in device.generators()
        ],
    }
    text = json.dumps(state).encode().ljust(WIDTH + sum(map(len, state["torch"])))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def restore(text: Tensor, device: Device) -> bool:
    """Restores all generators from the output of `read`.

    If a different kind of device wrote the state, returns False without changing anything.

    Raises:
        RunError: the text is not a valid generator state.
    """
    try:
        state = json.loads(bytes(text.numpy()))
        generators = device.generators()
        if state.get("device", device.kind) != device.kind or len(state["torch"]) != len(
            generators
        ):
            return False
        version, words, gauss = state["python"]
        kind, key, position, *rest = state["numpy"]
        # NumPy does not validate the position, so check it here.
        if kind != "MT19937" or len(key) != 624 or not 0 <= position <= 624:
            raise ValueError("NumPy's state has an unexpected format")
        random.setstate((version, tuple(words), gauss))
        np.random.set_state((kind, np.array(key, np.uint32), position, *rest))
        for generator, encoded in zip(generators, state["torch"], strict=True):
            generator.set_state(_bytes(encoded))
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RuntimeError,
        OverflowError,
    ) as error:  # RuntimeError includes RecursionError
        raise RunError(
            "can't read the state of the random number generators",
            why=str(error),
            next="run make checkpoints",
        ) from error
    return True


def seed_all(device: Device, seed: int, step: int, rank: int) -> None:
    """Seeds all generators from the run's seed, the step and the rank."""
    sequence = np.random.SeedSequence((seed, step, rank)).generate_state(2)
    random.seed(int(sequence[0]))
    np.random.seed(int(sequence[0]))
    for generator in device.generators():
        generator.manual_seed(int(sequence[1]))


def _bytes(encoded: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(encoded)), dtype=torch.uint8)
