"""make verify: reads one checkpoint: every byte against its checksum, then every number."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.progress import Progress

from ..checkpoints.listing import damage, read
from ..checkpoints.marker import Broken, Commit
from ..checkpoints.store import CheckpointStore
from ..hardware import node_types
from ..launch.command import store_named
from ..launch.run_location import forwarded
from ..process.processes import run_module
from ..report.history import layout, size
from ..trust.errors import ConfigError, RunError
from ..trust.safe_output import unguarded
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    if (code := forwarded("verify", variables)) is not None:
        return code
    name, store = store_named(variables)
    step = chosen(variables, store, name)
    commit = read(store, step)
    print(
        f"{store.address(step)}: {len(commit.files)} files, {size(commit.size)}, saved by "
        f"{layout(commit.layout)}",
        flush=True,
    )
    faults = [fault for fault in read_through(store, step, commit) if fault]
    if faults:
        then = "make train sets it aside and continues from the one before it"
        raise Broken(
            "differs from the committed checkpoint",
            where=store.address(step),
            why="; ".join(faults),
            then=then,
        )
    print(f"every byte is intact ({len(commit.files)} checksums)", flush=True)
    return run_module("trainfleet.engine.checkpoint.verify", store.address(step))


def chosen(variables: Variables, store: CheckpointStore, name: str) -> int:
    """Returns STEP, or else the newest step."""
    steps, text = store.steps(), variables.get("STEP", "")
    if not steps:
        raise RunError("has no checkpoint yet", where=name, next="make train")
    if text and (not re.fullmatch("[0-9]{1,18}", text) or int(text) not in steps):
        message = (
            f"there is no checkpoint of step {text!r}; the steps are {', '.join(map(str, steps))}"
        )
        raise ConfigError.of("STEP", message, next="make checkpoints")
    return int(text) if text else steps[-1]


def read_through(store: CheckpointStore, step: int, commit: Commit) -> Iterator[str]:
    """Yields the damage of each file, or "", in turn; shows a progress bar on a terminal."""
    show = Progress(
        console=Console(file=unguarded(sys.stdout)), transient=True, disable=not sys.stdout.isatty()
    )
    with ThreadPoolExecutor(node_types.local_cores()) as pool, show as bar:
        task = bar.add_task("reading", total=commit.size)
        faults = pool.map(lambda item: damage(store, step, *item), commit.files.items())
        for file, fault in zip(commit.files.values(), faults, strict=True):
            bar.advance(task, file.size)
            yield fault
