"""Checks for problems that would otherwise fail a run later: insufficient memory, insufficient disk
space for checkpoints, and unwritable folders.

Local runs get all of these checks. Runs on other machines only get the memory check, which requires
a known instance type: each rank's share of the model must fit in its device. Nodes of unknown types
are checked by the preflight on the hosts (hosts/node_checks.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..backends import backend_of
from ..backends.base import Can
from ..checkpoints import init_from, marker
from ..checkpoints.marker import Broken
from ..checkpoints.store import store_of
from ..config import Config
from ..config.addresses import folder_of
from ..config.families import PRESETS
from ..config.huggingface_config import CONFIG
from ..config.memory_fit import Room, checkpoint_bytes, device_room, gib, lack
from ..config.vocabulary import TRAINED
from ..data.manifest import MANIFEST
from ..hardware import node_types
from ..node.placement import LINK, unlinked
from ..report.history import size
from ..run import loggers
from ..run.run_folder import DATA, Run, run_of
from ..storage import s3
from ..storage.s3 import SCHEME
from ..trust.errors import ConfigError, Problem

UNUSED = 8  # warning threshold for the ratio of model.vocab_size to the tokenizer's vocabulary size


def require(config: Config) -> None:
    """Raises a ConfigError listing every unusable setting with a suggested fix."""
    if found := list(problems(config)):
        raise ConfigError(
            [Problem(0, "", *one) for one in found],
            next="try another value with SET='key=value'; run make plan to see what it needs",
        )


def problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the key and error message for each unusable setting."""
    here = backend_of(config).is_here
    room = room_of(config)
    if room and (found := lack(config, room)):
        yield found
    if not here and _is_on_shared_disk(config):
        yield from init_from.faults(config)
    if here:
        yield from (
            ("train.loggers", fault)
            for kind in config.train.loggers
            if (fault := loggers.lack(kind))
        )
        if fault := unlinked():
            yield "fleet.backend", f"{fault}; {LINK}"
        shut = dict(_shut(config))
        yield from shut.items()
        yield from () if shut else _narrow(config)


def room_of(config: Config) -> Room | None:
    """Returns the memory available to the ranks: that of the fleet's devices, or this machine's
    when training on its CPUs. Returns None if unknown.
    """
    here = backend_of(config).is_here
    if config.fleet.device == "cpu":
        return this_machine() if here else None
    # The hosts' memory is unrelated to this machine's.
    return device_room(config) if here or config.fleet.is_told else None


def warnings(config: Config) -> list[str]:
    """Returns warnings about usable but questionable settings: changes on resume, vocabulary that
    the tokenizer never uses, and insufficient free memory on this machine.

    Raises:
        RunError: the run can't continue with this config.
    """
    # Checkpoint stores in S3 are checked when the run starts.
    in_bucket = (config.checkpoint.path or "").startswith(SCHEME)
    found = (
        []
        if in_bucket or backend_of(config).hands_over
        else resumption(config, run_of(config.name))
    )
    own, trained = config.model.vocab_size, config.data.vocab_size
    if config.data.tokenizer == TRAINED and own > UNUSED * trained:
        then = "set data.tokenizer to the model's folder, or data.vocab_size"
        found.append(
            f"warning: the model has {own:,} tokens, but the tokenizer will have "
            f"{trained:,}; {then}"
        )
    if backend_of(config).is_here and config.fleet.hosts:
        found.append("warning: fleet.hosts is not used on this machine; set fleet.backend: ssh")
    if not backend_of(config).is_here or config.fleet.device != "cpu":
        return found
    wanted, spare = this_machine().wanted(config), node_types.spare_memory()
    if spare is None or wanted <= spare:
        return found
    return [
        *found,
        f"warning: the ranks need {gib(wanted)} of memory, but this machine has only "
        f"{gib(spare)} free now",
    ]


def preset_notes(config: Config) -> list[str]:
    """Returns notes about unused keys in the config of the model.preset folder."""
    preset = config.model.preset
    return [*init_from.unused_keys(folder_of(preset))] if preset and preset not in PRESETS else []


