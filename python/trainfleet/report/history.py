"""Reads a run's history from its folder, and formats numbers for display."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from statistics import median

from ..health import fence
from ..health.heartbeat_format import PHASES, Beat, read_beats, stage
from ..health.lease import FILE as LEASE
from ..health.lease import read_holder, read_launching
from ..run.records import Feed, Lines, check_metric, size_of
from ..run.run_folder import Record, Run, is_locked
from ..trust import untrusted_input
from ..trust.errors import InputError
from ..watch.time_accounting import ledger

# Events that may cause a break in a curve, in order of occurrence
BREAKS = ("fault", "stopped", "restarted", "resumed")
TELLING = ("message", "who", "cause", "words")  # event fields that are shown without their names
UNKNOWN = "—"
SILENT = 60.0  # seconds after which a launch that is not renewed counts as dead
WORDS = {  # heartbeat phases before the first step
    "start": "starting ranks",
    "load": "loading model and data",
    "compile": "compiling",
}
LISTED = 8  # maximum number of sources to list


@dataclass(frozen=True)
class History:
    """Snapshot of a run folder. Missing values are empty or None, and never raise an error."""

    run: Run
    results: Record
    # One record per step, in order. If a step was repeated, its latest values are kept.
    metrics: list[Record]
    events: list[Record]
    status: str  # running, finished, failed, stopped, interrupted, or "not started"

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Returns the steps at which `key` has a finite value, and those values."""
        pairs = [
            (int(line["step"]), value)
            for line in self.metrics
            if (value := number(line.get(key))) is not None
        ]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def measured(self, key: str) -> float | None:
        """Returns `key` from results.json, or its latest metric if results.json lacks it. During a
        run, the latest metric takes precedence.
        """
        values = [*self.series(key)[1][-1:], None]
        summed = number(self.results.get(key))
        return (
            values[0]
            if summed is None or (self.status == "running" and values[0] is not None)
            else summed
        )

    def steps_of(self, *kinds: str) -> list[int]:
        """Returns the steps at which events of these kinds were recorded."""
        return [
            int(event["step"])
            for event in self.events
            if event.get("event") in kinds and event.get("step") is not None
        ]

    @cached_property
    def steps_total(self) -> int:
        """Returns the number of steps in the run's config, or the number of completed steps if that
        is larger.
        """
        from ..config import load_steps  # imported here, because it loads YAML

        return max(load_steps(self.run.config) or self.results.get("steps") or 0, self.step)

    @property
    def started(self) -> float | None:
        """Returns the Unix time at which the run's first command started."""
        launched = [event for event in self.events if event["event"] == "launched"]
        first = launched[0] if launched else {}
        return (
            number(first.get("started"))
            or number(first.get("time"))
            or number(self.results.get("started"))
        )

    @property
    def waits_for(self) -> str:
        """Returns the scheduler's reason why the job is waiting, and how long ago it was recorded.
        Returns "" if the job is running or the reason is unknown.

        A launcher records each new reason once. Without a launcher, later reasons are not recorded.
        """
        turns = [
            event
            for event in self.events
            if event.get("event") in ("launched", "queued", "running", "began")
        ]
        if not turns or turns[-1]["event"] != "queued":
            return ""
        noted = f"recorded {duration(max(0, round(time.time() - turns[-1]['time'])))} ago"
        return f"{turns[-1].get('phase')}: {turns[-1].get('reason')} ({noted})"

    @property
    def phase(self) -> str:
        """Returns what a run is doing before its first logged step, as reported by its scheduler,
        slowest rank or launch. Returns "" if the run has logged a step or is not active.
        """
        if self.metrics or self.status not in ("running", "not started"):
            return ""
        if self.status == "not started":
            with suppress(OSError):
                age = time.time() - (self.run.folder / LEASE).stat().st_mtime
                launch = read_launching(self.run)
                return f"being launched: {launch}" if launch and age < SILENT else ""
            return ""
        beats: Collection[Beat] = ()
        with suppress(OSError, InputError):
            beats = read_beats(self.run.folder, fence.current(self.run.folder).number).values()
        if self.waits_for or not beats:
            return self.waits_for or "starting ranks"
        slowest = min(beats, key=lambda beat: (PHASES.index(beat.phase), beat.step))
        words = WORDS.get(slowest.phase, f"{stage(slowest)}, no step logged yet")
        return f"{words} for {duration(slowest.phase_seconds)}"

    @property
    def step(self) -> int:
        """Returns the last logged step. For a stopped run, returns the step after which it saved
        and stopped.
        """
        logged = int(self.metrics[-1]["step"]) if self.metrics else 0
        return max(logged, self.results.get("steps") or 0) if self.status == "stopped" else logged

    @property
    def tokens_per_step(self) -> float:
        """Returns the number of tokens in a global batch, or 0 if it is unknown."""
        batch = self.results.get("global_batch_sequences")
        length = self.results.get("sequence_length")
        return (
            float(batch * length)
            if batch and length
            else (self.measured("tokens") or 0.0) / max(self.step, 1)
        )

    @property
    def epochs(self) -> str:
        """Returns the number of passes over the data, such as `0.09 epochs`, or "" if it is
        unknown.
        """
        tokens = self.measured("tokens")
        whole = number(self.results.get("dataset_tokens"))
        return f"{few_digits(tokens / whole)} epochs" if tokens and whole else ""

    def numbers(self, key: str) -> dict[str, float]:
        """Returns the numeric fields of an object in results.json."""
        found = self.results.get(key) or {}
        return {name: value for name, raw in found.items() if (value := number(raw)) is not None}

    @property
    def losses(self) -> tuple[float | None, float | None]:
        """Returns the first and the last finite training loss."""
        values = self.series("loss")[1]
        first = number(self.results.get("first_loss"))
        last = number(self.results.get("final_loss"))
        if values and first is None:
            first = values[0]
        return first, values[-1] if values and (last is None or self.status == "running") else last

    @property
    def broke_at(self) -> int | None:
        """Returns the first step with a non-finite loss, or None if all losses are finite."""
        return next(
            (
                int(line["step"])
                for line in self.metrics
                if "loss" in line and number(line["loss"]) is None
            ),
            None,
        )

    @property
    def is_lost(self) -> bool:
        """Returns whether the latest loss is non-finite. The run may still recover."""
        return (
            bool(self.metrics)
            and "loss" in self.metrics[-1]
            and number(self.metrics[-1]["loss"]) is None
        )

    @property
    def rose(self) -> str:
        """Returns a warning if the loss has risen above its initial value. Returns "" if it hasn't,
        or if too few steps are logged.
        """
        values = self.series("loss")[1]
        newest = median(values[-5:]) if len(values) >= 10 else None
        if newest is None or newest <= values[0]:
            return ""
        return (
            f"the loss rose from {decimal(values[0])} to {decimal(newest)}; lower "
            "train.learning_rate"
        )

    @property
    def unvalidated(self) -> str:
        """Returns a warning if the run finished without a validation loss because the text was too
        short, otherwise "".
        """
        if self.status != "finished" or not self.metrics or self.measured("valid_loss") is not None:
            return ""
        remedy = "raise data.validation_fraction or add text, and change data.name"
        return f"no validation loss: the validation text is too short; {remedy}"

    def _latest(self, *kinds: str) -> list[Record]:
        """Returns the events since the latest one of these kinds, or all events."""
        places = [place for place, event in enumerate(self.events) if event["event"] in kinds]
        return self.events[max(places, default=0) :]

    @property
    def silent(self) -> list[str]:
        """Returns a warning for each service in train.loggers that has failed since the latest
        launch.
        """
        launch = self._latest("launched", "restarted")
        failed = [event for event in launch if event["event"] == "logger-failed"]
        return [f"{event.get('service')} has failed: {event.get('message')}" for event in failed]

    @property
    def seconds_left(self) -> float | None:
        speed, left = self.measured("tokens_per_second"), self.steps_total - self.step
        return (
            left * self.tokens_per_step / speed
            if speed and self.tokens_per_step and left > 0
            else None
        )

    @cached_property
    def stages(self) -> dict[str, float]:
        """Returns the run's time so far in seconds, broken down by use."""
        return ledger(self.events, self.metrics, time.time() if self.status == "running" else None)

    @property
    def verdict(self) -> tuple[str, str] | None:
        """Returns why the last attempt failed, or None if it did not fail. The first string names
        the cause and the failed rank or host, and the second contains the reasons and the
        traceback.
        """
        if self.status not in ("failed", "interrupted"):
            return None
        # first event of each kind
        first = {event["event"]: event for event in reversed(self._latest("launched"))}
        fault, verdict = first.get("fault", {}), first.get("verdict", {})
        if not fault and not verdict:
            return None
        who = (
            verdict.get("who") or f"rank {fault.get('rank', '?')} on node {fault.get('node', '?')}"
        )
        reasons = [f"{name}: {fault[name]}" for name in ("why", "next") if fault.get(name)]
        return (
            f"{who}: {verdict.get('words') or verdict.get('cause') or fault.get('message')}",
            "\n".join([*reasons, *(fault.get("traceback") or ())]),
        )


