"""What a run will need, from arithmetic alone: parameters, memory a rank, time and money."""

from __future__ import annotations

from dataclasses import dataclass

from .. import hardware
from ..config import Config
from ..config.families import FAMILIES
from ..config.layouts import format_of, is_half, usable_bytes
from ..config.memory import Memory, memory_of, passes_of
from ..config.sizes import count_parameters, flops_per_token
from .speed import Device, Step, Work, step_of

ASSUMED_MFU = 0.40  # of CPUs' nominal peak, by which nothing is known but that a small model's products reach it
UNKNOWN_NETWORK = 12.5e9  # bytes/s of a host of no known type: 100 Gbit/s
LIKELY = 0.20  # four of five published rows lie within this of what is foretold (tests/bench/LOG.md)


@dataclass(frozen=True)
class Estimate:
    """Parameters; a rank's bytes, and those it has (None: not known); FLOPs a step; FLOP/s of all ranks; seconds; US dollars.

    `step`: the seconds of a step by part; None on CPUs and on devices that nobody has figures of.
    """

    parameters: int
    memory: Memory
    usable: float | None
    step_flops: float
    peak: float | None
    format: str
    seconds: float | None
    usd: float | None
    step: Step | None = None
    price: float | None = None  # US dollars for an hour of a node


def estimate(config: Config, price: float | None) -> Estimate:
    """The estimate that `make plan` prints and the budget is checked against; `price`: of a node's hour."""
    device, format = hardware.accelerator_of(config.fleet.instance_type), format_of(config)
    flops = flops_per_token(config.model, config.train.sequence_length) * config.train.global_batch * config.train.sequence_length
    peak = _peak(config, device, format)
    step = step_of(work_of(config), as_device(config, device)) if device else None
    once = step.total if step else flops / (peak * ASSUMED_MFU) if peak else None
    seconds = config.train.steps * once if once else None
    usd = 0.0 if price == 0 else price * config.fleet.nodes * seconds / 3600 if price and seconds is not None else None
    usable = usable_bytes(device) if device else None
    return Estimate(
        count_parameters(config.model), memory_of(config, is_half(config)), usable, flops, peak, format, seconds, usd, step, price
    )


def list_price(config: Config) -> float | None:
    """US dollars for an hour of a node of the instance type; None where there is no list price or the type is not told."""
    row = hardware.instance(config.fleet.instance_type)
    return row.usd_per_hour if row else None


def work_of(config: Config) -> Work:
    """What a rank does in a step of this config, as plan/speed.py takes it."""
    model, train, layout = config.model, config.train, config.train.layout
    family, recompute = FAMILIES[model.family], train.recompute
    nearest = (
        recompute if isinstance(recompute, str) else "none" if recompute > 0.75 else "selective" if recompute > 0.25 else "full"
    )
    return Work(
        model.layers, model.hidden_size, model.intermediate_size, model.heads, model.kv_heads, model.vocabulary_size,
        gated=family.rotary, causal=family.causal, length=train.sequence_length, micro_batch=train.micro_batch,
        passes=passes_of(config), data=config.data_parallel, shard=layout.shard, zero=layout.zero, tensor=layout.tensor,
        pipeline=layout.pipeline, context=layout.context, interleave=layout.interleave, format=format_of(config),
        weight_bytes=2 if is_half(config) else 4, recompute=nearest, flash=family.causal or config.fleet.stack != "neuron-xla",
        fused=bool(train.compile), predicted=family.guesses(train.sequence_length) / train.sequence_length,
    )  # fmt: skip


def as_device(config: Config, row: hardware.Accelerator) -> Device:
    """A rank's device, with its part of the node's network."""
    machine, ranks = hardware.instance(config.fleet.instance_type), config.fleet.ranks_per_node
    outside = machine.network_gbps / 8 * 1e9 / max(1, machine.accelerators) if machine else UNKNOWN_NETWORK / ranks
    flops = {format: row.peak(format) for format in ("fp8", "bf16", "fp32") if format == "fp32" or getattr(row, format)}
    return Device(
        row.name, flops, row.bandwidth, row.neighbours, outside, ranks, row.efficiency, row.attention, row.kind != "neuron"
    )


def _peak(config: Config, device: hardware.Accelerator | None, format: str) -> float | None:
    """FLOP/s of all ranks together; None for accelerators that the table does not have."""
    if device is not None:
        return device.peak(format) * config.world_size
    if config.fleet.instance_type or hardware.local_accelerators():
        return None
    return hardware.local_core_flops() * min(config.world_size, hardware.local_cores())
