"""Calibration of predicted step times against earlier runs and profiles on the same hardware. The
next plan scales its predictions by the measured ratios.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from ..config import Config, load_resolved
from ..config.speed import GROUPS, StepTime
from ..config.speed_inputs import predict
from ..config.types import Fleet
from ..plan.estimate import Experience
from ..plan.measurement import WARM_UP
from ..run.run_folder import RUNS, Record, Run
from ..trust.errors import TrainfleetError

NEWEST = 12  # maximum number of run folders to read, newest first
ENOUGH = 20  # minimum number of steps; compilation and warm-up dominate shorter runs
LARGEST = 1 << 20  # maximum size of a metrics.jsonl to read, in bytes
PLAIN = 4  # minimum number of timed steps in a profile, excluding warm-up and profiled steps
PROFILE = 9  # runs that a profile counts as, because its medians ignore disturbed steps
NEAR, FAR = 0.2, 5.0  # ratios outside this range suggest that other load interfered with the run
# Maps each phase in the step-time estimate to its metrics in engine/timing.py.
SPANS = {
    "computing": ("forward_seconds", "backward_seconds", "pipeline_seconds"),
    "gradients": ("communication_seconds",),
    "update": ("optimizer_seconds",),
}


@dataclass(frozen=True)
class Lesson:
    """Lesson from a past run: its config, and its ratios of measured to predicted speed overall and
    of measured to predicted time per phase of a step.
    """

    config: Config
    ratio: float
    parts: dict[str, float]

    @property
    def weight(self) -> int:
        return 1 if self.config.train.profile_steps is None else PROFILE


def experience_of(config: Config) -> Experience | None:
    """Returns corrections from similar past runs, or None if no run is similar. Prefers runs with
    the same layout, then the same model, then the same hardware.

    Runs with the same layout correct the total step time. Other runs correct each phase of a step
    separately, because the mix of phases varies between layouts and models.
    """
    found = list(_lessons(config))
    for of, is_like in (
        ("this layout", _is_same),
        ("this model", _is_of_model),
        ("this hardware", lambda one, other: True),
    ):
        if alike := [lesson for lesson in found if is_like(config, lesson.config)]:
            each = [] if of == "this layout" else [lesson.parts for lesson in alike]
            shares = {group: [parts[group] for parts in each if group in parts] for group in GROUPS}
            parts = {group: median(known) for group, known in shares.items() if known}
            weight = sum(lesson.weight for lesson in alike)
            ratio = median(lesson.ratio for lesson in alike)
            share = weight / (weight + 1)
            return Experience(len(alike), of, ratio, parts, share)
    return None


def _lessons(config: Config) -> Iterator[Lesson]:
    """Yields a Lesson for each recent run on this config's hardware."""
    written = {path.parent: path.stat().st_mtime_ns for path in RUNS.glob("*/results.json")}
    for folder in sorted(written, key=written.__getitem__, reverse=True)[:NEWEST]:
        lesson = _read(folder, written[folder])
        if lesson and _hardware(config.fleet) == _hardware(lesson.config.fleet):
            yield lesson


@functools.cache
def _read(folder: Path, written: int) -> Lesson | None:
    """Returns the run's Lesson, or None if its files can't be read. `written`, the modification
    time of the run's results, serves only as a cache key.
    """
    with suppress(TrainfleetError, OSError):
        run = Run(folder)
        results, config = run.read_results(), load_resolved(run.config)
        lines = (
            list(run.read_metrics())
            if run.metrics.is_file() and run.metrics.stat().st_size <= LARGEST
            else []
        )
        return _lesson(config, results, lines)
    return None


def _lesson(config: Config, results: Record, metrics: list[Record]) -> Lesson | None:
    """Returns the run's Lesson, or None if the run was too short or disturbed."""
    steps, predicted = plain(config, metrics), _predicted(config, results)
    speed = results.get("tokens_per_second")
    enough = (results.get("steps") or 0) >= ENOUGH
    if config.train.profile_steps is not None:
        enough = len(steps) >= PLAIN
        speed = median(step["tokens_per_second"] for step in steps) if enough else None
    if not enough or predicted is None or not isinstance(speed, float):
        return None
    ratio = speed * predicted.total / config.step_tokens
    return Lesson(config, ratio, _parts(steps, predicted)) if NEAR < ratio < FAR else None


def _predicted(config: Config, results: Record) -> StepTime | None:
    """Returns the step time without corrections, as predicted at launch. Today's cores may differ
    from the run's.
    """
    step, then = predict(config), (results.get("predicted") or {}).get("step_seconds")
    if step is None or not isinstance(then, float) or then <= 0:
        return step
    return step.corrected(dict.fromkeys(GROUPS, then / step.total))


def _parts(steps: list[Record], predicted: StepTime) -> dict[str, float]:
    """Returns the ratio of measured to predicted time per phase of a step, or {} if the run did not
    time its phases.
    """
    spent = {group: sum(_median(steps, name) for name in names) for group, names in SPANS.items()}
    # Measured forward and backward times include calls and exchange, which GROUPS lists separately.
    beside = predicted.group("calls") + predicted.group("exchange")
    if spent["computing"] <= beside:
        return {}
    spent["rest"] = max(0.0, _median(steps, "seconds") - sum(spent.values()))
    spent["computing"] -= beside
    return {
        group: seconds / predicted.group(group)
        for group, seconds in spent.items()
        if predicted.group(group)
    }


def plain(config: Config, lines: list[Record]) -> list[Record]:
    """Returns the metrics of steps with timed parts, excluding warm-up and profiled steps."""
    first, last = map(int, (config.train.profile_steps or "0-0").split("-"))
    timed = (line for line in lines if "forward_seconds" in line or "pipeline_seconds" in line)
    return [
        line for line in timed if line["step"] > WARM_UP and not first <= line["step"] <= last + 1
    ]


def _median(lines: list[Record], name: str) -> float:
    return median(float(line.get(name) or 0.0) for line in lines) if lines else 0.0


def _hardware(fleet: Fleet) -> object:
    """Returns a comparable value for a fleet's hardware and software, ignoring the price."""
    kind = fleet.node_type
    what = replace(kind, usd_per_hour=None) if kind else fleet.is_told
    return what, fleet.platform, fleet.backend


def _is_of_model(config: Config, other: Config) -> bool:
    one, two = config.train, other.train
    same = (one.sequence_length, one.precision, one.compile) == (
        two.sequence_length,
        two.precision,
        two.compile,
    )
    return same and config.model == other.model


def _is_same(config: Config, other: Config) -> bool:
    fleet, two = config.fleet, other.fleet
    same = (fleet.nodes, fleet.ranks_per_node) == (two.nodes, two.ranks_per_node)
    batch = (config.train.micro_batch_size, config.train.global_batch_size) == (
        other.train.micro_batch_size,
        other.train.global_batch_size,
    )
    return (
        same
        and batch
        and _is_of_model(config, other)
        and config.train.parallelism == other.train.parallelism
    )
