"""The useful share of a run's time when machines fail: Young's and Daly's arithmetic, with
published rates and our own seconds.

A run loses, per checkpoint, what saving holds it up for; per failure, on average half an interval
of work that is done again, and the seconds until ranks train again. The best interval between
checkpoints balances both (Young 1974; Daly 2006, eq. 7).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import expm1, sqrt

from .derive import Derived
from .sizes import count_parameters
from .types import Config

# Failures of a device's share of a node per hour of use: hardware, its host, its link and what
# stops a job with them. 419 unexpected interruptions of 16,384 H100 in 54 days (Llama 3,
# arXiv:2407.21783, 3.3.4) are 2.0e-5; 6.5 of 1,000 node-days of 8 A100 (Kokolis et al. 2024,
# arXiv:2410.21680) are 3.4e-5. Nobody has published rates of Trainium.
FAILURES = 2.0e-5
NOTICED = 12.3  # seconds until a fault is noticed, the longest of docs/evidence/faults.md
# seconds from there to the first step, beside reading state: 9 to 13 of small models there; large
# ones compile
RESTART = 60.0
# bytes/s at which a node reads or writes a checkpoint, assumed: FSx for Lustre, or S3 by several
# streams
STORE = 1e9
# bytes/s at which ranks copy their state before they train on, assumed; they train while it is
# written
COPY = 4e9
STALL = 0.2  # seconds more for which a save blocks ranks
STATE = 12  # bytes of a parameter in a checkpoint: the weight and two moments, in fp32
LEAST, MOST = 1, 60  # minutes between checkpoints


@dataclass(frozen=True)
class Goodput:
    """The useful share of time, and its inputs in seconds: between failures, between checkpoints,
    to restart, and for which a save blocks the ranks.
    """

    share: float
    between_failures: float
    interval: float
    restart: float
    stall: float

    def at(self, interval: float) -> float:
        """Returns the share with `interval` seconds between checkpoints."""
        return share(self.between_failures, interval, self.stall, self.restart)


def foresee(config: Config, step: float) -> Goodput:
    """The goodput of a run whose steps take `step` seconds, at the interval between checkpoints
    that its config says.
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
    """Seconds until a checkpoint is whole: the ranks' parts go to the store together."""
    return stall_of(config) + STATE * count_parameters(config.model) / config.fleet.nodes / STORE


def stall_of(config: Config) -> float:
    """Seconds for which a save blocks the ranks."""
    return STALL + STATE * count_parameters(config.model) / config.world_size / COPY


def share(between: float, interval: float, stall: float, restart: float) -> float:
    """Returns the useful share of all seconds, for exponential failures every `between` seconds:
    Daly's complete model (2006, eq. 5), inverted.

    `interval` useful seconds and `stall` take (between + restart) x (e^((interval + stall) /
    between) - 1) seconds, as each failure within them costs the work so far, and `restart`.
    """
    return interval / ((between + restart) * expm1(min(600.0, (interval + stall) / between)))


def with_interval(config: Config) -> tuple[Config, list[Derived]]:
    """Returns the config with the interval that `checkpoint.every: auto` chooses, and why;
    unchanged if an interval is given.
    """
    if config.checkpoint.every != "auto":
        return config, []
    between, stall = 3600 / (FAILURES * config.world_size), stall_of(config)
    every = f"{best_minutes(between, stall)} min"
    why = (
        f"loses least where one of {config.world_size} ranks fails every {between / 3600:,.3g} "
        f"h and a save takes {stall:.2g} s"
    )
    return replace(config, checkpoint=replace(config.checkpoint, every=every)), [
        Derived("checkpoint.every", every, why)
    ]


def best_minutes(between: float, stall: float) -> int:
    """Minutes between checkpoints that lose least (Young 1974): sqrt(2 x stall x between), within
    sense.
    """
    return max(LEAST, min(MOST, round(sqrt(2 * stall * between) / 60)))
