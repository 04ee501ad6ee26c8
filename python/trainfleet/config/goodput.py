"""Predicts goodput: the fraction of a run's time spent on useful work despite machine failures.

Uses the Young and Daly formulas with published failure rates and our own timings. Each checkpoint
costs the time for which it blocks training. Each failure costs the restart and, on average, half a
checkpoint interval of lost work. The optimal interval balances both costs (Young 1974; Daly 2006,
eq. 7).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import expm1, sqrt
from pathlib import Path
from statistics import median

from ..trust.validation import fit_row
from .derive import Derived
from .sizes import count_parameters
from .tables import read_table
from .types import Config

NOTICED = 12.7  # maximum seconds to detect a lost node (docs/evidence/faults.md)
# Assumed seconds from detection to the first step, excluding the checkpoint read. Small models take
# 9 to 13 s (docs/evidence/faults.md), but large ones also compile.
RESTART = 60.0
# Assumed bytes/s per node for reading or writing a checkpoint (FSx for Lustre, or S3 with several
# streams).
STORE = 1e9
# Assumed bytes/s per rank for copying the state, which blocks training. Writing the copy does not.
COPY = 4e9
STALL = 0.2  # fixed seconds per save for which ranks are blocked, in addition to the copy
STATE = 12  # checkpoint bytes per parameter: weight and two moments in fp32
LEAST, MOST = 1, 60  # bounds on the checkpoint interval, in minutes


@dataclass(frozen=True)
class FailureRate:
    """Published number of job-stopping failures of `devices` devices over `hours` hours."""

    accelerator: str
    failures: float
    devices: int
    hours: float
    source: str
    year: int

    @property
    def per_hour(self) -> float:
        """Returns the failures per device-hour."""
        return self.failures / (self.devices * self.hours)


@cache
def rates() -> tuple[FailureRate, ...]:
    """Returns the published failure rates."""
    table = Path(__file__).with_name("failure_rates.yaml")
    return tuple(
        fit_row(FailureRate, row, table, row.get("source", "")) for row in read_table(table)
    )


@cache
def failures_of(device: str) -> tuple[float, str]:
    """Returns the failures per device-hour, and a description of the source.

    The rate is the median of those published for this accelerator, or of all if this one has none.
    """
    same = [row for row in rates() if device.startswith(row.accelerator)]
    each = [row.per_hour for row in same or rates()]
    if len(same) == 1:
        return each[0], f"{same[0].accelerator}: {same[0].source}"
    of = same[0].accelerator if same else "other devices, because this one has none"
    apart = f"up to {max(each) / min(each):.0f} times apart"
    return median(each), f"median of {len(each)} published rates of {of}, {apart}"


def between_failures(config: Config) -> float:
    """Returns the job's mean time between failures, in seconds."""
    return 3600 / (failures_of(_device(config))[0] * config.world_size)


def _device(config: Config) -> str:
    device = config.fleet.rank_device
    return device.name if device else ""


@dataclass(frozen=True)
class Goodput:
    """Predicted goodput and its inputs.

    Attributes:
        share: Useful fraction of the run's time.
        between_failures: Mean seconds between failures.
        interval: Seconds between checkpoints.
        restart: Seconds from a failure to the first new step.
        stall: Seconds for which a save blocks the ranks.
        source: Source of the failure rate.
    """

    share: float
    between_failures: float
    interval: float
    restart: float
    stall: float
    source: str

    def at(self, interval: float) -> float:
        """Returns the goodput with `interval` seconds between checkpoints."""
        return share(self.between_failures, interval, self.stall, self.restart)


def foresee(config: Config, step: float) -> Goodput:
    """Predicts a run's goodput at its configured checkpoint interval.

    `step` is the step time in seconds.
    """
    between = between_failures(config)
    restart = (
        NOTICED + RESTART + STATE * count_parameters(config.model) / config.fleet.nodes / STORE
    )
    checkpoint, whole = config.checkpoint, config.train.steps * step
    interval = min(whole, checkpoint.every_seconds or checkpoint.every_steps * step or whole)
    stall = stall_of(config)
    useful = share(between, interval, stall, restart)
    return Goodput(useful, between, interval, restart, stall, failures_of(_device(config))[1])


def saving_of(config: Config) -> float:
    """Returns the time until a checkpoint is complete, in seconds. All nodes write in parallel."""
    return stall_of(config) + STATE * count_parameters(config.model) / config.fleet.nodes / STORE


def stall_of(config: Config) -> float:
    """Returns the time for which a save blocks the ranks, in seconds."""
    return STALL + STATE * count_parameters(config.model) / config.world_size / COPY


def share(between: float, interval: float, stall: float, restart: float) -> float:
    """Returns the goodput: `interval` divided by the expected time to complete an interval and a
    save.

    With exponentially distributed failures, a mean of `between` seconds apart, Daly's complete
    model (2006, eq. 5) gives (between + restart) x (e^((interval + stall) / between) - 1) seconds.
    Each failure costs the work since the last checkpoint, plus `restart`.
    """
    return interval / ((between + restart) * expm1(min(600.0, (interval + stall) / between)))


def with_interval(config: Config) -> tuple[Config, list[Derived]]:
    """Replaces `checkpoint.every: auto` with the optimal interval, and returns the reason.

    Leaves any other interval unchanged.
    """
    if config.checkpoint.every != "auto":
        return config, []
    between, stall = between_failures(config), stall_of(config)
    every = f"{best_minutes(between, stall)} min"
    why = (
        f"loses the least time if one of {config.world_size} ranks fails every "
        f"{between / 3600:,.0f} h and a save takes {stall:.2g} s"
    )
    return replace(config, checkpoint=replace(config.checkpoint, every=every)), [
        Derived("checkpoint.every", every, why)
    ]


def best_minutes(between: float, stall: float) -> int:
    """Returns the checkpoint interval that loses the least time, in minutes.

    It is sqrt(2 x stall x between) (Young 1974), clamped to LEAST and MOST.
    """
    return max(LEAST, min(MOST, round(sqrt(2 * stall * between) / 60)))
