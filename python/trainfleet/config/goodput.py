"""Predicts goodput, the useful share of a run's time when machines fail. It uses Young's and Daly's
formulas with published failure rates and our own timings.

A checkpoint costs the time for which saving blocks the run. A failure costs half an interval of
repeated work on average, and the seconds until ranks train again. The best interval balances both
(Young 1974; Daly 2006, eq. 7).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import expm1, sqrt
from pathlib import Path
from statistics import median

from .derive import Derived
from .sizes import count_parameters
from .tables import read_table
from .types import Config

NOTICED = 12.3  # seconds to detect a fault, the longest in docs/evidence/faults.md
# Seconds from detection to the first step, without reading the state. Small models take 9 to 13
# (docs/evidence/faults.md); large ones also compile.
RESTART = 60.0
# assumed bytes/s at which a node reads or writes a checkpoint: FSx for Lustre, or S3 with several
# streams
STORE = 1e9
# assumed bytes/s at which ranks copy their state; training continues while the copy is written
COPY = 4e9
STALL = 0.2  # further seconds for which a save blocks ranks
STATE = 12  # bytes per parameter in a checkpoint: the weight and two moments, in fp32
LEAST, MOST = 1, 60  # bounds of the minutes between checkpoints


@dataclass(frozen=True)
class FailureRate:
    """A published number of failures that stopped jobs: in so many hours of `devices` devices."""

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
    return tuple(
        FailureRate(**row) for row in read_table(Path(__file__).with_name("failure_rates.yaml"))
    )


@cache
def failures_of(device: str) -> tuple[float, str]:
    """Returns the failures per device-hour, and their source: the median of the rates published for
    this accelerator, otherwise of all.
    """
    same = [row for row in rates() if device.startswith(row.accelerator)]
    per_hour = median(row.per_hour for row in same or rates())
    if len(same) == 1:
        return per_hour, f"{same[0].accelerator}: {same[0].source}"
    of = same[0].accelerator if same else "other devices, because this one has none"
    return per_hour, f"median of {len(same or rates())} published rates of {of}"


def between_failures(config: Config) -> float:
    """Returns the mean seconds between failures of the job."""
    return 3600 / (failures_of(_device(config))[0] * config.world_size)


def _device(config: Config) -> str:
    device = config.fleet.rank_device
    return device.name if device else ""


@dataclass(frozen=True)
class Goodput:
    """The useful share of time, and its inputs in seconds: between failures, between checkpoints,
    to restart, and for which a save blocks the ranks. `source` is that of the failure rate.
    """

    share: float
    between_failures: float
    interval: float
    restart: float
    stall: float
    source: str

    def at(self, interval: float) -> float:
        """Returns the share with `interval` seconds between checkpoints."""
        return share(self.between_failures, interval, self.stall, self.restart)


def foresee(config: Config, step: float) -> Goodput:
    """Predicts the goodput of a run with steps of `step` seconds, at its configured checkpoint
    interval.
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
    """Returns the seconds until a checkpoint is complete. All nodes write their parts in
    parallel.
    """
    return stall_of(config) + STATE * count_parameters(config.model) / config.fleet.nodes / STORE


def stall_of(config: Config) -> float:
    """Returns the seconds for which a save blocks the ranks."""
    return STALL + STATE * count_parameters(config.model) / config.world_size / COPY


def share(between: float, interval: float, stall: float, restart: float) -> float:
    """Returns the useful share of all seconds, for exponentially distributed failures that are
    `between` seconds apart on average. This inverts Daly's complete model (2006, eq. 5).

    `interval` useful seconds and `stall` take (between + restart) x (e^((interval + stall) /
    between) - 1) seconds. Each failure costs the work since the last checkpoint, and `restart`.
    """
    return interval / ((between + restart) * expm1(min(600.0, (interval + stall) / between)))


def with_interval(config: Config) -> tuple[Config, list[Derived]]:
    """Returns the config with the interval that `checkpoint.every: auto` chooses, and the reason. A
    given interval stays unchanged.
    """
    if config.checkpoint.every != "auto":
        return config, []
    between, stall = between_failures(config), stall_of(config)
    every = f"{best_minutes(between, stall)} min"
    why = (
        f"loses the least time if one of {config.world_size} ranks fails every "
        f"{between / 3600:,.3g} h and a save takes {stall:.2g} s"
    )
    return replace(config, checkpoint=replace(config.checkpoint, every=every)), [
        Derived("checkpoint.every", every, why)
    ]


def best_minutes(between: float, stall: float) -> int:
    """Returns the minutes between checkpoints that lose the least time: sqrt(2 x stall x between)
    (Young 1974), within LEAST and MOST.
    """
    return max(LEAST, min(MOST, round(sqrt(2 * stall * between) / 60)))
