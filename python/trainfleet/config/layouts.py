"""The layout that nobody wrote: the least division that fits the device, with the micro-batch and recomputation that go with it.

The order is what each costs a step, by published figures: to recompute all takes a fifth of the speed (torchtitan, PR 165: 40 to
33 % MFU), tensor parallelism of 4 takes half (KempnerForge, Llama 3 8B on H200: 5,537 tokens/s a GPU, 9,746 with FSDP alone).
So sharding comes before recomputation, that before tensor parallelism within a node, that before a pipeline over nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from .. import hardware
from . import rules
from .derive import Derived
from .memory import memory_of
from .types import Config, Layout

PLAIN = Layout(shard=1, tensor=1, pipeline=1, context=1)
MODES = ("none", "selective", "full")
USABLE = 0.9  # of a device's memory: the rest is the driver's, the collectives' buffers and what fragments
ENOUGH_TOKENS = 4096  # in one pass, to keep products large: smaller micro-batches are taken only where nothing else fits
MOST_TOKENS = 16384  # beyond which products get no faster
CPU_TOKENS = 4096  # enough to keep a CPU core's matrix products large; see tests/bench/LOG.md


def provide(train: dict[str, Any]) -> set[str]:
    """Fills what is left open in `train` with what is least, in place; the keys that `settle` is then asked for."""
    asked = {f"layout.{name}" for name, value in train["layout"].items() if value is None}
    asked |= {name for name in ("micro_batch", "recompute") if train[name] is None}
    least = asdict(PLAIN)
    train["layout"] = {name: least[name] if value is None else value for name, value in train["layout"].items()}
    train |= {name: value for name, value in (("micro_batch", 1), ("recompute", "none")) if name in asked}
    return asked


def settle(config: Config, asked: set[str]) -> tuple[Config, list[Derived]]:
    """The config with the keys in `asked` (`layout.shard`, `micro_batch` ...) chosen; what was chosen, and why."""
    device = hardware.accelerator_of(config.fleet.instance_type)
    settled = _choose(config, asked, device) if device else None
    settled = settled or _sized(config, asked, CPU_TOKENS)
    reasons = _reasons(settled, device)
    shown = {key for key in asked & set(reasons) if _value(settled, key) != _value(config, key) or "." not in key}
    shown |= asked & {"layout.shard"} | (asked & {"layout.zero"} if settled.train.layout.shard > 1 else set())
    return settled, [Derived(f"train.{key}", _value(settled, key), reasons[key]) for key in reasons if key in shown]


def usable_bytes(device: hardware.Accelerator) -> float:
    return USABLE * device.memory_gib * 2**30


def format_of(config: Config) -> str:
    """The number format of products: fp8, bf16 or fp32."""
    device = hardware.accelerator_of(config.fleet.instance_type)
    best = "bf16" if device is not None and device.bf16 is not None else "fp32"
    return best if config.train.precision == "auto" else config.train.precision


def is_half(config: Config) -> bool:
    """Whether what is computed takes two bytes a number: fp8 is for products alone."""
    return format_of(config) != "fp32"


def needs(config: Config) -> int:
    """Bytes of a rank at its fullest."""
    return memory_of(config, is_half(config)).total


def lack(config: Config, asked: set[str]) -> str | None:
    """Why a layout that was left open does not fit, with a number of nodes that would; None when it fits, or nobody knows."""
    device = hardware.accelerator_of(config.fleet.instance_type)
    if device is None or not any(key.startswith("layout.") for key in asked) or needs(config) <= usable_bytes(device):
        return None
    if any(message for rule in rules.DIVISION for message in rule(config)):
        return None  # no layout was found for another reason, which that rule tells
    least = {name: value for name, value in asdict(PLAIN).items() if f"layout.{name}" in asked}
    train = replace(config.train, layout=replace(config.train.layout, **least))
    for times in (2, 4, 8, 16, 32, 64):
        more = replace(config, train=train, fleet=replace(config.fleet, nodes=times * config.fleet.nodes))
        chosen = _choose(more, asked, device)
        if chosen and needs(chosen) <= usable_bytes(device):
            other = _halved(replace(config, train=train), asked, device)
            return f"{_lacking(config, device)}; NODES={more.fleet.nodes} works{other}"
    return f"{_lacking(config, device)}, nor would many more nodes; a shorter train.sequence_length or a smaller model would"


def _halved(config: Config, asked: set[str], device: hardware.Accelerator) -> str:
    """`, or train.weights=bf16`, where that alone makes it fit."""
    if config.train.optimizer != "adamw" or config.train.weights == "bf16" or not is_half(config):
        return ""
    chosen = _choose(replace(config, train=replace(config.train, weights="bf16")), asked, device)
    return ", or train.weights=bf16 train.precision=bf16" if chosen and needs(chosen) <= usable_bytes(device) else ""


def _lacking(config: Config, device: hardware.Accelerator) -> str:
    ranks = f"{config.world_size} ranks of {usable_bytes(device) / 2**30:.1f} GiB ({device.name})"
    return f"auto: no layout of {ranks} holds the model; the least takes {needs(config) / 2**30:.1f} GiB a rank"


def _choose(config: Config, asked: set[str], device: hardware.Accelerator) -> Config | None:
    """The least divided config that fits; where none does, the one that needs least; None where rules refuse every one."""
    for enough in (ENOUGH_TOKENS, 0):
        for candidate in _candidates(config, asked, device):
            least = _sized(candidate, asked, 2 * enough - 1)
            if needs(least) <= usable_bytes(device):
                return _grown(least, asked, device)
    return min(_candidates(config, asked, device), key=needs, default=None)


def _candidates(config: Config, asked: set[str], device: hardware.Accelerator) -> Iterator[Config]:
    """Every division that no rule refuses, with the smallest micro-batch, in the order of preference."""
    ranks, fixed = config.fleet.ranks_per_node, config.train.layout

    def degrees(name: str, most: int) -> list[int]:
        return [2**power for power in range(most.bit_length())] if f"layout.{name}" in asked else [getattr(fixed, name)]

    modes = MODES if "recompute" in asked else (config.train.recompute,)
    for pipeline in degrees("pipeline", min(config.model.layers, config.world_size)):
        for tensor in degrees("tensor", ranks if device.links else 1):
            for recompute in modes if ranks % tensor == 0 else ():
                for layout in _sharded(config, replace(fixed, tensor=tensor, pipeline=pipeline), asked):
                    train = replace(config.train, layout=layout, recompute=recompute)
                    candidate = _sized(replace(config, train=train), asked, 0)
                    if not any(message for rule in rules.DIVISION for message in rule(candidate)):
                        yield candidate


def _sharded(config: Config, layout: Layout, asked: set[str]) -> Iterator[Layout]:
    """A layout not sharded, with ZeRO 1, with ZeRO 3: each over the ranks of a node, then over all that see other sequences."""
    together = layout.tensor * layout.context
    ways = config.world_size // (together * layout.pipeline)
    shards = sorted({min(ways, config.fleet.ranks_per_node // together), ways} - {0, 1})
    if "layout.shard" in asked:
        yield replace(layout, shard=1)
    zeros = (1,) if config.fleet.stack == "neuron-xla" else (1, 3)  # NxD Core divides the optimizer's state alone
    for zero in zeros if "layout.zero" in asked else (layout.zero,):
        yield from (replace(layout, shard=shard, zero=zero) for shard in (shards if "layout.shard" in asked else [layout.shard]))


def _sized(config: Config, asked: set[str], tokens: int) -> Config:
    """With the largest micro-batch of at most so many tokens, or the smallest there is."""
    if "micro_batch" not in asked:
        return config
    sizes = _sizes(config)
    size = max((size for size in sizes if size * config.train.sequence_length <= tokens), default=sizes[0])
    return replace(config, train=replace(config.train, micro_batch=size))


def _sizes(config: Config) -> list[int]:
    """The micro-batches that divide a rank's part of the global batch into passes that the pipeline can take."""
    part, layout = max(1, config.train.global_batch // max(1, config.data_parallel)), config.train.layout
    low = [size for size in range(1, int(part**0.5) + 1) if part % size == 0]
    return sorted({size for one in low for size in (one, part // one) if rules.fills(part // size, layout)}) or [1]


def sizes_to_try(config: Config) -> list[int]:
    """The micro-batches that `train.search_micro_batch` may try: powers of two, within a sensible number of tokens."""
    sizes = [size for size in _sizes(config) if size & (size - 1) == 0]
    return [size for size in sizes if size == sizes[0] or size * config.train.sequence_length <= 2 * MOST_TOKENS]


def _grown(config: Config, asked: set[str], device: hardware.Accelerator) -> Config:
    """With the largest micro-batch that fits, of so many tokens that more would not be faster."""
    grown = config
    pipelined = config.train.layout.pipeline > 1  # where smaller ones leave fewer ranks idle
    for size in _sizes(config) if "micro_batch" in asked and not pipelined else ():
        larger = replace(config, train=replace(config.train, micro_batch=size))
        if size * config.train.sequence_length <= MOST_TOKENS and needs(larger) <= usable_bytes(device):
            grown = larger
    return grown


def _value(config: Config, key: str) -> object:
    return getattr(config.train.layout, key.removeprefix("layout.")) if "." in key else getattr(config.train, key)


def _reasons(config: Config, device: hardware.Accelerator | None) -> dict[str, str]:
    """Why each value is what it is: what the next lesser division would take, of what there is."""
    train, layout = config.train, config.train.layout
    part = max(1, train.global_batch // max(1, config.data_parallel))
    dividing = f"largest that divides {part} (train.global_batch over {config.data_parallel} data-parallel ranks)"
    if device is None:
        known = "on CPUs the fastest (tests/bench/LOG.md)"
        unknown = "hardware.py does not have this device, so nobody knows what fits; train.layout says more"
        whole = f"every rank has the whole model: {unknown if hardware.local_accelerators() else known}"
        return {"layout.shard": whole, "micro_batch": f"{dividing} within {CPU_TOKENS} tokens"}
    there = f"of {usable_bytes(device) / 2**30:.1f} GiB usable ({device.name})"

    def gib(recompute: str | float = train.recompute, **degrees: int) -> float:
        other = replace(train, recompute=recompute, layout=replace(layout, **degrees))
        return needs(replace(config, train=other)) / 2**30

    fits = f"a whole model takes {gib():.1f} {there}"
    alone = "all that NxD Core can" if config.fleet.stack == "neuron-xla" else "the least that fits"
    few = f"train.global_batch {train.global_batch} has too few sequences for more data-parallel ranks"
    without = gib(tensor=1)
    split = few if without * 2**30 <= usable_bytes(device) else f"without it {without:.1f} GiB"
    return {
        "layout.shard": fits if layout.shard == 1 else f"not sharded, a rank would take {gib(shard=1):.1f} {there}",
        "layout.zero": {
            1: f"the optimizer's state alone is sharded: {alone}",
            3: f"weights and gradients are sharded too: with ZeRO 1 {gib(zero=1):.1f} GiB",
        }[layout.zero],
        "layout.tensor": f"within a node, over {device.links}: {split}",
        "layout.pipeline": f"over nodes: without it {gib(pipeline=1):.1f} GiB",
        "recompute": {
            "none": "all that backward needs fits",
            "selective": f"to keep all would take {gib('none'):.1f} GiB",
            "full": f"to keep products and attention would take {gib('selective'):.1f} GiB",
        }.get(str(train.recompute), ""),
        "micro_batch": f"{dividing} and fits: {_next_size(config, there)}",
    }


def _next_size(config: Config, there: str) -> str:
    """Why the micro-batch is no larger."""
    train = config.train
    size = min((size for size in _sizes(config) if size > train.micro_batch), default=None)
    if size is None:
        return "it is all of that"
    if config.train.layout.pipeline > 1:
        return "of smaller ones a pipeline idles less"
    if size * train.sequence_length > MOST_TOKENS:
        return f"{size} are over {MOST_TOKENS} tokens, beyond which products get no faster"
    larger = needs(replace(config, train=replace(train, micro_batch=size))) / 2**30
    return f"{size} would take {larger:.1f} {there}"
