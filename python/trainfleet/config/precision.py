"""Number formats for matmuls, the memory available to a rank, and the config rules for both."""

from __future__ import annotations

from ..hardware import cpu_speed
from ..hardware.accelerators import Accelerator
from .optimizers import OPTIMIZERS, USUAL
from .types import Config, Refusals

# Usable fraction of device memory. The rest is for the driver, NCCL buffers and fragmentation
# (tests/bench/accounts.py).
USABLE = 0.9


def usable_bytes(device: Accelerator) -> float:
    return USABLE * device.memory_gib * 2**30


def format_of(config: Config) -> str:
    """Returns the number format of matmuls: fp8, bf16, fp16 or fp32.

    For `auto` on CPUs, this assumes the CPU of this machine, although each rank decides for its
    CPU.
    """
    if config.train.precision != "auto":
        return config.train.precision
    if config.fleet.on_local_cpus:
        return "bf16" if cpu_speed.of_this_machine().half else "fp32"
    device = config.fleet.rank_device
    return "fp32" if device is None else device.half


def is_half(config: Config) -> bool:
    """Returns whether activations use two bytes per number. fp8 applies only to matmuls."""
    return format_of(config) != "fp32"


def by_parts(config: Config) -> bool:
    """Returns whether norms and dropout keep intermediates, as in torch 2.13 on CPUs.

    On other devices, each is a single kernel.
    """
    return config.fleet.on_local_cpus and not config.train.compile


def casts(config: Config) -> bool:
    """Returns whether every matmul casts its inputs, as in undivided models on CPUs.

    See engine/parallel/__init__.py.
    """
    layout, train = config.train.parallelism, config.train
    divided = layout.fsdp * layout.tensor * layout.pipeline * layout.context > 1
    plain = not divided and train.param_dtype == "fp32" and format_of(config) in ("bf16", "fp16")
    return plain and config.fleet.on_local_cpus


def check_budget(config: Config) -> Refusals:
    """Rejects an activation memory budget that the other settings don't support.

    A budget requires selective checkpointing, compiled blocks and no tensor parallelism.
    """
    train, key = config.train, "train.activation_memory_budget"
    budget, tensor = train.activation_memory_budget, train.parallelism.tensor
    if budget is None:
        return
    if train.activation_checkpointing != "selective":
        why = "a budget needs selective checkpointing"
        then = "use null, or SET='train.activation_checkpointing=selective'"
        yield key, f"{budget}: {why}; {then}"
    elif not train.compile:
        why = "a budget needs compiled blocks"
        yield key, f"{budget}: {why}; use null, or SET='train.compile=true'"
    elif tensor > 1:
        # torch 2.13's partitioner can't compute the size of a mesh, which is an input of these
        # blocks.
        yield key, f"{budget} is not supported with train.parallelism.tensor {tensor}; use null"


def check_formats(config: Config) -> Refusals:
    """Rejects number formats that the device, the optimizer or the layout does not support."""
    train, device = config.train, config.fleet.rank_device
    if device is not None and device.bf16 is None and config.fleet.platform != "cpu":
        instead = {"param_dtype": "fp32", "precision": f"{device.half}, as auto does"}
        told = f"bf16: {device.name} has no bf16 instructions"
        yield from (
            (f"train.{key}", f"{told}; use {other}")
            for key, other in instead.items()
            if getattr(train, key) == "bf16"
        )
    elif train.param_dtype == "bf16" and train.precision not in ("bf16", "fp8"):
        told = f"bf16 is not supported with train.precision {train.precision}"
        yield "train.param_dtype", f"{told}; use fp32, or train.precision bf16"
    if train.param_dtype not in (formats := OPTIMIZERS[train.optimizer].formats):
        told = (
            f"{train.param_dtype}: train.optimizer {train.optimizer} supports only "
            f"{', '.join(formats)}"
        )
        yield "train.param_dtype", f"{told}; set train.optimizer {USUAL} for both"
    if train.precision == "fp16" and config.fleet.platform.startswith("neuron"):
        yield (
            "train.precision",
            "fp16 is not supported on Trainium, which has no loss scaling; use bf16",
        )
    if train.precision == "fp8" and (against := _against_fp8(config, device)):
        yield "train.precision", f"fp8: {against}"


def _against_fp8(config: Config, device: Accelerator | None) -> str:
    """Returns why fp8 does not work and what to use instead, or "".

    If the device is unknown, the ranks check it.
    """
    if config.fleet.node_type is not None if device is None else device.fp8 is None:
        name = device.name if device else "a CPU"
        return f"{name} has no fp8 instructions (GPUs since Ada and Hopper do); use auto"
    if not config.train.compile:
        return "slower than bf16 unless compiled; use bf16, or train.compile true"
    tensor = config.train.parallelism.tensor
    return f"not supported with train.parallelism.tensor {tensor}; use bf16, or tensor 1" * (
        tensor > 1
    )
