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
from ..run.records import Profile
from ..run.run_folder import RUNS, Record, Run, read_json
from ..trust.errors import TrainfleetError
from ..trust.validation import fit

NEWEST = 12  # maximum number of run folders to read, newest first
ENOUGH = 20  # minimum number of steps; compilation and warm-up dominate shorter runs
LARGEST = 1 << 20  # maximum size of a metrics.jsonl to read, in bytes
PLAIN = 4  # minimum number of timed steps in a profile, excluding warm-up and profiled steps
PROFILE = 9  # number of runs that a profile counts as, since its medians resist interference
NEAR, FAR = 0.2, 5.0  # ratios outside this range suggest that other load interfered with the run
# Metrics that time a step's forward and backward pass, and its other phases (engine/timing.py).
PASSES = ("forward_seconds", "backward_seconds", "pipeline_seconds")
SPANS = {"gradients": "communication_seconds", "update": "optimizer_seconds"}
COMPUTED = ("products", "attention", "traffic")
# Phases whose time depends on the links, which differ within a node and between nodes.
LINKED = ("exchange", "gradients")


@dataclass(frozen=True)
class Lesson:
    """Lesson from a past run: its config, its overall ratio of measured to predicted speed, and the
    ratio of measured to predicted time for each phase of a step.
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
            each = [] if of == "this layout" else [_apt(lesson, config) for lesson in alike]
            shares = {group: [parts[group] for parts in each if group in parts] for group in GROUPS}
            parts = {group: median(known) for group, known in shares.items() if known}
            weight = sum(lesson.weight for lesson in alike)
            ratio = median(lesson.ratio for lesson in alike)
            share = weight / (weight + 1)
            return Experience(len(alike), of, ratio, parts, share)
    return None


def _apt(lesson: Lesson, config: Config) -> dict[str, float]:
    """Returns the lesson's ratio per phase. Drops LINKED phases if one fleet has several nodes and
    the other has only one.
    """
    same = (lesson.config.fleet.nodes > 1) == (config.fleet.nodes > 1)
    return {name: ratio for name, ratio in lesson.parts.items() if same or name not in LINKED}


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
        return _lesson(config, results, lines, _shares(run))
    return None


def _shares(run: Run) -> dict[str, float]:
    """Returns the fractions of the profiled time spent on matmuls, attention and exposed
    communication, or {} if the run has no profile.
    """
    path = run.profile / "summary.json"
    if (record := read_json(path)) is None:
        return {}
    found = fit(Profile, record, str(path))
    spent = found["kinds"] | {"exchange": found["communication"]["not_hidden"]}
    return {kind: seconds / (found["seconds"] or 1.0) for kind, seconds in spent.items()}


def _lesson(
    config: Config, results: Record, metrics: list[Record], shares: dict[str, float]
) -> Lesson | None:
    """Returns the run's Lesson, or None if the run was too short or not representative."""
    steps, predicted = plain(config, metrics), _predicted(config, results)
    speed = results.get("tokens_per_second")
    enough = (results.get("steps") or 0) >= ENOUGH
    if config.train.profile_steps is not None:
        enough = len(steps) >= PLAIN
        speed = median(step["tokens_per_second"] for step in steps) if enough else None
    if not enough or predicted is None or not isinstance(speed, float):
        return None
    ratio = speed * predicted.total / config.step_tokens
    return Lesson(config, ratio, _parts(steps, predicted, shares)) if NEAR < ratio < FAR else None


def _predicted(config: Config, results: Record) -> StepTime | None:
    """Returns the uncorrected step time as predicted at launch. A new prediction might assume
    different CPU cores.
    """
    step, then = predict(config), (results.get("predicted") or {}).get("step_seconds")
    if step is None or not isinstance(then, float) or then <= 0:
        return step
    return step.corrected(dict.fromkeys(GROUPS, then / step.total))


def _parts(steps: list[Record], predicted: StepTime, shares: dict[str, float]) -> dict[str, float]:
    """Returns the ratio of measured to predicted time per phase of a step, or {} if the run did not
    time its phases. Assumes the predicted time for kernel launches, and also for exchange if
    `shares` is empty.
    """
    whole, spent = _median(steps, "seconds"), {key: _median(steps, of) for key, of in SPANS.items()}
    passes = sum(_median(steps, name) for name in PASSES)
    spent["rest"] = max(0.0, whole - passes - sum(spent.values()))
    exchange = predicted.group("exchange")
    if shares and exchange:
        spent["exchange"] = exchange = max(0.0, shares["exchange"] * whole - spent["gradients"])
    computing = passes - exchange - predicted.group("calls")
    if computing <= 0:
        return {}
    spent |= _computed(
        computing, {kind: share * whole for kind, share in shares.items()}, predicted
    )
    return {
        group: seconds / predicted.group(group)
        for group, seconds in spent.items()
        if predicted.group(group)
    }


def _computed(seconds: float, kinds: dict[str, float], predicted: StepTime) -> dict[str, float]:
    """Splits the compute time among the COMPUTED phases: as profiled if a profile exists, otherwise
    in the predicted proportions.
    """
    known = {kind: kinds[kind] for kind in COMPUTED if kind in kinds}
    traffic = seconds - sum(known.values())
    if known and traffic > 0:
        return known | {"traffic": traffic}
    ratio = seconds / sum(predicted.group(kind) for kind in COMPUTED)
    return {kind: ratio * predicted.group(kind) for kind in COMPUTED}


def plain(config: Config, lines: list[Record]) -> list[Record]:
    """Returns the metrics of steps with phase timings, excluding warm-up and profiled steps."""
    first, last = map(int, (config.train.profile_steps or "0-0").split("-"))
    timed = (line for line in lines if "forward_seconds" in line or "pipeline_seconds" in line)
    return [
        line for line in timed if line["step"] > WARM_UP and not first <= line["step"] <= last + 1
    ]


def _median(lines: list[Record], name: str) -> float:
    return median(float(line.get(name) or 0.0) for line in lines) if lines else 0.0


def _hardware(fleet: Fleet) -> object:
    """Returns a key that is equal for fleets with the same hardware and software, ignoring the
    price.
    """
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
