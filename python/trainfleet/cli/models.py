"""Verbs for trained models: checkpoints, sampling, evaluation and export."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING

from ..launch import run_location
from ..launch.command import run_named, run_trained, store_named
from ..process.processes import ask_module, run_module
from ..trust.errors import ConfigError, InputError, RunError
from ..trust.safe_output import unguarded
from .variables import Variables, amount, flag, number

if TYPE_CHECKING:
    from ..checkpoints.marker import Commit
    from ..checkpoints.store import CheckpointStore, ListedCheckpoint
    from ..report.json_output import CheckpointState

VALUES, SCORES = "trainfleet.engine.checkpoint.verify", "trainfleet.engine.evaluate"
GENERATE = "trainfleet.engine.generate"


def sample(variables: Variables, started: float) -> int:
    """Generates text from PROMPT with the latest checkpoint, token by token."""
    from ..report.summary import opening

    if (code := run_location.forwarded("sample", variables)) is not None:
        return code
    words, run = drawing(variables), run_trained(variables)
    prompt = variables["PROMPT"] if "PROMPT" in variables else opening(run.read_results())
    # The prompt follows `--`, because it may start with a dash.
    return run_module(GENERATE, *words, "--", str(run.folder), prompt)


def chat(variables: Variables, started: float) -> int:
    """Answers PROMPT, or what the user types, with the latest checkpoint."""
    if not variables.get("PROMPT") and "TRAINFLEET_HEAD" in os.environ:
        why = "make chat does not forward typed text to the machine that has the run"
        then = "make chat PROMPT='a question', or make export OUT=my-model"
        raise RunError(
            "can't chat with typed text from here",
            where=run_named(variables).name,
            why=why,
            next=then,
        )
    if (code := run_location.forwarded("chat", variables)) is not None:
        return code
    words, folder = drawing(variables), str(run_trained(variables).folder)
    # Ignore Ctrl-C here, because the child process handles it and exits.
    signal.signal(signal.SIGINT, lambda *_: None)
    return run_module(GENERATE, "--chat", *words, "--", folder, variables.get("PROMPT", ""))


def drawing(variables: Variables) -> list[str]:
    """Converts the variables of `make sample` and `make chat` to the generator's options."""
    words = {
        "--tokens": number(variables, "LENGTH", 200, least=1, most=10**6),
        "--temperature": amount(variables, "TEMPERATURE", least=0),
        "--top-p": amount(variables, "TOP_P", most=1),
        "--seed": number(variables, "SEED", 0) if "SEED" in variables else None,
    }
    return [
        str(word) for name, value in words.items() if value is not None for word in (name, value)
    ]


def checkpoints(variables: Variables, started: float) -> int:
    """Lists the checkpoints with step, time, size, loss, layout, and whether they are intact."""
    from ..report import json_output
    from ..report.history import table

    if (code := run_location.forwarded("checkpoints", variables)) is not None:
        return code
    name, store = store_named(variables)
    entries = list(store.look())
    if flag(variables, "JSON"):
        json_output.emit(json_output.CheckpointsOutput(tuple(map(facts, entries))))
        return int(any(entry.fault for entry in entries))
    if not entries:
        raise RunError("has no checkpoint yet", where=name, next="make train")
    head = ("step", "saved (UTC)", "size", "loss", "layout", "state")
    words = ("saved (UTC)", "layout", "state")
    print("\n".join(table(head, list(map(row, entries)), words)))
    if any(entry.fault for entry in entries):
        print("next: run make train to resume from the newest good one")
        return 1
    print("next: make verify reads the newest one; good means that no file is missing or truncated")
    return 0


def facts(entry: ListedCheckpoint) -> CheckpointState:
    """Returns a checkpoint's state for the JSON output."""
    from ..report.json_output import CheckpointState

    found = CheckpointState(entry.step, entry.address, entry.fault or None)
    if (commit := entry.commit) is None:
        return found
    layout = dict(commit.layout)
    return replace(found, time=commit.time, bytes=commit.size, loss=commit.loss, layout=layout)


def row(entry: ListedCheckpoint) -> tuple[str, ...]:
    from ..report.history import decimal, layout, moment, size

    commit, state = entry.commit, f"broken: {entry.fault}" if entry.fault else "good"
    if commit is None:
        return (f"{entry.step:,}", "—", "—", "—", "—", state)
    return (
        f"{entry.step:,}",
        moment(commit.time),
        size(commit.size),
        decimal(commit.loss),
        layout(commit.layout),
        state,
    )


