"""What a device offers a config: the number format of its products, and the memory that a rank may use."""

from __future__ import annotations

from .. import hardware, trial
from .families import FAMILIES
from .types import Config

USABLE = 0.9  # of a device's memory: the rest is the driver's, the collectives' buffers and what fragments


def usable_bytes(device: hardware.Accelerator) -> float:
    return USABLE * device.memory_gib * 2**30


def format_of(config: Config) -> str:
    """The number format of products: fp8, bf16 or fp32. Of CPUs this machine's own stand for all: ranks decide by theirs."""
    if config.train.precision != "auto":
        return config.train.precision
    if hardware.on_local_cpus(config.fleet.instance_type):
        return "bf16" if trial.of_this_machine().half else "fp32"
    device = hardware.accelerator_of(config.fleet.instance_type)
    return "bf16" if device is not None and device.bf16 is not None else "fp32"


def is_half(config: Config) -> bool:
    """Whether what is computed takes two bytes a number: fp8 is for products alone."""
    return format_of(config) != "fp32"


def norms_by_parts(config: Config) -> bool:
    """Whether an RMSNorm keeps what its parts make, as torch's does on CPUs (2.13), where devices have one kernel for it."""
    compiled = config.train.compile and not hardware.accelerator_of(config.fleet.instance_type)
    return FAMILIES[config.model.family].rotary and not compiled and hardware.on_local_cpus(config.fleet.instance_type)
