"""Sweeps: one run per combination of values for some keys (make sweep)."""

from __future__ import annotations

import math
import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..backends import backend_of
from ..config import Config, Derivation, Settings
from ..plan.estimate import estimate
from ..report import history, json_output, summary
from ..report.json_output import RunState
from ..run.run_folder import run_of
from ..trust.errors import ConfigError, Problem, TrainfleetError, tell
from ..trust.untrusted_input import show
from .calibration import experience_of
from .command import config_of, plan_of
from .execution import STOPPED
from .training import train

MOST = 100  # maximum number of points in a sweep
SWEPT = ("train", "model")
AXIS = re.compile(r"([a-z0-9_.]+)=([^,\s]+(?:,[^,\s]+)*)")
HOW = "make sweep GRID='train.learning_rate=1e-4,3e-4 model.layers=4,8'"


@dataclass(frozen=True)
class Point:
    """One run of a sweep. `values` pairs each dotted config key with its value as text."""

    values: tuple[tuple[str, str], ...]
    config: Config
    derived: Derivation

    @property
    def words(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values)

    @property
    def label(self) -> str:
        return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.values)

    @property
    def state(self) -> RunState:
        return json_output.state_of(run_of(self.config.name))

    @property
    def score(self) -> float:
        """Returns the validation loss, or the training loss if there is no validation text. A
        failed run has an infinite score.
        """
        state = self.state
        found = state.loss if state.valid_loss is None else state.valid_loss
        return math.inf if found is None or state.status != "finished" else found

    @property
    def rank(self) -> tuple[float, float]:
        """Returns the sort key for the final table: points that trained longest come first."""
        return (-self.state.step * (self.score < math.inf), self.score)


def axes_of(grid: str) -> dict[str, list[str]]:
    """Parses GRID into the values of each key. Raises a ConfigError listing all invalid words."""
    axes, problems = dict[str, list[str]](), list[Problem]()
    for word in grid.split():
        axis = AXIS.fullmatch(word)
        key, values = axis.groups() if axis else ("", "")
        if not axis:
            problems.append(Problem(0, "GRID", "", f"{show(word)} is not KEY=VALUE,VALUE"))
        elif key.partition(".")[0] not in SWEPT:
            fault = "only keys of train and model may differ, because points share all else"
            problems.append(Problem(0, "GRID", key, fault))
        elif key in axes:
            problems.append(Problem(0, "GRID", key, "is listed twice"))
        axes[key] = list(dict.fromkeys(values.split(",")))
    if problems or not axes:
        missing = [Problem(0, "GRID", "", "must list keys with their values")]
        raise ConfigError(problems or missing, next=HOW)
    return axes


def combinations(axes: dict[str, list[str]], samples: int) -> list[tuple[tuple[str, str], ...]]:
    """Returns all combinations, or a reproducible sample of `samples` of them if that is not 0.

    Raises:
        ConfigError: there would be more than MOST points.
    """
    total = math.prod(map(len, axes.values()))
    if (samples or total) > MOST:
        message = f"has {samples or total:,} points; at most {MOST} are allowed"
        raise ConfigError.of("GRID", message, next="add SAMPLES=20 to draw 20 of them")
    chosen = range(total)
    if 0 < samples < total:
        chosen = sorted(random.Random(0).sample(range(total), samples))  # type: ignore[assignment]
    found = []
    for number in chosen:
        values = []
        for key, texts in axes.items():
            number, index = divmod(number, len(texts))
            values.append((key, texts[index]))
        found.append(tuple(values))
    return found


def points_of(settings: Settings, grid: str, samples: int) -> list[Point]:
    """Returns the points of a sweep. Each config is checked before anything runs."""
    base = config_of(settings)[0].name
    points = []
    for values in combinations(axes_of(grid), samples):
        words = " ".join(f"{key}={value}" for key, value in values)
        # The name depends only on the values, so rerunning the command continues its runs.
        name = f"{base}-sweep-{zlib.crc32(words.encode()):08x}"
        short = {f"GRID {key}={value}": (key, value) for key, value in values}
        one = replace(settings, short={**settings.short, **short, "GRID": ("name", name)})
        points.append(Point(values, *config_of(one)))
    return points


def require_affordable(points: Sequence[Point]) -> str:
    """Returns the predicted time and cost of all unfinished points. Raises ConfigError if they
    exceed budget.max_usd.
    """
    needs = [
        estimate(point.config, backend_of(point.config).bill(), experience_of(point.config))
        for point in points
        if point.state.status != "finished"
    ]
    usd = sum(need.usd or 0 for need in needs)
    limit = points[0].config.budget.max_usd
    if limit is not None and usd > limit:
        message = (
            f"{len(needs)} points are estimated at ${usd:,.2f}, over the limit of ${limit:,.2f}"
        )
        raise ConfigError.of("budget.max_usd", message, next="raise it, or add SAMPLES=5")
    cost = f", ${usd:,.2f}" if usd else ""
    return f"about {history.duration(sum(need.seconds or 0 for need in needs))}{cost} in total"


def rungs(points: int, halving: bool) -> list[tuple[int, int]]:
    """Returns the stages of a sweep: the divisor of each point's steps, and how many points
    continue from there. With `halving`, the better half continues for twice the steps.
    """
    count = math.ceil(math.log2(points)) if halving else 0
    stages = [(2 ** (count - rung), math.ceil(points / 2 ** (rung + 1))) for rung in range(count)]
    return [*stages, (1, points)]


def run(points: list[Point], started: float, halving: bool) -> int:
    """Trains the points, one after another. A failed point does not end the sweep. Returns the exit
    code, which is 1 if a point failed.
    """
    alive, failed = list(points), 0
    for divisor, kept in rungs(len(points), halving):
        for number, point in enumerate(alive, 1):
            steps = max(1, point.config.train.steps // divisor)
            print(f"\npoint {number} of {len(alive)}, to step {steps:,}: {point.words}", flush=True)
            code = _trained(point, steps, started)
            if code == STOPPED:
                print("next: run make sweep again to continue")
                return code
            failed += code != 0
        alive = sorted(alive, key=lambda point: point.score)[:kept]
    print("\n" + "\n".join(describe(points)))
    return int(failed > 0)


def _trained(point: Point, steps: int, started: float) -> int:
    state = point.state
    if state.status == "finished" and state.step >= steps:
        return 0
    config = replace(point.config, train=replace(point.config.train, steps=steps))
    try:
        plan = plan_of(config, point.derived, launch=config.name)
        return train(plan, started, summarize=False)
    except TrainfleetError as error:
        return tell(error)


def describe(points: Sequence[Point]) -> list[str]:
    """Returns a table of the points, best first, and draws their curves."""
    ranked = sorted(points, key=lambda point: point.rank)
    best = run_of(ranked[0].config.name)
    picture = best.plots / "sweep.png"
    summary.draw({point.label: run_of(point.config.name) for point in ranked}, picture)
    rows = [(*summary.entry(run_of(point.config.name))[1][:-1], point.words) for point in ranked]
    return [
        *history.table((*summary.HEAD[:-1], "values"), rows, ("run", "state", "values")),
        "",
        f"plot  {picture}",
        f"best  {ranked[0].words}",
        f"next  make report RUN={best.name}, or make train SET='{ranked[0].words}'",
    ]