def read(run: Run, tail: int | None = None) -> History:
    """Reads the run folder and returns its current state.

    With `tail`, reads only the last `tail` bytes of metrics and four times as many of events, skips
    invalid lines, and skips the events of runs that finished or were stopped. Raises InputError if
    those metrics contain no valid line.
    """
    results = run.read_results()
    status = str(results.get("status") or "not started")
    # A run may also be active without a launcher on this machine.
    goes_on = results.get("unattended") or read_holder(run.folder)
    if status == "running" and not goes_on and not is_locked(run.folder):
        status = "interrupted"  # the launcher died before it could record the end of the run
    metrics = run.read_metrics() if tail is None else _newest(run, tail)
    by_step = {line["step"]: line for line in metrics}
    quiet = tail is not None and status in ("finished", "stopped")
    events = [] if quiet else Feed(run.folder, tail=tail and 4 * tail).new()
    return History(run, results, [by_step[step] for step in sorted(by_step)], events, status)


def _newest(run: Run, tail: int) -> list[Record]:
    found = Lines(run.metrics, check_metric, tail=tail).new()
    if not found and size_of(run.metrics) > untrusted_input.KIBIBYTE:
        what = f"has no valid metrics in its last {tail // untrusted_input.KIBIBYTE} KiB"
        raise InputError(what, where=str(run.metrics))
    return found


