"""Finds before a run starts what would end it later: memory, disk space for checkpoints, folders
that can't be written.

Of this machine all of it; of a fleet that is known by its instance type, whether a rank's device
holds its part of the model. What hosts without a type have, the preflight reads off them
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
    """Raises ConfigError with everything that can't work, and what would."""
    if found := list(problems(config)):
        then = "SET='key=value' tries a value; make plan shows what it needs"
        raise ConfigError([Problem(0, "", *one) for one in found], next=then)


def problems(config: Config) -> Iterator[tuple[str, str]]:
    """Key and message of each thing that can't work."""
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
    """The memory that is known from here: of an EC2 type's devices, of this machine's, or its own;
    None if unknown.
    """
    here = backend_of(config).is_here
    if config.fleet.device == "cpu":
        return this_machine() if here else None
    # what this machine has says nothing of hosts
    return device_room(config) if here or config.fleet.is_told else None


def warnings(config: Config) -> list[str]:
    """Returns warnings about what works: what a resume changes, and more memory than this machine
    can spare now.

    Raises:
        RunError: the run can't go on with this config.
    """
    # is asked when the run starts
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
            f"warning: the model has {own:,} tokens and the tokenizer will have {trained:,}; {then}"
        )
    if not backend_of(config).is_here or config.fleet.device != "cpu":
        return found
    wanted, spare = this_machine().wanted(config), node_types.spare_memory()
    if spare is None or wanted <= spare:
        return found
    return [
        *found,
        f"warning: the ranks need {gib(wanted)} of memory, and this machine has {gib(spare)} to "
        "spare now",
    ]


def preset_notes(config: Config) -> list[str]:
    """Names the keys that this program does not use of the folder that model.preset names."""
    preset = config.model.preset
    return [*init_from.unused_keys(folder_of(preset))] if preset and preset not in PRESETS else []


def resumption(config: Config, run: Run) -> list[str]:
    """Names the changes as the run continues from its newest checkpoint, or the unused parts of the
    model from which it begins; a line each.

    Raises:
        RunError: naming what may not change.
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
    """Looks at what this machine's ranks will begin from in S3 or on the Hub; writes an empty
    object where they will keep checkpoints in S3, and removes it.

    Raises:
        S3Error: one of the two is not allowed, or there is no such bucket.
        RunError, InputError: what they would begin from is no model, or another than the config's.
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
    """Tells whether this machine sees what train.init_from names as the nodes do: an absolute path
    may be on a disk of theirs.
    """
    backend, address = backend_of(config), Path(config.train.init_from or "/")
    return (
        Can.SHARED in backend.can
        and not backend.hands_over
        and (not address.is_absolute() or address.is_dir())
    )


def this_machine() -> Room:
    """The memory that all ranks share where they compute on this machine's CPUs."""
    return Room(node_types.local_memory(), "all", "this machine")


def _shut(config: Config) -> Iterator[tuple[str, str]]:
    """Folders that the run must write and can't."""
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
            yield key, f"{folder} can't be written: ls -ld {there} shows who may"


def _narrow(config: Config) -> Iterator[tuple[str, str]]:
    """A disk that does not hold the checkpoints that are kept, and the one that is written before
    the oldest goes.
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
            f"checkpoint.keep={fewer} fits; or free some"
            if fewer >= 1
            else "free some, or set checkpoint.path"
        )
        needed = f"{wanted} checkpoints of {size(one)} need {size(wanted * one)}"
        yield (
            "checkpoint.keep",
            f"{needed}, and the disk of {folder} has {size(free)} free; {works}",
        )


def _nearest(path: Path) -> Path:
    """The path, or the nearest one above it that is there."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
