"""Finds, before a run starts, problems that would end it later: memory, disk space for checkpoints,
folders that can't be written.

For this machine, it checks all of these; for a known instance type, whether a rank's device holds
its part of the model. The preflight on the hosts examines those without a type
(hosts/node_checks.py).
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

UNUSED = 8  # times a tokenizer's size, beyond which most of a model's embedding is never read


def require(config: Config) -> None:
    """Raises ConfigError with every setting that can't work, and one that would."""
    if found := list(problems(config)):
        then = "use SET='key=value' to try a value; run make plan to see its needs"
        raise ConfigError([Problem(0, "", *one) for one in found], next=then)


def problems(config: Config) -> Iterator[tuple[str, str]]:
    """Returns key and message for each setting that can't work."""
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
    """Returns the memory that is known here: of an EC2 type's devices, of this machine's devices,
    or its own; None if unknown.
    """
    here = backend_of(config).is_here
    if config.fleet.device == "cpu":
        return this_machine() if here else None
    # this machine's memory says nothing about hosts
    return device_room(config) if here or config.fleet.is_told else None


def warnings(config: Config) -> list[str]:
    """Returns warnings about what works: what a resume changes, and more memory than this machine
    can spare now.

    Raises:
        RunError: the run can't continue with this config.
    """
    # checked when the run starts
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
    """Names the keys in model.preset's folder that this program does not use."""
    preset = config.model.preset
    return [*init_from.unused_keys(folder_of(preset))] if preset and preset not in PRESETS else []


def resumption(config: Config, run: Run) -> list[str]:
    """Names the changes if the run continues from its newest checkpoint, or the unused parts of the
    model from which it begins; one line for each.

    Raises:
        RunError: a setting changed that may not.
    """
    store = store_of(run, config.checkpoint.path)
    for step in reversed(store.steps()):
        try:
            commit = listing.read(store, step)
        except Broken:
            continue  # the ranks set it aside
        return changes.notes(commit, config, store.address(step))
    folder = Path(config.train.init_from or "/")
    seen = backend_of(config).is_here or _is_on_shared_disk(config)
    return [*init_from.notes(folder, config.model)] if seen and (folder / CONFIG).is_file() else []


def try_addresses(config: Config) -> None:
    """Checks the model in S3 or on the Hub from which this machine's ranks will begin; writes an
    empty object where they will keep checkpoints in S3, and removes it.

    Raises:
        S3Error: one of the two is not allowed, or there is no such bucket.
        RunError, InputError: their start is not a model, or not the config's.
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
    """Tells whether this machine and the nodes see the same train.init_from: an absolute path may
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
    """Yields folders that the run must write but can't."""
    own = {"name": run_of(config.name).folder}
    # a finished one is only read
    if not (dataset := DATA / config.data.name).joinpath(MANIFEST).exists():
        own["data.name"] = dataset
    if config.checkpoint.path and not config.checkpoint.path.startswith(SCHEME):
        own["checkpoint.path"] = Path(config.checkpoint.path)
    for key, folder in own.items():
        there = _nearest(folder)
        if not there.is_dir():
            yield key, f"{folder} can't be made: {there} is a file"
        elif not os.access(there, os.W_OK | os.X_OK):
            yield key, f"{folder} can't be written: run ls -ld {there} to see who may"


def _narrow(config: Config) -> Iterator[tuple[str, str]]:
    """Yields an error for a disk too small for the kept checkpoints and the next one, which is
    written before the oldest is removed.
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
            f"set checkpoint.keep={fewer}, or free some"
            if fewer >= 1
            else "free some, or set checkpoint.path"
        )
        needed = f"{wanted} checkpoints of {size(one)} need {size(wanted * one)}"
        yield (
            "checkpoint.keep",
            f"{needed}, but the disk of {folder} has {size(free)} free; {works}",
        )


def _nearest(path: Path) -> Path:
    """Returns the path, or the nearest existing one above it."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
