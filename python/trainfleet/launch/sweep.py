"""Sweeps: one training run, or point, per combination of values for the swept keys (make sweep).

If the backend's scheduler has a queue, each point runs its own `make train` in the background,
which outlives this command. A later sweep waits for it. Otherwise, points train here one after
another.
"""

from __future__ import annotations

import math
import os
import random
import re
import secrets
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..backends import backend_of
from ..backends.base import Can
from ..config import Config, Derivation, Settings, dump_asked
from ..plan.estimate import estimate
from ..report import history, json_output, summary
from ..report.json_output import RunState
from ..run.records import size_of, whole_lines
from ..run.run_folder import Run, is_locked, run_of, take_lock, write_atomic
from ..trust.errors import ConfigError, Problem, TrainfleetError, tell
from ..trust.untrusted_input import opener, show
from .calibration import experience_of
from .command import config_of, plan_of
from .execution import STOPPED
from .training import tokenize, train

MOST = 100  # maximum number of points in a sweep
SWEPT = ("train", "model")
AXIS = re.compile(r"([a-z0-9_.]+)=([^,\s]+(?:,[^,\s]+)*)")
HOW = "make sweep GRID='train.learning_rate=1e-4,3e-4 model.layers=4,8'"
FIXED = ("schedule_steps", "warmup_steps")  # keys that are derived from train.steps
# Environment variables whose values are already in the points' configs.
GIVEN = dict.fromkeys(("MAKEFLAGS", "SET", "NODES"), "")
LOG = "sweep.log"  # name of the output of a point's `make train`
TAIL = 2000  # bytes of a failed point's log to print
LOOK_EVERY = 1.0  # seconds between polls of a run that an earlier sweep follows


