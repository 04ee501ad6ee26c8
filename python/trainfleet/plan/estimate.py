"""What a run will need, from arithmetic alone: parameters, memory a rank, time and money."""

from __future__ import annotations

from dataclasses import dataclass

from .. import hardware
from ..config import Config
from ..config.layouts import is_half, usable_bytes
from ..config.memory import Memory, memory_of
from ..config.sizes import count_parameters, flops_per_token

# What a tidy engine reaches on these shapes, by recomputation (torchtitan, PR 165; llm-foundry reaches 38 to 46 % without any). A
# run prints its own.
ASSUMED_MFU = {"none": 0.40, "selective": 0.36, "full": 0.33}


@dataclass(frozen=True)
class Estimate:
    """Parameters; a rank's bytes, and those it has (None: not known); FLOPs a step; FLOP/s of all ranks; seconds; US dollars."""

    parameters: int
    memory: Memory
    usable: float | None
    step_flops: float
    peak: float | None
    half: bool
    seconds: float | None
    usd: float | None


def estimate(config: Config) -> Estimate:
    """The estimate that `make plan` prints and the budget is checked against."""
    device, half = hardware.accelerator_of(config.fleet.instance_type), is_half(config)
    flops = flops_per_token(config.model, config.train.sequence_length) * config.train.global_batch * config.train.sequence_length
    peak = _peak(config, device, half)
    seconds = config.train.steps * flops / (peak * ASSUMED_MFU[config.train.recompute]) if peak else None
    price = price_of(config)
    usd = 0.0 if price == 0 else price * config.fleet.nodes * seconds / 3600 if price and seconds is not None else None
    usable = usable_bytes(device) if device else None
    return Estimate(count_parameters(config.model), memory_of(config, half), usable, flops, peak, half, seconds, usd)


def price_of(config: Config) -> float | None:
    """US dollars for an hour of a node: 0 for this machine, None where there is no list price or a host's type is not told."""
    if row := hardware.instance(config.fleet.instance_type):
        return row.usd_per_hour
    return None if config.fleet.reached_by_ssh else 0.0


def _peak(config: Config, device: hardware.Accelerator | None, half: bool) -> float | None:
    """FLOP/s of all ranks together; None for accelerators that the table does not have."""
    if device is not None:
        return device.peak(half) * config.world_size
    if config.fleet.instance_type or hardware.local_accelerators():
        return None
    return hardware.local_core_flops() * min(config.world_size, hardware.local_cores())
