"""Derives benchmark runs from a config: a few steps of the same job under another name, without
checkpoints. Also summarizes their results.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..config import Config
from ..trust.errors import ConfigError

WARM_UP = 3  # untimed steps, in which programs compile and allocators warm up
PROFILED = "4-6"  # default of train.profile_steps
# unprofiled steps after the profiled ones; their timing corrects the next plan
TIMED = 10


def measured(config: Config, name: str, steps: int, profile_steps: str | None = None) -> Config:
    """Returns the config of the same job, cut to `steps` steps and without checkpoints."""
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
    """Returns the config of a run that only compiles this run's programs, including validation.

    Validation has up to three programs: one for the first pass, one for the passes that add to it,
    and one for the last pass, which may be smaller.
    """
    short, count = measured(config, name, WARM_UP), config.train.validation_sequences
    full = config.train.micro_batch_size * config.data_parallel
    sequences = min(count, 2 * full + count % full)
    return replace(
        short, train=replace(short.train, compile_only=True, validation_sequences=sequences)
    )


def counts_of(text: str, nodes: int) -> list[int]:
    """Parses the node counts in `NODES='1 2 4'`. Defaults to the fleet's node count and the powers
    of two below it.

    Raises:
        ConfigError: a word is not a node count, or there are fewer than two counts.
    """
    if not text:
        powers = [2**power for power in range(nodes.bit_length()) if 2**power < nodes]
        return [*powers, nodes]
    words = text.replace(",", " ").split()
    if (
        not all(re.fullmatch("[0-9]{1,6}", word) and int(word) > 0 for word in words)
        or len(set(words)) < 2
    ):
        message = f"{text!r} is not a list of two or more node counts, such as NODES='1 2 4'"
        raise ConfigError.of("NODES", message, next="make scaling NODES='1 2 4'")
    return sorted({int(word) for word in words})


@dataclass(frozen=True)
class Measure:
    """Result of one run of a scaling test. `efficiency` is its throughput per rank relative to the
    smallest run's.
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
        """Returns the tokens per second per rank."""
        return self.tokens_per_second / self.ranks


def measures_of(runs: Iterable[tuple[Config, str, dict[str, object]]]) -> list[Measure]:
    """Converts finished runs to measures. Each run is a config, a layout description and the
    contents of results.json. The smallest run must come first.
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
                config.train.global_batch_size,
                speed,
                known,
                share,
            )
        )
    return found


def steady(lines: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """Returns the metrics of the steps after warm-up."""
    return [line for line in lines if isinstance(line["step"], int) and line["step"] > WARM_UP]
