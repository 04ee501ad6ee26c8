"""Record types for a run folder's files. Records are validated when read (trust/validation.py), and
additional keys are allowed.

events.yaml defines the events and their fields.

events/<writer>.jsonl contains one line per event, with its unix time, name and fields. Each file
    has one writer, because appends are not atomic over NFS:
    launcher-<host>     the launcher on that host
    node-<i>-<attempt>  a node's ranks in one attempt; they share a kernel, so appends are atomic

Readers merge the files by time (`merge`).
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Required, TypedDict

from ..trust import untrusted_input
from ..trust.errors import InputError
from ..trust.untrusted_input import show
from ..trust.validation import Count, Moment, Name, Range, fit

Number = Annotated[float, Range(-1e100, 1e100)] | None  # null if the number is not finite
Seconds = Annotated[float, Range(0, 1e9)]
LAST_STEP = 10**12
Step = Annotated[int, Range(0, LAST_STEP)]
SMALLEST, LARGEST = -1e100, 1e100

FORMAT = 2  # run folder format


Record = dict[str, Any]


class Shape(TypedDict, total=False):
    """Model description in results.json."""

    family: Name
    parameters: Count


# Name of the validation loss metric, and prefix of the per-source validation losses
VALID_LOSS, SOURCE_LOSS = "valid_loss", "valid_loss/"


class Sample(TypedDict, total=False):
    """A prompt and the model's continuation."""

    prompt: str
    text: str


class Results(TypedDict, total=False):
    """Contents of results.json."""

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
    dataset_notes: list[str]
    steps: Step
    tokens: Count | None
    first_loss: Number
    final_loss: Number
    valid_loss: Number
    valid_losses: dict[str, Number] | None
    source_epochs: dict[str, Number] | None
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
    """One line of an events file."""

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
    """Communication time in the profiled steps."""

    seconds: Seconds
    not_hidden: Seconds


class Operation(TypedDict):
    """One operation in the profiled steps."""

    name: Name
    seconds: Seconds
    calls: Count


class Profile(TypedDict):
    """Contents of profile/summary.json."""

    seconds: Seconds
    steps: tuple[Step, Step]
    parts: dict[Name, Seconds]
    communication: Talk
    kinds: dict[Name, Seconds]
    top: list[Operation]


def require_object(line: Any) -> Record:
    """Returns the line if it is a JSON object. Raises InputError for other values."""
    if not isinstance(line, dict):
        raise InputError(f"must be an object, not {show(line)}")
    return line


def check_event(line: Any) -> Record:
    """Returns the line if it is a valid event. Raises InputError otherwise."""
    return dict(fit(Event, line))


def check_metric(line: Any) -> Record:
    """Returns the line if it is a valid metrics record: a step plus numbers, in which null and NaN
    mark missing values. Raises InputError otherwise.

    Does not use `fit`, which is too slow for many lines.
    """
    record = require_object(line)
    if type(step := record.get("step")) is not int or not 0 <= step <= LAST_STEP:
        raise InputError(f"must be a whole number, 0 or more, not {show(step)}", key="step")
    for key, value in record.items():
        if type(value) not in (int, float, type(None)) or (
            value and (value > LARGEST or value < SMALLEST)
        ):
            raise InputError(
                f"must be null or a number up to {LARGEST:g}, not {show(value)}", key=key
            )
    return record


def launcher() -> str:
    """Returns the writer name of a launcher on this host."""
    return f"launcher-{re.sub(r'[^A-Za-z0-9.-]', '-', platform.node()) or 'here'}"


def node(number: int, attempt: int) -> str:
    """Returns the writer name of a node's ranks in an attempt."""
    return f"node-{number}-{attempt}"


def merge(files: Iterable[Iterable[Record]]) -> list[Record]:
    """Returns the events from all files, sorted by time.

    Keeps each writer's order even if its clock was set back.
    """
    timed: list[tuple[float, Record]] = []
    for lines in files:
        latest = float("-inf")
        for line in lines:
            latest = max(latest, line["time"])
            timed.append((latest, line))
    timed.sort(key=lambda pair: pair[0])
    return [line for _, line in timed]


# Maximum size of a .jsonl file in bytes, enough for ten million lines.
LARGEST_LOG = 4096 * untrusted_input.MEBIBYTE
CHUNK = 64 * untrusted_input.MEBIBYTE  # maximum number of bytes to read from a growing file at once


def size_of(path: Path) -> int:
    """Returns a file's size in bytes, or 0 if it does not exist.

    Opens the file first, because a bare stat may return a size from the client's cache.
    """
    try:
        with os.fdopen(
            untrusted_input.opener(str(path), os.O_RDONLY | os.O_NONBLOCK), "rb"
        ) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        # Links count as missing here. Code that reads the file reports them.
        if isinstance(error, FileNotFoundError) or untrusted_input.is_in_the_way(error):
            return 0
        raise


def whole_lines(path: Path, start: int) -> tuple[list[bytes], int]:
    """Returns the complete lines after byte `start` of a growing file, and their end offset.

    Returns no lines if the file does not exist. Reads at most CHUNK bytes and splits longer lines.
    """
    try:
        with untrusted_input.open_regular(path) as file:
            file.seek(start)
            chunk = file.read(CHUNK)
    except FileNotFoundError:
        return [], start
    whole = chunk[: chunk.rfind(b"\n") + 1] or (chunk if len(chunk) == CHUNK else b"")
    return whole.splitlines(), start + len(whole)


class Lines:
    """A .jsonl file that is still being written. `new()` returns the records since the previous
    call.

    With `tail`, the first call returns only the records in the file's last `tail` bytes.
    """

    def __init__(
        self,
        path: Path,
        check: Callable[[Any], Record] = require_object,
        *,
        tail: int | None = None,
    ) -> None:
        self.path, self.check = path, check
        self.offset = 0 if tail is None else max(0, size_of(path) - tail)

    def new(self) -> list[Record]:
        """Returns the new records. Skips invalid lines, because reading the finished file reports
        them.
        """
        # The run was resumed and truncated the file.
        if self.path.exists() and self.path.stat().st_size < self.offset:
            self.offset = 0
        found: list[Record] = []
        while self.offset < LARGEST_LOG:
            lines, end = whole_lines(self.path, self.offset)
            if end == self.offset:
                break
            for line in lines:
                with suppress(InputError):
                    found.append(self.check(untrusted_input.parse_line(line, "")))
            self.offset = end
        return found


class Feed:
    """Events of an active run. `new()` returns all writers' events since the previous call, sorted
    by time. With `tail`, the first call returns only those in each file's last `tail` bytes.
    """

    def __init__(self, folder: Path, *, tail: int | None = None) -> None:
        self.folder, self.files = folder, dict[Path, Lines]()
        for path in self._paths() if tail is not None else ():
            self.files[path] = Lines(path, check_event, tail=tail)

    def new(self) -> list[Record]:
        return merge(
            [self.files.setdefault(path, Lines(path, check_event)).new() for path in self._paths()]
        )

    def _paths(self) -> list[Path]:
        return sorted((self.folder / "events").glob("*.jsonl"))
