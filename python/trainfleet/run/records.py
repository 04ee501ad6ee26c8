"""Defines the contents of a run folder's files, as types that are checked when they are read
(trust/validation.py); other keys may be there too.

Events and their fields are in events.yaml; their files have one order.

events/<writer>.jsonl holds a line per event: its time (unix), its name and its fields. A file has
one writer, because appending is not atomic over NFS:

launcher-<host>    the launcher on that host; after a takeover another host has another file
node-<i>-<attempt> the ranks of one node in one attempt; they share a kernel, so their appends are
atomic

Readers merge the files by time (`merge`), with `events.jsonl`, the one file of a run that began
before format 2.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Required, TypedDict

from ..trust.errors import InputError
from ..trust.untrusted_input import show
from ..trust.validation import Count, Moment, Name, Range, fit

Number = Annotated[float, Range(-1e100, 1e100)] | None  # null: not a finite number
Seconds = Annotated[float, Range(0, 1e9)]
Step = Annotated[int, Range(0, 10**12)]
SMALLEST, LARGEST = -1e100, 1e100

FORMAT = 2  # of the run folder: 1 had events.jsonl and heartbeats/rank-<r>.json


class Shape(TypedDict, total=False):
    """The model in results.json."""

    family: Name
    parameters: Count


class Sample(TypedDict, total=False):
    """A prompt and the text with which a model continued it."""

    prompt: str
    text: str


class Results(TypedDict, total=False):
    """results.json."""

    name: Name
    status: Literal["running", "finished", "failed", "stopped"]
    backend: Name
    unattended: bool
    nodes: Count
    world_size: Count
    device: Name
    device_name: Name
    precision: Name
    mfu_formula: Name
    layout: dict[str, Count]
    model: Shape | None
    global_batch_sequences: Count
    micro_batch_sequences: Count
    gradient_accumulation_steps: Count
    sequence_length: Count
    total_steps: Step
    dataset: Name
    dataset_tokens: Count
    dataset_skipped: Count
    steps: Step
    tokens: Count | None
    first_loss: Number
    final_loss: Number
    valid_loss: Number
    tokens_per_second: Number
    mfu: Number
    goodput: Number
    usd: Number
    predicted: dict[str, Number] | None
    memory_bytes: Number
    seconds: dict[str, Number] | None
    ledger: dict[str, Number] | None
    last_checkpoint: Name | None
    restarts: Count
    started: Moment | None
    sample: Sample | None
    versions: dict[str, Name]
    identity: Name


class Event(TypedDict, total=False):
    """A line of events."""

    time: Required[Moment]
    event: Required[Name]
    step: Step | None
    nodes: Count
    ranks_per_node: Count
    attempt: Count
    rank: Count | None
    node: Count | None
    seconds: Number
    host: Name
    error: Name
    phase: Name
    reason: str
    who: str
    cause: str
    words: str
    message: str
    evidence: str
    why: str
    next: str
    service: Name
    traceback: list[str]


class Talk(TypedDict):
    """The collectives' part of the steps that were looked at."""

    seconds: Seconds
    not_hidden: Seconds


class Operation(TypedDict):
    """One operation's part."""

    name: Name
    seconds: Seconds
    calls: Count


class Profile(TypedDict):
    """profile/summary.json."""

    seconds: Seconds
    steps: tuple[Step, Step]
    parts: dict[Name, Seconds]
    communication: Talk
    top: list[Operation]


def require_object(line: Any) -> dict[str, Any]:
    """The object in a line. InputError for anything else."""
    if not isinstance(line, dict):
        raise InputError(f"must be an object, not {show(line)}")
    return line


def check_event(line: Any) -> dict[str, Any]:
    """Returns a line of events. Raises InputError if it is not one."""
    return dict(fit(Event, line))


def check_metric(line: Any) -> dict[str, Any]:
    """Returns a line of metrics: a step, and numbers, null or NaN if a number is missing. Checked
    by hand, as there are many lines.
    """
    record = require_object(line)
    if type(step := record.get("step")) is not int or not 0 <= step <= 10**12:
        raise InputError(f"must be a whole number from 0 on, not {show(step)}", key="step")
    for key, value in record.items():
        if type(value) not in (int, float, type(None)) or (
            value and (value > LARGEST or value < SMALLEST)
        ):
            raise InputError(
                f"must be a number up to {LARGEST:g}, or null, not {show(value)}", key=key
            )
    return record


def launcher() -> str:
    """The writer's name of a launcher on this host."""
    return f"launcher-{re.sub(r'[^A-Za-z0-9.-]', '-', platform.node()) or 'here'}"


def node(number: int, attempt: int) -> str:
    """The writer's name of a node's ranks."""
    return f"node-{number}-{attempt}"


def merge(files: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The events of all files by time. One writer's events keep their order, even if its clock was
    set back.

    Records without a name or a time are left out.
    """
    timed: list[tuple[float, dict[str, Any]]] = []
    for lines in files:
        latest = float("-inf")
        for line in lines:
            if (
                isinstance(line, dict)
                and isinstance(line.get("event"), str)
                and isinstance(line.get("time"), int | float)
            ):
                latest = max(latest, line["time"])
                timed.append((latest, line))
    timed.sort(key=lambda pair: pair[0])
    return [line for _, line in timed]