def resumption(config: Config, run: Run) -> list[str]:
    """Returns a line per changed setting if the run would resume from a checkpoint. Otherwise,
    returns a line per unused part of the train.init_from model.

    Raises:
        RunError: a setting has changed that must stay constant.
    """
    store = store_of(run, config.checkpoint.path)
    for step in reversed(store.steps()):
        try:
            commit = store.read(step)
        except Broken:
            continue  # The ranks set damaged checkpoints aside.
        return marker.notes(commit, config, store.address(step))
    folder = Path(config.train.init_from or "/")
    seen = backend_of(config).is_here or _is_on_shared_disk(config)
    return [*init_from.notes(folder, config.model)] if seen and (folder / CONFIG).is_file() else []


def try_addresses(config: Config) -> None:
    """Checks a local run's access to S3 and the Hugging Face Hub. Checks train.init_from, then
    writes and removes an empty object at a checkpoint.path in S3.

    Raises:
        S3Error: access is denied, or the bucket does not exist.
        RunError, InputError: train.init_from is not a model, or does not match the config.
    """
    if not backend_of(config).is_here:
        return
    init_from.require_distant(config)
    destination = config.checkpoint.path or ""
    if destination.startswith(SCHEME) and not config.checkpoint.is_off:
        address = f"{destination.rstrip('/')}/{config.name}/.writable"
        s3.write(address, b"")
        s3.remove(address)


def _is_on_shared_disk(config: Config) -> bool:
    """Returns whether this machine and the nodes see the same train.init_from folder. An absolute
    path may be on a node's local disk.
    """
    backend, address = backend_of(config), Path(config.train.init_from or "/")
    return (
        Can.SHARED in backend.can
        and not backend.hands_over
        and (not address.is_absolute() or address.is_dir())
    )


def this_machine() -> Room:
    """Returns this machine's memory, which all ranks share when training on its CPUs."""
    return Room(node_types.local_memory(), "all", "this machine")


def _shut(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the key and error message for each folder that the run must write to but can't."""
    own = {"name": run_of(config.name).folder}
    # A finished dataset is only read.
    if not (dataset := DATA / config.data.name).joinpath(MANIFEST).exists():
        own["data.name"] = dataset
    if config.checkpoint.path and not config.checkpoint.path.startswith(SCHEME):
        own["checkpoint.path"] = Path(config.checkpoint.path)
    for key, folder in own.items():
        there = _nearest(folder)
        if not there.is_dir():
            yield key, f"{folder} can't be created: {there} is a file"
        elif not os.access(there, os.W_OK | os.X_OK):
            yield key, f"{folder} is not writable; run ls -ld {there} to see its permissions"


def _narrow(config: Config) -> Iterator[tuple[str, str]]:
    """Yields an error if the disk can't hold the kept checkpoints plus one more, because the next
    checkpoint is written before the oldest one is removed.
    """
    checkpoint = config.checkpoint
    if checkpoint.is_off or (checkpoint.path or "").startswith(SCHEME):
        return
    store = store_of(run_of(config.name), checkpoint.path)
    one = checkpoint_bytes(config)
    made = (
        -(-config.train.steps // checkpoint.every_steps)
        if checkpoint.every_steps
        else checkpoint.keep + 1
    )
    wanted = min(checkpoint.keep + 1, made) - len(store.steps())
    folder = _nearest(Path(store.address(0)))
    free = shutil.disk_usage(folder).free
    if wanted * one > free:
        fewer = int(free // one) - 1 + len(store.steps())
        works = (
            f"set checkpoint.keep={fewer}, or free disk space"
            if fewer >= 1
            else "free disk space, or set checkpoint.path"
        )
        needed = f"{wanted} checkpoints of {size(one)} need {size(wanted * one)}"
        yield (
            "checkpoint.keep",
            f"{needed}, but the disk of {folder} has {size(free)} free; {works}",
        )


def _nearest(path: Path) -> Path:
    """Returns the path if it exists, otherwise its nearest existing parent."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
