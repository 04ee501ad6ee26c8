"""An NVIDIA GPU as a training device: NCCL, one GPU a rank."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .. import hardware


class Cuda:
    kind = "cuda"
    backend = "nccl"

    def __init__(self, index: int) -> None:
        # Growing segments instead of fixed blocks: batches of one shape then never fail on fragmented memory.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        torch.set_float32_matmul_precision("high")  # what stays fp32 may use TF32
        self.properties = torch.cuda.get_device_properties(index)
        self.name = str(self.properties.name)
        self.native_bf16 = self.properties.major >= 8
        self.native_fp8 = (self.properties.major, self.properties.minor) >= (8, 9)  # since Ada and Hopper

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Dense peak by the data sheet; NaN, and so no MFU, for a GPU that the table does not have."""
        accelerator = hardware.find_accelerator(self.name, self.memory_bytes())
        format = {torch.float8_e4m3fn: "fp8", torch.bfloat16: "bf16"}.get(dtype, "fp32")
        return float("nan") if accelerator is None else accelerator.peak(format)

    def place(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).pin_memory().to(self.torch_device, non_blocking=True)

    def memory_bytes(self) -> int:
        return int(self.properties.total_memory)

    def memory_used(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def mark(self) -> Callable[[], float]:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        first = self._first = getattr(self, "_first", event)  # events tell only how long it is from one to another
        return lambda: first.elapsed_time(event) / 1000

    def host_buffer(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)  # page-locked: a DMA copy, at the full speed of the bus

    def generators(self) -> list[torch.Generator]:
        return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]
