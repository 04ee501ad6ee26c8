"""Validates the model in train.init_from before a run starts.

The model is a Hugging Face folder, an NxD Core checkpoint or a trainfleet checkpoint. Ranks locate
it with the same functions. This module lists files and reads headers and indexes, but no weights,
so it does not load torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from ..config import Config, platforms, weight_files
from ..config import huggingface_config as shapes
from ..config.addresses import HUB, folder_of, meant
from ..config.conversion import told
from ..config.families import Preset
from ..config.sizes import count_parameters
from ..config.types import Model, Refusals
from ..run.run_folder import RUNS, Run, run_of
from ..storage.s3 import SCHEME
from ..trust.errors import InputError, RunError, TrainfleetError
from . import index, marker
from .marker import NAME, Commit
from .store import CheckpointStore, ListedCheckpoint, store_of

KEY = "train.init_from"
# keys that do not affect weight shapes, or that are checked against the weights
FREE = ("dropout", "norm_eps", "vocab_size")
BYTES = 2  # minimum bytes per weight (bfloat16)
MODELS = (
    "a Hugging Face folder contains config.json, a trainfleet checkpoint is named "
    "step-<8 digits>, and an NxD checkpoint contains model/dp_rank_*.pt"
)

INSTEAD = f"set it to a folder: {MODELS}"


def faults(config: Config) -> Refusals:
    """Yields the key and the reason for each problem that prevents a run from starting with this
    model.

    Only local files are checked, not s3:// or hf://.
    """
    address = config.train.init_from
    if not address or address.startswith((SCHEME, HUB)) or has_begun(config):
        return
    try:
        if Path(address).is_dir():
            require(address, config)
        else:
            here = Path(address).exists() and (told(Path(address)) or "is not a folder")
            what = here or f"does not exist; {_train_first(address, INSTEAD)}"
            yield KEY, f"{address!r} {what}{meant(address)}"
    except TrainfleetError as error:
        yield (
            KEY,
            "; ".join(
                filter(
                    None, (f"{error.head}: {error.why}" if error.why else error.head, error.next)
                )
            ),
        )
    except (
        OSError,
        ValueError,
    ) as error:  # an unreadable folder, or an invalid path
        yield KEY, f"{address!r} can't be read: {getattr(error, 'strerror', '') or error}"


def require_distant(config: Config) -> None:
    """Checks a model in S3 or on the Hub over the network.

    Raises TrainfleetError if there is no model, or if it does not match the config.
    """
    address = config.train.init_from or ""
    if has_begun(config):
        return
    if address.startswith(SCHEME):
        require_checkpoint(address, config)
    elif address.startswith(HUB):
        require_shape(folder_of(address), config.model)


def has_begun(config: Config) -> bool:
    """Returns whether the run already has checkpoints, in which case train.init_from is ignored."""
    destination = config.checkpoint.path
    in_bucket = (destination or "").startswith(SCHEME)
    return bool(store_of(run_of(config.name), None if in_bucket else destination).steps())


def require(address: str, config: Config) -> None:
    """Raises TrainfleetError if a local address contains no model, or one that does not match the
    config.
    """
    folder = Path(address)
    if found := platforms.checkpoint_at(address):
        platform, checkpoint = platforms.named(found[0]), found[1]
        platform.require_readable(checkpoint)
        for described in platform.described(checkpoint):
            require_shape(described, config.model)
    elif (folder / shapes.CONFIG).is_file():
        require_shape(folder, config.model)
        weight_files.require(folder, config.model)
    elif (
        not told(folder)
        and (loose := sorted(folder.glob("*.safetensors")))
        and not NAME.fullmatch(folder.name)
    ):
        raise RunError(
            f"lacks {shapes.CONFIG}",
            where=address,
            why=f"it has {loose[0].name}, but no file that describes its model",
            next="download the folder again",
        )
    else:
        require_checkpoint(address, config)


def notes(folder: Path, model: Model) -> Iterator[str]:
    """Yields notes about the unused keys and weights of a Hugging Face folder."""
    yield from unused_keys(folder)
    if not model.module and (weights := weight_files.unused(folder, model)):
        yield f"{folder}: the model does not use {weights}"


def unused_keys(folder: Path) -> Iterator[str]:
    """Yields a line that lists the keys of a folder's config.json that trainfleet ignores."""
    if keys := shapes.unused(folder):
        yield f"{folder / shapes.CONFIG}: trainfleet ignores {', '.join(keys)}"


