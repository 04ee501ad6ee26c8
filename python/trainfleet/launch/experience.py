"""The measured speed of finished runs on the same hardware over their predicted speed: it corrects the next plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from statistics import median

from ..config import Config, load_resolved
from ..config.pace import predict
from ..errors import TrainfleetError
from ..plan.estimate import Experience
from ..runs import RUNS, Record, Run

NEWEST = 12  # folders of runs that are looked at
ENOUGH = 20  # steps, below which the first ones, which compile and warm up, weigh too much
NEAR, FAR = 0.2, 5.0  # ratios beyond which a run was disturbed


def experience_of(config: Config) -> Experience | None:
    """That of runs like this one: of the same layout, else of the same model, else of the same hardware; None without any."""
    found = list(_finished(config))
    for of, is_like in (("this layout", _is_same), ("this model", _is_of_model), ("this hardware", lambda one, other: True)):
        ratios = [ratio for other, ratio in found if is_like(config, other)]
        if ratios:
            return Experience(len(ratios), of, median(ratios))
    return None


def _finished(config: Config) -> Iterator[tuple[Config, float]]:
    """Runs on the hardware of `config`, with their speed over what would be predicted of them today."""
    folders = sorted(RUNS.glob("*/results.json"), key=lambda path: path.stat().st_mtime, reverse=True)[:NEWEST]
    for path in folders:
        with suppress(TrainfleetError, OSError):  # a folder that can't be read teaches nothing
            run = Run(path.parent)
            results, other = run.read_results(), load_resolved(run.config)
            if _is_on_same(config, other, results) and (ratio := _ratio(other, results)):
                yield other, ratio


def _ratio(config: Config, results: Record) -> float | None:
    speed, step = results.get("tokens_per_second"), predict(config)
    if not isinstance(speed, float) or step is None or (results.get("steps") or 0) < ENOUGH:
        return None
    ratio = speed * step.total / (config.train.global_batch * config.train.sequence_length)
    return ratio if NEAR < ratio < FAR else None


def _is_on_same(config: Config, other: Config, results: Record) -> bool:
    one, two = config.fleet, other.fleet
    return (one.instance_type, one.stack, one.backend) == (two.instance_type, two.stack, two.backend)


def _is_of_model(config: Config, other: Config) -> bool:
    one, two = config.train, other.train
    same = (one.sequence_length, one.precision, one.compile) == (two.sequence_length, two.precision, two.compile)
    return same and config.model == other.model


def _is_same(config: Config, other: Config) -> bool:
    fleet, two = config.fleet, other.fleet
    same = (fleet.nodes, fleet.ranks_per_node) == (two.nodes, two.ranks_per_node)
    return same and _is_of_model(config, other) and config.train.layout == other.train.layout
