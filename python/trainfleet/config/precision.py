"""The number format of a device's products, and the memory that a rank may use."""

from __future__ import annotations

from ..hardware import cpu_speed
from ..hardware.accelerators import Accelerator
from .types import Config

# of a device's memory: the rest is the driver's, NCCL's buffers and what fragments
# (tests/bench/accounts.py)
USABLE = 0.9


def usable_bytes(device: Accelerator) -> float:
    return USABLE * device.memory_gib * 2**30


def format_of(config: Config) -> str:
    """The number format of products: fp8, bf16, fp16 or fp32. Of CPUs this one stands for all:
    ranks decide by theirs.
    """
    if config.train.precision != "auto":
        return config.train.precision
    if config.fleet.on_local_cpus:
        return "bf16" if cpu_speed.of_this_machine().half else "fp32"
    device = config.fleet.rank_device
    return "fp32" if device is None else device.half


def is_half(config: Config) -> bool:
    """Returns whether activations take two bytes a number: fp8 is only for products."""
    return format_of(config) != "fp32"


def by_parts(config: Config) -> bool:
    """Returns whether norms and dropout keep the results of their parts, as torch does on CPUs
    (2.13); elsewhere each is one kernel.
    """
    return config.fleet.on_local_cpus and not config.train.compile


def casts(config: Config) -> bool:
    """Returns whether every product casts its factors, as undivided models do on CPUs
    (engine/parallel/__init__.py).
    """
    layout, train = config.train.parallelism, config.train
    divided = layout.fsdp * layout.tensor * layout.pipeline * layout.context > 1
    plain = not divided and train.param_dtype == "fp32" and format_of(config) in ("bf16", "fp16")
    return plain and config.fleet.on_local_cpus