@dataclass(frozen=True)
class Point:
    """One run of a sweep. `values` pairs each dotted config key with its value as text."""

    values: tuple[tuple[str, str], ...]
    settings: Settings
    config: Config
    derived: Derivation

    @property
    def run(self) -> Run:
        return run_of(self.config.name)

    @property
    def words(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values)

    @property
    def label(self) -> str:
        return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.values)

    @property
    def state(self) -> RunState:
        return json_output.state_of(self.run)

    @property
    def is_done(self) -> bool:
        state = self.state
        return state.status == "finished" and state.step >= self.config.train.steps

    def shortened(self, divisor: int) -> Point:
        """Returns the point with a fraction of its steps, but the same learning rate schedule."""
        if divisor == 1:
            return self
        values = {key: getattr(self.config.train, key) for key in FIXED}
        values["steps"] = max(1, self.config.train.steps // divisor)
        short = {f"STOP {key}": (f"train.{key}", str(value)) for key, value in values.items()}
        settings = replace(self.settings, short={**self.settings.short, **short})
        return Point(self.values, settings, *config_of(settings))

    @property
    def score(self) -> float:
        """Returns the validation loss, or the training loss if there is no validation loss. Returns
        infinity for a run that has not finished.
        """
        state = self.state
        found = state.loss if state.valid_loss is None else state.valid_loss
        return math.inf if found is None or state.status != "finished" else found

    @property
    def rank(self) -> tuple[float, float]:
        """Returns the sort key for the final table: points that trained longest come first."""
        return (-self.state.step * (self.score < math.inf), self.score)


def axes_of(grid: str) -> dict[str, list[str]]:
    """Parses GRID into a list of values per key. Raises a ConfigError listing all invalid words."""
    axes, problems = dict[str, list[str]](), list[Problem]()
    for word in grid.split():
        axis = AXIS.fullmatch(word)
        key, values = axis.groups() if axis else ("", "")
        if not axis:
            problems.append(Problem(0, "GRID", "", f"{show(word)} is not KEY=VALUE,VALUE"))
        elif key.partition(".")[0] not in SWEPT:
            fault = "only keys of train and model may differ, because points share everything else"
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
        raise ConfigError.of("GRID", message, next="add SAMPLES=20 to sample 20 of them")
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
        points.append(Point(values, one, *config_of(one)))
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
    seconds = sum(need.seconds or 0 for need in needs)
    return f"{f'about {history.duration(seconds)}' if seconds else 'unknown time'}{cost} in total"


def rungs(points: int, halving: bool) -> list[tuple[int, int]]:
    """Returns the stages of a sweep: the divisor of each point's steps, and how many points
    continue from there. With `halving`, the better half continues for twice the steps.
    """
    count = math.ceil(math.log2(points)) if halving else 0
    stages = [(2 ** (count - rung), math.ceil(points / 2 ** (rung + 1))) for rung in range(count)]
    return [*stages, (1, points)]


def run(points: list[Point], started: float, halving: bool) -> int:
    """Trains the points. A failed point does not end the sweep. Returns the exit code, which is 1
    if a point did not finish.
    """
    alive, failed = list(points), 0
    queues = Can.QUEUES in backend_of(points[0].config).can
    if queues and (code := _prepared(points[0], started)):
        return code
    for divisor, kept in rungs(len(points), halving):
        rung = [point.shortened(divisor) for point in alive]
        codes = _followed(rung) if queues else (_trained(point, started) for point in rung)
        for number, point in enumerate(rung, 1):
            steps = point.config.train.steps
            print(f"\npoint {number} of {len(rung)}, to step {steps:,}: {point.words}")
            code = next(codes)
            if code == STOPPED:
                print("next: run make sweep again to continue")
                return code
            failed += code != 0
        alive = sorted(alive, key=lambda point: point.score)[:kept]
    print("\n" + "\n".join(describe(points)))
    return int(failed > 0)


def _trained(point: Point, started: float) -> int:
    if point.is_done:
        return 0
    try:
        plan = plan_of(point.config, point.derived, launch=secrets.token_hex(8))
        return train(plan, started, summarize=False)
    except TrainfleetError as error:
        return tell(error)


def _prepared(point: Point, started: float) -> int:
    """Tokenizes the dataset if needed and returns the exit code. Raises the errors of `plan_of`,
    since every point would raise them.
    """
    plan = plan_of(point.config, point.derived, launch=secrets.token_hex(8))
    first = replace(plan, requests=plan.requests[:-1])
    return tokenize(first, started) if first.requests else 0


def _followed(points: Sequence[Point]) -> Iterator[int]:
    """Queues all points at once. Yields each point's exit code when it has ended. After Ctrl-C,
    yields STOPPED, but all points continue.
    """
    try:
        followers = [_begun(point) for point in points]
        for point, follower in zip(points, followers, strict=True):
            yield _ended(point, follower)
    except KeyboardInterrupt:
        names = [point.run.name for point in points if is_locked(point.run.logs)]
        print(f"\nthese runs continue without this terminal: {', '.join(names)}")
        print("make stop RUN=name stops one of them, and make watch shows them all")
        yield STOPPED


def _begun(point: Point) -> subprocess.Popen[bytes] | None:
    """Starts a point's `make train` in the background. Returns None if the point is done, or if an
    earlier sweep started the command and it is still running.
    """
    run = point.run
    if point.is_done or (held := take_lock(run.logs)) is None:
        return None
    write_atomic(run.given, dump_asked(point.config, point.derived))
    with held, open(run.logs / LOG, "wb", opener=opener) as log:
        return subprocess.Popen(
            [sys.executable, "-m", "trainfleet", "train", f"CONFIG={run.given}"],
            env=os.environ | GIVEN,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[held.fileno()],  # the lock is held as long as the command runs
            start_new_session=True,
        )


def _ended(point: Point, follower: subprocess.Popen[bytes] | None) -> int:
    """Waits until a point's `make train` ends, and prints the outcome. Returns 0 if all steps are
    done, otherwise 1.
    """
    run = point.run
    while follower is None and is_locked(run.logs):
        time.sleep(LOOK_EVERY)
    if follower := follower or _begun(point):
        follower.wait()
    print(f"{run.name} is {point.state.status} at step {point.state.step:,}")
    if point.is_done:
        return 0
    lines, _ = whole_lines(run.logs / LOG, max(0, size_of(run.logs / LOG) - TAIL))
    print(*(f"  | {line.decode(errors='replace')}" for line in lines), sep="\n")
    return 1


def describe(points: Sequence[Point]) -> list[str]:
    """Returns a table of the points, best first, and draws their curves."""
    ranked = sorted(points, key=lambda point: point.rank)
    best = ranked[0].run
    picture = best.plots / "sweep.png"
    summary.draw({point.label: point.run for point in ranked}, picture)
    rows = [(*summary.entry(point.run)[1][:-1], point.words) for point in ranked]
    return [
        *history.table((*summary.HEAD[:-1], "values"), rows, ("run", "state", "values")),
        "",
        f"plot  {picture}",
        f"best  {ranked[0].words}",
        f"next  make report RUN={best.name}, or make train SET='{ranked[0].words}'",
    ]