def require_checkpoint(address: str, config: Config) -> None:
    """Raises RunError unless an address contains a complete and valid checkpoint of the config's
    model.
    """
    store, step = locate(address)
    entry = store.look_at(step)
    if entry.commit is None or entry.fault:
        raise RunError(
            "is incomplete",
            where=entry.address,
            why=entry.fault,
            next="copy it again, or set another train.init_from",
        )
    require_fit(entry.commit, config, entry.address)
    index.read(store, entry.commit)


def require_shape(folder: Path, shape: Model) -> None:
    """Raises a RunError listing the differences if a folder's config.json does not match this
    model.
    """
    try:
        found = shapes.read(folder)
    except InputError as error:
        raise RunError(
            "is not a usable model folder",
            where=str(folder),
            why=error.head,
            next="set another train.init_from",
        ) from error
    names = [field.name for field in fields(Preset) if field.name not in FREE]
    pairs = {name: (getattr(found, name), getattr(shape, name)) for name in names}
    if other := [
        f"model.{name} is {was} in this folder, {now} in the config"
        for name, (was, now) in pairs.items()
        if was != now
    ]:
        raise RunError(
            "does not match the model in the config",
            where=str(folder),
            why="; ".join(other),
            next=f"set model.preset: {folder}",
        )


def locate(address: str) -> tuple[CheckpointStore, int]:
    """Returns the checkpoint at an address, or the newest complete checkpoint of a run or folder.

    Raises:
        RunError: there is no complete checkpoint.
    """
    parent, _, name = address.rstrip("/").rpartition("/")
    if match := NAME.fullmatch(name):
        return CheckpointStore(parent or "."), int(match[1])
    inside = [] if address.startswith(SCHEME) else [str(Run(Path(address)).checkpoints)]
    broken = list[ListedCheckpoint]()
    for store in map(CheckpointStore, [*inside, address]):
        entries = list(store.look())
        if whole := [entry.step for entry in entries if not entry.fault]:
            return store, whole[-1]
        broken += entries
    if broken:
        raise RunError(
            "has no complete checkpoint",
            where=address,
            why=f"{broken[-1].address}: {broken[-1].fault}",
            next="copy it again, or use another one",
        )
    raise RunError(
        told(Path(address)) or "contains no model",
        where=address,
        why=MODELS,
        next=_train_first(address, f"ls {address}"),
    )


def _train_first(address: str, otherwise: str) -> str:
    """Returns the advice to train the run that an address belongs to, if it belongs to a run."""
    path = Path(address)
    return f"train {path.parts[1]} first" if RUNS in path.parents else otherwise


def require_fit(commit: Commit, config: Config, where: str) -> None:
    """Raises a RunError listing the differences if a checkpoint's weights do not match the config's
    model.

    Called before memory is allocated.
    """
    differences = [
        f"{key} is {was} in the checkpoint, {now} in the config"
        for key, (was, now) in marker.changed(commit, config, commit.dataset).items()
        if key.startswith("model.") and marker.reason(key, config)
    ]
    if commit.size < (least := BYTES * count_parameters(config.model)):
        differences.append(
            f"the checkpoint has {commit.size:,} bytes, but the model needs {least:,} or more"
        )
    if differences:
        raise RunError(
            "does not match the model in the config",
            where=where,
            why="; ".join(differences),
            next="set model.* in the config to the checkpoint's values",
        )