def describe(event: Record) -> str:
    """Formats an event, as in `step 200 · 0.4 s`: all scalar fields in order, except for the times
    and the kind.
    """
    if event["event"] == "verdict":
        event = {key: value for key, value in event.items() if key in ("who", "cause", "words")}
    plain = [
        (key, value)
        for key, value in event.items()
        if isinstance(value, (str, int, float)) and value != ""
    ]
    return " · ".join(
        _field(key, value) for key, value in plain if key not in ("time", "event", "started")
    )


def _field(key: str, value: str | int | float) -> str:
    if key == "seconds":
        return duration(float(value))
    return str(value) if key in TELLING else f"{key.replace('_', ' ')} {value}"


def number(value: object) -> float | None:
    """Returns `value` as a float if it is a finite number, otherwise None."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def predicted(history: History, what: str, write: Callable[[float], str]) -> str:
    """Formats the plan's prediction for a measured value, or returns "" if there is no
    prediction.
    """
    predicted = number((history.results.get("predicted") or {}).get(what))
    return f" · predicted {write(predicted)}" if predicted else ""


def quantity(value: float | None) -> str:
    """Formats a number with three digits and a suffix: 950, 12.4k, 3.21M. Formats None as —."""
    if value is None:
        return UNKNOWN
    size, prefix = next(
        (
            pair
            for pair in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
            if abs(value) >= 0.9995 * pair[0]
        ),
        (1, ""),
    )
    return f"{value / size:.3g}{prefix}"


def size(count: float) -> str:
    """Formats a number of bytes: 950 B, 12.4 kB, 3.2 TB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float | None) -> str:
    """Formats a duration: 0.42 s, 45 s, 3 min 12 s, 2 h 05 min, 3 d 04 h. Formats None as —."""
    if seconds is None:
        return UNKNOWN
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    for size, unit, rest, of in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // rest:02d} {of}"
    return f"{whole} s"


def clock(seconds: float | None) -> str:
    """Formats a duration as a clock time: 0:14, 12:03 or 2:05:44. Formats None as —."""
    if seconds is None:
        return UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes}:{rest:02d}"
        if minutes < 60
        else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
    )


def few_digits(value: float) -> str:
    """Formats small values with two significant digits and large values without decimals: 0.093,
    1.5, 12.
    """
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def by_name(values: Mapping[str, float], write: Callable[[float], str]) -> str:
    """Formats the first values with their names, as in `wiki 0.4, code 3.1`."""
    shown = [f"{name} {write(value)}" for name, value in islice(values.items(), LISTED)]
    return ", ".join([*shown, "…"] if len(values) > LISTED else shown)


def percent(fraction: float | None) -> str:
    return UNKNOWN if fraction is None else f"{100 * fraction:.1f} %"


def decimal(value: object) -> str:
    """Formats a loss, including `nan` and `inf`."""
    return f"{value:.3f}" if isinstance(value, (int, float)) else UNKNOWN


def moment(seconds: float) -> str:
    """Formats a Unix time as UTC date and time, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def layout(degrees: Mapping[str, int]) -> str:
    """Formats the parallelism degrees above 1, as in `dp 4 tp 2`."""
    return (
        " ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one rank"
    )


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[str] = ()
) -> Iterator[str]:
    """Yields the lines of an aligned table, starting with its header. Columns in `words` are
    left-aligned, and all others are right-aligned.
    """
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        columns = zip(row, widths, head, strict=True)
        yield "  ".join(
            cell.ljust(width) if name in words else cell.rjust(width)
            for cell, width, name in columns
        ).rstrip()
