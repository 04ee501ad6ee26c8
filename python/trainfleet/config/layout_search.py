"""Enumerates the layouts that the rules allow, and predicts each one's memory per rank and step
time.

The search covers tensor parallelism within a node, pipeline stages, context parallelism, sharding,
ZeRO stages, recomputation modes and micro-batch sizes that divide evenly. It picks the fastest
layout that fits, or the simplest of those that the speed model can't tell apart (NEAR).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ..hardware.accelerators import Accelerator
from . import cross_checks
from .cross_checks import divisors
from .families import FAMILIES
from .limits import is_half, is_xla, usable_bytes
from .memory import memory_of
from .speed import StepTime, step_of
from .speed_inputs import as_device, work_of
from .types import Config, Layout

KEYS = (
    "parallelism.fsdp",
    "parallelism.zero_stage",
    "parallelism.tensor",
    "parallelism.pipeline",
    "parallelism.context",
    "parallelism.virtual_stages",
    "micro_batch_size",
    "activation_checkpointing",
)
PLAIN = Layout(fsdp=1, tensor=1, pipeline=1, context=1)
MODES = ("none", "selective", "full")
SMALLEST = {"micro_batch_size": 1, "activation_checkpointing": MODES[0]}
MOST_TOKENS = 16384  # maximum tokens per micro-batch; matmuls get no faster beyond it
MOST_CONTEXT = 64
LONG = 16384  # minimum sequence length for trying context parallelism
# Layouts within this fraction of the best step time count as equally fast. When comparing two
# layouts on the same fleet, the model can be off by at least this much (tests/bench/LOG.md).
NEAR = 0.05
# Maximum number of ranks that shard one copy of the state. No published run gathers weights across
# more.
MOST_SHARERS = 1024
# Numbers of nodes to shard the state across, tried in addition to one node and all nodes.
WIDER = (4, 16, 64)
ROUNDS = (1, 2, 4, 8)  # stages per rank of an interleaved pipeline


@dataclass(frozen=True)
class Choice:
    """Config with a candidate layout, its fullest rank's peak memory and predicted step time."""

    config: Config
    bytes: int
    step: StepTime

    @cached_property
    def seconds(self) -> float:
        return self.step.total

    @property
    def division(self) -> tuple[int, ...]:
        """Returns a sort key that prefers lower parallelism degrees, then larger micro-batches."""
        train, layout = self.config.train, self.config.train.parallelism
        mode = MODES.index(train.activation_checkpointing)
        state = layout.fsdp > 1, layout.zero_stage
        return (
            layout.pipeline,
            layout.context,
            layout.tensor,
            layout.virtual_stages,
            *state,
            layout.fsdp,
            mode,
            -train.micro_batch_size,
        )


def needs(config: Config) -> int:
    """Returns the fullest rank's peak memory, in bytes."""
    return memory_of(config, is_half(config)).total


def ranked(config: Config, asked: set[str], device: Accelerator) -> list[Choice]:
    """Returns all candidates that fit, fastest first. Only the keys in `asked` vary."""
    return list(_ranked(_undecided(config, asked), frozenset(asked), device))


def _undecided(config: Config, asked: set[str]) -> Config:
    """Resets the keys in `asked` to defaults, so that a repeated search hits the cache."""
    train, layout = config.train, config.train.parallelism
    kept = (
        "parallelism.zero_stage" if layout.fsdp == 1 else ""
    )  # the plan shows an unsharded layout with its ZeRO stage
    plain = {
        name: getattr(PLAIN, name)
        for key in asked - {kept}
        for name in [key.removeprefix("parallelism.")]
        if name != key
    }
    rest = {name: value for name, value in SMALLEST.items() if name in asked}
    return replace(config, train=replace(train, parallelism=replace(layout, **plain), **rest))  # type: ignore[arg-type]


@lru_cache(maxsize=64)  # `make plan` searches several node counts more than once
def _ranked(config: Config, asked: frozenset[str], device: Accelerator) -> tuple[Choice, ...]:
    room, found, speed = usable_bytes(device), [], as_device(config, device)
    for candidate in candidates(config, asked, device):
        for sized in sizes_of(candidate, asked):
            if (bytes_ := needs(sized)) > room:
                break
            found.append(Choice(sized, bytes_, step_of(work_of(sized), speed)))
    return tuple(sorted(found, key=lambda choice: (choice.seconds, choice.division)))


def choose(choices: list[Choice]) -> Choice:
    """Returns the simplest choice within NEAR of the fastest."""
    near = [choice for choice in choices if choice.seconds <= choices[0].seconds * (1 + NEAR)]
    return min(near, key=lambda choice: choice.division)


def least(config: Config, asked: set[str], device: Accelerator) -> Config | None:
    """Returns the layout that needs the least memory, or None if the rules reject all layouts."""
    return min(candidates(config, asked, device), key=needs, default=None)


def candidates(config: Config, asked: Set[str], device: Accelerator) -> Iterator[Config]:
    """Yields every layout and recomputation mode that the rules allow, with the smallest
    micro-batch.
    """
    # NxD Core can only recompute whole blocks.
    choices = [mode for mode in MODES if mode != "selective" or not is_xla(config)]
    modes = (
        choices if "activation_checkpointing" in asked else [config.train.activation_checkpointing]
    )
    for layout in _layouts(config, asked, device):
        one = training(config, parallelism=layout)
        if "micro_batch_size" in asked:
            one = training(one, micro_batch_size=smallest(one))
        if not any(message for rule in cross_checks.OF_A_LAYOUT for message in rule(one)):
            yield from (training(one, activation_checkpointing=mode) for mode in modes)


