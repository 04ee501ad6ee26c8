"""A CPU as a training device: gloo, and OMP_NUM_THREADS cores for the rank."""

from __future__ import annotations

import os
import resource
import sys
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..hardware import cpu_speed
from . import matrix_products
from .base import COSTLY, Usual


class Cpu(Usual):
    kind = "cpu"
    backend = "gloo"
    native_fp16 = native_fp8 = False
    costly: frozenset[object] = COSTLY | {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    }
    casts = True  # elementwise operations on bf16 are slow without compilation

    def __init__(self, index: int = 0) -> None:
        """Opens the CPU; all ranks of a node share its CPUs."""
        self.torch_device = torch.device("cpu")

    def start(self) -> None:
        # AdamW's moments of rare tokens decay into denormals, which take 100 cycles each
        torch.set_flush_denormal(True)
        matrix_products.by_onednn(cpu_speed.of_this_machine().by_onednn)

    @cached_property
    def name(self) -> str:
        lines = self._cpuinfo.splitlines()
        return next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
            "CPU",
        )

    @cached_property
    def native_bf16(self) -> bool:
        """Tells whether bf16 products were measured to be faster here: instructions for them may
        bring no gain.
        """
        return cpu_speed.of_this_machine().half

    @cached_property
    def _cpuinfo(self) -> str:
        path = Path("/proc/cpuinfo")
        return path.read_text() if path.exists() else ""

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Returns the speed of its threads in products of a small model's size
        (hardware/cpu_speed.py); no CPU comes near its nominal figure.
        """
        return (
            cpu_speed.of_this_machine().rate("bf16" if dtype == torch.bfloat16 else "fp32")
            * torch.get_num_threads()
        )

    def upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)

    def memory_bytes(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def memory_used(self) -> int:
        """Returns the largest resident set; ru_maxrss counts bytes on macOS and KiB elsewhere
        (getrusage(2)).
        """
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )

    def synchronize(self) -> None:
        pass  # a call returns when its work is done

    def generators(self) -> list[torch.Generator]:
        return [torch.default_generator]
