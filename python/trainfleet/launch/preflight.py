"""Checks for problems that would end a run later: too little memory, too little disk space for
checkpoints, and folders that can't be written.

Local runs get all of these checks. For a known instance type, only the memory check applies: each
rank's part of the model must fit in its device. The preflight on the hosts examines nodes of
unknown types (hosts/node_checks.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..backends import backend_of
from ..backends.base import Can
from ..checkpoints import changes, init_from, listing
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

UNUSED = 8  # multiple of the tokenizer's size above which most of a model's embedding is never read


def require(config: Config) -> None:
    """Raises ConfigError that lists every setting that can't work, each with a value that would."""
    if found := list(problems(config)):
        then = "use SET='key=value' to try a value; run make plan to see its needs"
        raise ConfigError([Problem(0, "", *one) for one in found], next=then)


def problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the key and an error message for each setting that can't work."""
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
    """Returns the memory available to ranks, or None if it is unknown here. It is the memory of the
    instance type's devices, of this machine's devices, or of this machine itself.
    """
    here = backend_of(config).is_here
    if config.fleet.device == "cpu":
        return this_machine() if here else None
    # This machine's memory is unrelated to the memory of hosts.
    return device_room(config) if here or config.fleet.is_told else None


def warnings(config: Config) -> list[str]:
    """Returns warnings about settings that work. They cover changes at a resume, tokens that the
    tokenizer never uses, and more memory than this machine has free.

    Raises:
        RunError: the run can't continue with this config.
    """
    # A store in S3 is checked when the run starts.
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
    """Returns notes about the keys in model.preset's folder that this program does not use."""
    preset = config.model.preset
    return [*init_from.unused_keys(folder_of(preset))] if preset and preset not in PRESETS else []


def resumption(config: Config, run: Run) -> list[str]:
    """Returns one line for each change if the run resumes from its newest checkpoint. Otherwise,
    returns one line for each unused part of the model in train.init_from.

    Raises:
        RunError: a setting changed that must not change.
    """
    store = store_of(run, config.checkpoint.path)
    for step in reversed(store.steps()):
        try:
            commit = listing.read(store, step)
        except Broken:
            continue  # The ranks set damaged checkpoints aside.
        return changes.notes(commit, config, store.address(step))
    folder = Path(config.train.init_from or "/")
    seen = backend_of(config).is_here or _is_on_shared_disk(config)
    return [*init_from.notes(folder, config.model)] if seen and (folder / CONFIG).is_file() else []


def try_addresses(config: Config) -> None:
    """Checks access to the S3 and Hub addresses of a local run. Checks the initial model, then
    writes and removes an empty object where the run's checkpoints will be stored in S3.

    Raises:
        S3Error: access to one of the two is denied, or there is no such bucket.
        RunError, InputError: the initial model is not a model, or does not match the config.
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
    """Tells whether this machine and the nodes see the same train.init_from. An absolute path may
    be on a node's disk.
    """
    backend, address = backend_of(config), Path(config.train.init_from or "/")
    return (
        Can.SHARED in backend.can
        and not backend.hands_over
        and (not address.is_absolute() or address.is_dir())
    )


def this_machine() -> Room:
    """Returns the memory that all ranks share if they compute on this machine's CPUs."""
    return Room(node_types.local_memory(), "all", "this machine")


def _shut(config: Config) -> Iterator[tuple[str, str]]:
    """Yields an error for each folder that the run must write but can't."""
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
    """Yields an error if the disk is too small for the kept checkpoints and the next one. The next
    checkpoint is written before the oldest one is removed.
    """
    checkpoint = config.checkpoint
    if checkpoint.is_off or (checkpoint.path or "").startswith(SCHEME):
        return
    store, one = store_of(run_of(config.name), checkpoint.path), checkpoint_bytes(config)
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
    """Returns the path itself if it exists, or else its nearest existing parent."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
