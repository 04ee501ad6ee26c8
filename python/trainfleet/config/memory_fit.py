"""Checks whether a run fits in memory, and suggests smaller runs that do.

Estimates are up to 3 % too high, or up to a fifth if a compiler selects the activations to save
(tests/bench/LOG.md). A run is rejected only if it would not fit even with this error subtracted. If
it barely fits, it is planned with a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from . import cross_checks
from .families import PLAIN, PRESETS
from .layout_search import smallest, training
from .layouts import refit
from .limits import USABLE, is_half, is_xla
from .memory import FORMATS, memory_of
from .optimizers import OPTIMIZERS
from .sizes import count_parameters
from .types import Config

# Maximum ratio of estimated to actual memory, with some margin.
TOO_HIGH, TOO_HIGH_COMPILED = (1.05, 1.2)
SHOWN = 4  # maximum number of suggestions
MOST_TIMES = 64  # maximum multiple of the requested node count to suggest


@dataclass(frozen=True)
class Room:
    """Memory of one rank, or shared by several.

    Attributes:
        bytes: Available memory.
        of: Scope of the memory: one "rank", the ranks of a "node", or "all" ranks.
        whose: Owner of the memory, for messages.
    """

    bytes: float
    of: str
    whose: str

    def ranks(self, config: Config) -> int:
        """Returns the number of ranks that share this memory."""
        return {"rank": 1, "node": config.fleet.ranks_per_node, "all": config.world_size}[self.of]

    def wanted(self, config: Config) -> float:
        """Returns the memory that the config needs in this scope, in bytes."""
        return memory_of(config, is_half(config)).total * self.ranks(config)

    def holds(self, config: Config) -> bool:
        """Returns whether the config might fit, given the estimate's error."""
        # With full recomputation, a block saves only its input, compiled or not.
        kept = config.train.compile and config.train.activation_checkpointing != "full"
        compiled = kept or is_xla(config)
        return self.wanted(config) <= (TOO_HIGH_COMPILED if compiled else TOO_HIGH) * self.bytes


def device_room(config: Config) -> Room | None:
    """Returns the memory of a rank's accelerator, or None if the accelerator is unknown."""
    device = config.fleet.rank_device
    return Room(device.memory_gib * 2**30, "rank", f"a {device.name}") if device else None


def lack(config: Config, room: Room) -> tuple[str, str] | None:
    """Returns the key and error message, with suggestions, if a run can't fit. Returns None if it
    might.
    """
    if room.holds(config):
        return None
    model, rank = config.model, memory_of(config, is_half(config)).total
    name = (
        model.preset
        or f"a {model.family} model of {count_parameters(model) / 1e9:.2f} B parameters"
    )
    ranks = room.ranks(config)
    together = f", {gib(room.wanted(config))} for {ranks} ranks" if ranks > 1 else ""
    found = [words for words, candidate in smaller(config, room) if _works(candidate, room)][:SHOWN]
    offered = f"; these fit: {', or '.join(found)}" if found else "; use a much smaller model"
    return "model.preset" if model.preset else "model", (
        f"{name} needs {gib(rank)} per rank{together}, but {room.whose} has "
        f"{gib(room.bytes)}{offered}"
    )


def smaller(config: Config, room: Room) -> Iterator[tuple[str, Config]]:
    """Yields smaller runs, smallest change first. Each is a pair of the make variables or SET keys
    to change and the resulting config.
    """
    train, ways, least = config.train, config.data_parallel, smallest(config)
    if train.micro_batch_size > least:
        yield _changed(config, micro_batch_size=least)
    words, full = _changed(config, micro_batch_size=least, activation_checkpointing="full")
    if train.activation_checkpointing != "full":
        yield words, full
    if config.fleet.nodes > 1 and room.of == "all":
        yield "NODES=1", refit(config, 1)
    if train.parallelism.fsdp < ways and train.parallelism.pipeline == 1:
        layout = replace(train.parallelism, fsdp=ways, zero_stage=3)
        yield f"{words} train.parallelism.fsdp={ways}", training(full, parallelism=layout)
    if train.param_dtype != "bf16" and "bf16" in OPTIMIZERS[train.optimizer].formats:
        yield _changed(config, param_dtype="bf16", precision="bf16")
    if room.of != "all":
        yield from _wider(config)
    yield from _presets(config)


def _wider(config: Config) -> Iterator[tuple[str, Config]]:
    """Yields configs with more nodes and the state sharded across all of them."""
    times, layout = 2, config.train.parallelism
    while times <= MOST_TIMES and layout.pipeline == 1:
        more = replace(config, fleet=replace(config.fleet, nodes=times * config.fleet.nodes))
        ways = more.data_parallel
        more = training(more, parallelism=replace(layout, fsdp=ways, zero_stage=3))
        yield (
            f"NODES={more.fleet.nodes} train.parallelism.fsdp={ways} train.micro_batch_size=1",
            training(more, micro_batch_size=1),
        )
        times *= 2


def _presets(config: Config) -> Iterator[tuple[str, Config]]:
    """Yields smaller models of the same family, largest first, with the current and smallest
    micro-batch.
    """
    shapes = [
        (name, shape)
        for name, shape in PRESETS.items()
        if shape.family == config.model.family or name in PLAIN
    ]
    for name, shape in sorted(shapes, key=lambda pair: -pair[1].layers * pair[1].hidden_size ** 2):
        given = {
            key: value
            for key, value in asdict(shape).items()
            if value is not None and key != "family"
        }
        model = replace(config.model, preset=name, head_dim=shape.head_dim, **given)
        if count_parameters(model) < count_parameters(config.model):
            candidate, least = replace(config, model=model), smallest(config)
            yield f"model.preset={name}", candidate
            yield (
                f"model.preset={name} train.micro_batch_size={least}",
                training(candidate, micro_batch_size=least),
            )


def _changed(config: Config, **changes: object) -> tuple[str, Config]:
    words = " ".join(f"train.{key}={value}" for key, value in changes.items())
    return words, training(config, **changes)


def _works(config: Config, room: Room) -> bool:
    return room.wanted(config) <= USABLE * room.bytes and not any(
        cross_checks.check(config, set(), 0)
    )


def checkpoint_bytes(config: Config) -> int:
    """Returns the size of one checkpoint (weights and optimizer moments) in bytes.

    Counts all weights as block matrices, because most of them are.
    """
    copies = 1 + OPTIMIZERS[config.train.optimizer].moments
    return FORMATS[config.train.param_dtype] * count_parameters(config.model) * copies


def gib(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB"