def verify(variables: Variables, started: float) -> int:
    """Verifies a checkpoint's checksums, and checks all of its values."""
    from ..report.json_output import VerifyOutput, emit

    if (code := run_location.forwarded("verify", variables)) is not None:
        return code
    name, store = store_named(variables)
    step = chosen(variables, store, name)
    if not flag(variables, "JSON"):
        require_intact(store, step)
        return run_module(VALUES, store.address(step))
    entry, fault = store.look_at(step), "was not read to the end"
    try:
        with redirect_stdout(io.StringIO()):
            require_intact(store, step)
        code, _ = ask_module(VALUES, entry.address)
        fault = "a tensor is incomplete or not finite; stderr names it" if code else ""
    except (RunError, InputError) as error:
        fault = ": ".join(filter(None, (error.what, error.why)))
        raise
    finally:
        emit(VerifyOutput(facts(replace(entry, fault=fault))))
    return code


def require_intact(store: CheckpointStore, step: int) -> None:
    """Prints a checkpoint's size and layout, and verifies the checksums of all its files. Raises
    Broken if any file is damaged.
    """
    from ..checkpoints.marker import Broken
    from ..report.history import layout, size

    commit = store.read(step)
    print(
        f"{store.address(step)}: {len(commit.files)} files, {size(commit.size)}, saved by "
        f"{layout(commit.layout)}"
    )
    faults = [fault for fault in read_through(store, step, commit) if fault]
    if faults:
        then = "run make train to set it aside and continue from the previous one"
        raise Broken(
            "differs from the committed checkpoint",
            where=store.address(step),
            why="; ".join(faults),
            then=then,
        )
    print(f"every byte is intact ({len(commit.files)} checksums)")


def chosen(variables: Variables, store: CheckpointStore, name: str) -> int:
    """Returns STEP, or the latest step if STEP is not set."""
    steps, text = store.steps(), variables.get("STEP", "")
    if not steps:
        raise RunError("has no checkpoint yet", where=name, next="make train")
    if text and (not re.fullmatch("[0-9]{1,18}", text) or int(text) not in steps):
        message = (
            f"no checkpoint at step {text!r}; checkpoints exist at {', '.join(map(str, steps))}"
        )
        raise ConfigError.of("STEP", message, next="make checkpoints")
    return int(text) if text else steps[-1]


def read_through(store: CheckpointStore, step: int, commit: Commit) -> Iterator[str]:
    """Yields a description of each file's damage, in order, or "" for an intact file. Shows a
    progress bar on a terminal.
    """
    from rich.console import Console
    from rich.progress import Progress

    from ..hardware import node_types

    show = Progress(
        console=Console(file=unguarded(sys.stdout)), transient=True, disable=not sys.stdout.isatty()
    )
    with ThreadPoolExecutor(node_types.local_cores()) as pool, show as bar:
        task = bar.add_task("reading", total=commit.size)
        faults = pool.map(lambda item: store.damage(step, *item), commit.files.items())
        for file, fault in zip(commit.files.values(), faults, strict=True):
            bar.advance(task, file.size)
            yield fault


def eval(variables: Variables, started: float) -> int:
    """Evaluates loss, perplexity and accuracy of the latest checkpoint on the validation split.
    TASKS runs lm-eval instead.
    """
    as_json = flag(variables, "JSON")
    if "TASKS" in variables and as_json:
        message = "can't be combined with TASKS; lm-eval writes JSON to evaluation/ in the run"
        raise ConfigError.of("JSON", message, next="make eval JSON=1")
    if "TASKS" in variables:
        from ..launch.run_location import evaluate

        return evaluate(variables, variables["TASKS"])
    if (code := run_location.forwarded("eval", variables)) is not None:
        return code
    run = run_trained(variables)
    if not as_json:
        return run_module(SCORES, str(run.folder))
    code, _ = ask_module(SCORES, str(run.folder))
    if code == 0:
        from ..report.json_output import EvalOutput, emit

        emit(EvalOutput(run.name, **run.read_results()["evaluation"]))
    return code


def export(variables: Variables, started: float) -> int:
    """Exports the latest checkpoint to the folder OUT. FORMAT selects Hugging Face (the default) or
    NxD Core.
    """
    from ..config import platforms

    if "OUT" not in variables:
        raise ConfigError.of("OUT", "must name a new folder", next="make export OUT=my-model")
    try:
        platforms.degrees(variables.get("FORMAT") or platforms.HUGGINGFACE)
    except ValueError as error:
        raise ConfigError.of(
            "FORMAT", str(error), next="make export OUT=my-model FORMAT=nxd-tp8"
        ) from error
    return run_location.export(variables)
