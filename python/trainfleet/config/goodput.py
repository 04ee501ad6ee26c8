"""Predicts goodput: the fraction of a run's time that is useful despite machine failures.

Uses the Young and Daly formulas with published failure rates and our own timings. Each checkpoint
costs the time for which saving blocks the run. Each failure costs half a checkpoint interval of
repeated work on average, plus the restart. The best interval balances both costs (Young 1974; Daly
2006, eq. 7).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import expm1, sqrt

from .derive import Derived
from .sizes import count_parameters
from .types import Config

# Job-stopping failures per device-hour, including the device's link and its share of the host. 419
# unexpected interruptions of 16,384 H100s in 54 days (Llama 3, arXiv:2407.21783, 3.3.4) give
# 2.0e-5. 6.5 failures per 1,000 node-days of 8 A100s (Kokolis et al. 2024, arXiv:2410.21680) give
# 3.4e-5. Rates for Trainium are not published.
FAILURES = 2.0e-5
NOTICED = 12.3  # seconds to detect a fault, the maximum in docs/evidence/faults.md
# Seconds from detection to the first step, excluding the checkpoint read. Small models take 9 to 13
# s (docs/evidence/faults.md). Large models also compile.
RESTART = 60.0
# Assumed bytes/s per node for reading or writing a checkpoint (FSx for Lustre, or S3 with several
# streams).
STORE = 1e9
# Assumed bytes/s per rank for copying the state. Training continues while the copy is written.
COPY = 4e9
STALL = 0.2  # additional seconds for which a save blocks the ranks
STATE = 12  # checkpoint bytes per parameter: weight and two moments in fp32
LEAST, MOST = 1, 60  # bounds of the checkpoint interval in minutes


@dataclass(frozen=True)
class Goodput:
    """Predicted goodput, with its inputs.

    Attributes:
        share: Useful fraction of the run's time.
        between_failures: Seconds between failures.
        interval: Seconds between checkpoints.
        restart: Seconds to restart after a failure.
        stall: Seconds for which a save blocks the ranks.
    """

    share: float
    between_failures: float
    interval: float
    restart: float
    stall: float

    def at(self, interval: float) -> float:
        """Returns the useful fraction with `interval` seconds between checkpoints."""
        return share(self.between_failures, interval, self.stall, self.restart)


def foresee(config: Config, step: float) -> Goodput:
    """Predicts a run's goodput at its configured checkpoint interval. `step` is the step time in
    seconds.
    """
    between = 3600 / (FAILURES * config.world_size)
    restart = (
        NOTICED + RESTART + STATE * count_parameters(config.model) / config.fleet.nodes / STORE
    )
    checkpoint, whole = config.checkpoint, config.train.steps * step
    interval = min(whole, checkpoint.every_seconds or checkpoint.every_steps * step or whole)
    stall = stall_of(config)
    useful = share(between, interval, stall, restart)
    return Goodput(useful, between, interval, restart, stall)


def saving_of(config: Config) -> float:
    """Returns the time until a checkpoint is complete, in seconds. All nodes write in parallel."""
    return stall_of(config) + STATE * count_parameters(config.model) / config.fleet.nodes / STORE


def stall_of(config: Config) -> float:
    """Returns the time for which a save blocks the ranks, in seconds."""
    return STALL + STATE * count_parameters(config.model) / config.world_size / COPY


def share(between: float, interval: float, stall: float, restart: float) -> float:
    """Returns the useful fraction of a run's time.

    Inverts Daly's complete model (2006, eq. 5) for exponentially distributed failures with a mean
    of `between` seconds between them. Completing `interval` useful seconds and a save takes
    (between + restart) x (e^((interval + stall) / between) - 1) seconds. Each failure costs the
    work since the last checkpoint, plus `restart`.
    """
    return interval / ((between + restart) * expm1(min(600.0, (interval + stall) / between)))


def with_interval(config: Config) -> tuple[Config, list[Derived]]:
    """Replaces `checkpoint.every: auto` with the best interval, and returns the reason.

    Any other interval is left unchanged.
    """
    if config.checkpoint.every != "auto":
        return config, []
    between, stall = 3600 / (FAILURES * config.world_size), stall_of(config)
    every = f"{best_minutes(between, stall)} min"
    why = (
        f"loses the least time if one of {config.world_size} ranks fails every "
        f"{between / 3600:,.3g} h and a save takes {stall:.2g} s"
    )
    return replace(config, checkpoint=replace(config.checkpoint, every=every)), [
        Derived("checkpoint.every", every, why)
    ]


def best_minutes(between: float, stall: float) -> int:
    """Returns the interval that loses the least time, in minutes.

    It is sqrt(2 x stall x between) (Young 1974), limited to LEAST and MOST.
    """
    return max(LEAST, min(MOST, round(sqrt(2 * stall * between) / 60)))
