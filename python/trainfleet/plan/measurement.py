"""Runs that only measure: a config's run, cut short, under a name of its own and with nothing
saved.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..config import Config
from ..trust.errors import ConfigError

WARM_UP = 3  # steps that are not timed: the first one compiles, and allocators grow
PROFILED = "4-6"  # steps, when nobody says which
# steps after the profiled ones, which the profiler does not slow down: the next plan is corrected
# by them
TIMED = 10


def measured(config: Config, name: str, steps: int, profile_steps: str | None = None) -> Config:
    """The same job for so many steps. It saves nothing, so that no other run can ever go on from
    it.
    """
    train = replace(
        config.train,
        steps=steps,
        schedule_steps=max(steps, config.train.schedule_steps),
        log_every=1,
        validate_every=0,
        validation_sequences=1,
        profile_steps=profile_steps,
        init_from=None,
    )
    return replace(
        config, name=name, train=train, checkpoint=replace(config.checkpoint, every="never")
    )


def compile_only(config: Config, name: str) -> Config:
    """The run that compiles what this one will compute, and does no more: it has validation's
    programs too.

    Those are of a first pass, of one that adds to it, and of a last one that may be smaller.
    """
    short, count = measured(config, name, WARM_UP), config.train.validation_sequences
    full = config.train.micro_batch * config.data_parallel
    sequences = min(count, 2 * full + count % full)
    return replace(
        short, train=replace(short.train, compile_only=True, validation_sequences=sequences)
    )


def counts_of(text: str, nodes: int) -> list[int]:
    """The numbers of nodes in `NODES='1 2 4'`; without it the powers of two up to the fleet's, and
    that itself.

    Raises:
        ConfigError: a word is no number of nodes, or there is but one.
    """
    if not text:
        powers = [2**power for power in range(nodes.bit_length()) if 2**power < nodes]
        return [*powers, nodes]
    words = text.replace(",", " ").split()
    if (
        not all(re.fullmatch("[0-9]{1,6}", word) and int(word) > 0 for word in words)
        or len(set(words)) < 2
    ):
        message = f"{text!r} is not a list of two or more numbers of nodes, as in NODES='1 2 4'"
        raise ConfigError.of("NODES", message, next="make scaling NODES='1 2 4'")
    return sorted({int(word) for word in words})


@dataclass(frozen=True)
class Measure:
    """What one size of the job came to; `efficiency` is its speed over that of the smallest times
    how many more ranks it has.
    """

    nodes: int
    ranks: int
    layout: str
    global_batch: int
    tokens_per_second: float
    mfu: float | None
    efficiency: float

    @property
    def ranks_speed(self) -> float:
        """Tokens per second of a rank."""
        return self.tokens_per_second / self.ranks


def measures_of(runs: Iterable[tuple[Config, str, dict[str, object]]]) -> list[Measure]:
    """The measures of finished runs: config, layout in words, and results.json; the smallest
    first.
    """
    found: list[Measure] = []
    for config, layout, results in runs:
        speed, mfu = results["tokens_per_second"], results.get("mfu")
        assert isinstance(speed, float)
        first = found[0].ranks_speed if found else speed / config.world_size
        share = speed / config.world_size / first
        known = mfu if isinstance(mfu, float) else None
        found.append(
            Measure(
                config.fleet.nodes,
                config.world_size,
                layout,
                config.train.global_batch,
                speed,
                known,
                share,
            )
        )
    return found


def steady(lines: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The lines of metrics of the steps that count."""
    return [line for line in lines if isinstance(line["step"], int) and line["step"] > WARM_UP]