def training(config: Config, **changes: object) -> Config:
    """Returns the config with these keys of `train` changed."""
    if all(getattr(config.train, key) == value for key, value in changes.items()):
        return config
    return replace(config, train=replace(config.train, **changes))  # type: ignore[arg-type]


def sizes_of(config: Config, asked: Set[str]) -> Iterator[Config]:
    """Yields the candidate with each micro-batch size to try, smallest first."""
    if "micro_batch_size" not in asked:
        yield config
        return
    yield config  # the candidate already has the smallest size
    for size in sizes(config)[1:]:
        if size * config.train.sequence_length <= MOST_TOKENS:
            yield training(config, micro_batch_size=size)


def sizes(config: Config) -> list[int]:
    """Returns the micro-batch sizes that divide a rank's share of the global batch and that the
    pipeline accepts.
    """
    part, layout = (
        max(1, config.train.global_batch_size // max(1, config.data_parallel)),
        config.train.parallelism,
    )
    return [size for size in divisors(part) if cross_checks.fills(part // size, layout)] or [1]


def smallest(config: Config) -> int:
    return sizes(config)[0]


def _layouts(config: Config, asked: Set[str], device: Accelerator) -> Iterator[Layout]:
    fixed, world = config.train.parallelism, config.world_size
    for tensor in _tensors(config, device) if "parallelism.tensor" in asked else [fixed.tensor]:
        for context in _contexts(config) if "parallelism.context" in asked else [fixed.context]:
            together = tensor * context
            for pipeline in (
                _pipelines(config, together)
                if "parallelism.pipeline" in asked
                else [fixed.pipeline]
            ):
                ways = world // (together * pipeline)
                if together * pipeline * ways != world or config.train.global_batch_size % ways:
                    continue
                divided = replace(fixed, tensor=tensor, pipeline=pipeline, context=context)
                for interleave in (
                    _interleaves(config, divided)
                    if "parallelism.virtual_stages" in asked
                    else [fixed.virtual_stages]
                ):
                    yield from _sharded(
                        config, replace(divided, virtual_stages=interleave), asked, ways
                    )


def _tensors(config: Config, device: Accelerator) -> list[int]:
    """Returns the tensor degrees to try, or only 1 if the devices have no direct links."""
    # NxD Core can replicate key/value heads (limits.copies_heads).
    copied = is_xla(config) and FAMILIES[config.model.family].copies_heads
    heads = config.model.heads if copied else math.gcd(config.model.heads, config.model.kv_heads)
    together = FAMILIES[config.model.family].normed == "all"
    most = config.fleet.ranks_per_node if device.links and not together else 1
    return [
        degree
        for degree in divisors(heads)
        if degree <= most and config.fleet.ranks_per_node % degree == 0
    ]


def _contexts(config: Config) -> list[int]:
    train = config.train
    if is_xla(config) or train.sequence_length < LONG:
        return [1]  # NxD Core has no context parallelism for training
    pieces = [
        degree
        for degree in divisors(config.world_size)
        if train.sequence_length % (2 * degree) == 0
    ]
    return [degree for degree in pieces if degree <= MOST_CONTEXT]


def _pipelines(config: Config, together: int) -> list[int]:
    most = config.model.layers if config.fleet.nodes > 1 or config.fleet.ranks_per_node > 1 else 1
    return [degree for degree in divisors(config.world_size // together) if degree <= most]


def _interleaves(config: Config, layout: Layout) -> list[int]:
    if layout.pipeline == 1 or is_xla(config):
        return [1]
    return [
        rounds
        for rounds in ROUNDS
        if config.model.layers % (layout.pipeline * rounds) == 0 or rounds == 1
    ]


def _sharded(config: Config, layout: Layout, asked: Set[str], ways: int) -> Iterator[Layout]:
    """Yields the unsharded layout, then ZeRO 1 and ZeRO 3 layouts.

    A shard group spans one node, several nodes (WIDER), or as many data-parallel ranks as
    MOST_SHARERS allows.
    """
    inside = max(1, config.fleet.ranks_per_node // (layout.tensor * layout.context))
    widest = max(shard for shard in divisors(ways) if shard <= MOST_SHARERS)
    between = [inside * nodes for nodes in WIDER if inside * nodes < widest]
    shards = sorted(
        {shard for shard in (inside, *between, widest) if shard > 1 and ways % shard == 0}
    )
    if "parallelism.fsdp" in asked:
        yield replace(layout, fsdp=1)
    # NxD Core shards only the optimizer state. torch's pipelining keeps weights gathered for the
    # whole step.
    zeros = (1,) if is_xla(config) or layout.pipeline > 1 else (1, 3)
    for zero in zeros if "parallelism.zero_stage" in asked else (layout.zero_stage,):
        yield from (
            replace(layout, fsdp=shard, zero_stage=zero)
            for shard in (shards if "parallelism.fsdp" in asked else [layout.fsdp])
        )
