"""What a run will need, from arithmetic alone: parameters, memory a rank, time and money."""

from __future__ import annotations

from dataclasses import dataclass

from .. import hardware
from ..config import Config
from ..config.layouts import format_of, is_half, usable_bytes
from ..config.memory import Memory, memory_of
from ..config.sizes import count_parameters, flops_per_token

# What a tidy engine reaches on these shapes, by recomputation (torchtitan, PR 165; llm-foundry reaches 38 to 46 % without any). A
# run prints its own.
ASSUMED_MFU = {"none": 0.40, "selective": 0.36, "full": 0.33}
FP8_GAIN = 1.28  # in tokens/s, over bf16 (torchtitan, Llama 3.1 8B on 8 H100: 8,532 and 6,667)


@dataclass(frozen=True)
class Estimate:
    """Parameters; a rank's bytes, and those it has (None: not known); FLOPs a step; FLOP/s of all ranks; seconds; US dollars."""

    parameters: int
    memory: Memory
    usable: float | None
    step_flops: float
    peak: float | None
    format: str
    seconds: float | None
    usd: float | None


def estimate(config: Config) -> Estimate:
    """The estimate that `make plan` prints and the budget is checked against."""
    device, format = hardware.accelerator_of(config.fleet.instance_type), format_of(config)
    flops = flops_per_token(config.model, config.train.sequence_length) * config.train.global_batch * config.train.sequence_length
    peak = _peak(config, device, format)
    seconds = config.train.steps * flops / (peak * assumed_mfu(config)) if peak else None
    price = price_of(config)
    usd = 0.0 if price == 0 else price * config.fleet.nodes * seconds / 3600 if price and seconds is not None else None
    usable = usable_bytes(device) if device else None
    return Estimate(count_parameters(config.model), memory_of(config, is_half(config)), usable, flops, peak, format, seconds, usd)


def price_of(config: Config) -> float | None:
    """US dollars for an hour of a node: 0 for this machine, None where there is no list price or a host's type is not told."""
    if row := hardware.instance(config.fleet.instance_type):
        return row.usd_per_hour
    return None if config.fleet.reached_by_ssh else 0.0


def assumed_mfu(config: Config) -> float:
    """The MFU that speed and cost are reckoned with; a budget of memory lies between all and nothing recomputed."""
    recompute, least, most = config.train.recompute, ASSUMED_MFU["full"], ASSUMED_MFU["none"]
    mfu = ASSUMED_MFU[recompute] if isinstance(recompute, str) else least + recompute * (most - least)
    return mfu * FP8_GAIN / 2 if format_of(config) == "fp8" else mfu  # of a peak that is twice as high


def _peak(config: Config, device: hardware.Accelerator | None, format: str) -> float | None:
    """FLOP/s of all ranks together; None for accelerators that the table does not have."""
    if device is not None:
        return device.peak(format) * config.world_size
    if config.fleet.instance_type or hardware.local_accelerators():
        return None
    return hardware.local_core_flops() * min(config.world_size, hardware.local_cores())
