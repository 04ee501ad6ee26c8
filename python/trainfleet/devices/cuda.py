"""NVIDIA GPU device: NCCL, with one GPU per rank."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from ..hardware import node_types
from ..hardware.accelerators import find_accelerator
from ..trust.errors import RunError
from .base import COSTLY, Device, DeviceEvent, this_rank

DRIVER = Path("/proc/driver/nvidia/version")
TARGET = re.compile(r"(sm|compute)_(\d+)(\d)")  # sm_90a means 9.0


class Cuda(Device):
    kind = "cuda"
    backend = "nccl"
    costly: frozenset[object] = COSTLY | {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }

    def __init__(self, index: int) -> None:
        """Selects a GPU by its index among those visible to the process.

        Raises:
            RunError: the GPU does not exist, or torch can't use it. The message names the hardware
                found and the software to install.
        """
        # With expandable segments, same-shaped batches can't run out of memory through
        # fragmentation, whereas with fixed-size blocks they can.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        _check_torch()
        _check_count(index)
        self.torch_device = torch.device("cuda", index)
        self.properties = torch.cuda.get_device_properties(index)
        self.name = str(self.properties.name)
        capability = self.properties.major, self.properties.minor
        if not has_code_for(capability, torch.cuda.get_arch_list()):
            raise _unusable(
                f"{self.name} has compute capability {capability[0]}.{capability[1]}, but this "
                f"torch build supports only {', '.join(torch.cuda.get_arch_list())}"
            )
        # bf16 since Ampere, fp16 since Volta
        self.native_bf16, self.native_fp16 = (self.properties.major >= since for since in (8, 7))
        self.native_fp8 = capability >= (8, 9)  # fp8 since Ada and Hopper
        self.single = "tf32" if self.native_bf16 else "float32"

    @staticmethod
    def found() -> bool:
        """Returns whether torch finds a usable GPU."""
        return torch.cuda.is_available()

    def start(self) -> None:
        torch.cuda.set_device(self.torch_device)
        torch.set_float32_matmul_precision("high")  # allow TF32 for the remaining fp32 matmuls
        # NCCL's default timeout of 10 minutes would kill ranks that wait for one that is still
        # compiling. The watchdog detects hangs instead.
        distributed_c10d.default_pg_nccl_timeout = distributed_c10d.default_pg_timeout  # type: ignore[attr-defined]

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.torch_device).manual_seed(seed)

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Returns the GPU's dense peak FLOP/s from its data sheet.

        Returns NaN for an unknown GPU, so that no MFU is reported.
        """
        accelerator = find_accelerator(self.name, self.memory_bytes())
        format_ = {torch.float8_e4m3fn: "fp8", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(
            dtype, "fp32"
        )
        return float("nan") if accelerator is None else accelerator.peak(format_)

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).pin_memory().to(self.torch_device, non_blocking=True)

    def memory_bytes(self) -> int:
        return int(self.properties.total_memory)

    def memory_used(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def clock(self) -> DeviceEvent:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return DeviceEvent(event)

    def host_buffer(self, like: Tensor) -> Tensor:
        # Pinned memory allows DMA at full bus speed.
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def generators(self) -> list[torch.Generator]:
        return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


def has_code_for(capability: tuple[int, int], targets: Iterable[str]) -> bool:
    """Returns whether a torch build has code for a compute capability, given its list of targets.

    Returns True if the targets can't be parsed. Machine code (`sm_90`) runs on the same major
    version with the same or a later minor version. PTX (`compute_90`) runs on the same or any later
    capability (CUDA C++ Programming Guide, "Application Compatibility").
    """
    found = [TARGET.match(target) for target in targets]
    known = [(match[1], (int(match[2]), int(match[3]))) for match in found if match]
    return not known or any(
        made <= capability and (kind == "compute" or made[0] == capability[0])
        for kind, made in known
    )


def _check_torch() -> None:
    if torch.cuda.is_available():
        return
    driver = DRIVER.read_text().splitlines()[0] if DRIVER.exists() else ""
    if torch.version.cuda is None and torch.version.hip is None:
        raise _unusable(
            f"torch {torch.__version__} is built without CUDA; "
            f"{driver or 'no NVIDIA driver is loaded'}"
        )
    if not driver and not node_types.local_accelerators():
        raise _unusable(
            f"no NVIDIA driver is loaded ({DRIVER} does not exist); torch {torch.__version__}"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        why = "torch finds no GPU"
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise _unusable(
        f"{why}; torch {torch.__version__} for CUDA {torch.version.cuda}; driver: "
        f"{driver or 'none'}" + ("" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible}")
    )


def _check_count(index: int) -> None:
    if index >= (count := torch.cuda.device_count()):
        raise RunError(
            f"local rank {index} has no GPU",
            where=this_rank(),
            why=f"each rank needs one GPU, but torch finds {count}",
            next="lower fleet.ranks_per_node, or run nvidia-smi on the node and make doctor",
        )


def _unusable(why: str) -> RunError:
    return RunError(
        "this rank can't use a GPU, but the plan requires one (fleet.platform)",
        where=this_rank(),
        why=why,
        next=(
            "run make setup to install the driver and torch on hosts; here, check nvidia-smi "
            "and the torch build (docker/platforms.lock.yaml); to train on CPUs, use "
            "SET='fleet.platform=cpu'"
        ),
    )
