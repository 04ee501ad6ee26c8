"""CPU device: gloo, with OMP_NUM_THREADS cores per rank.

`measure` benchmarks matmuls per dtype and library for hardware/cpu_speed.py. The workload is the
three forward and backward matmuls of a small model's linear layer, with 1,024 tokens. Variants run
interleaved on one core and are measured in thread CPU time, so that other load hardly matters. The
fastest run of each variant counts.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..hardware import cpu_speed
from ..hardware.cpu_speed import CpuSpeed, here
from .base import COSTLY, Device

TOKENS = 1024
# weight shapes of a model slightly wider than the `tiny` preset, and of the `small` preset
SHAPES = ((192, 512), (384, 1024))
TURNS, LEAST = 4, 0.25  # minimum runs per variant, and minimum total seconds
# A variant this many times slower than the fastest in the first runs is assumed to lack hardware
# support, and is dropped.
HOPELESS = 4.0
# Maximum relative error at which a matmul counts as fp32. Real fp32 has an error of 3e-7, and TF32
# and bf16 exceed 3e-4.
FP32_ERROR = 2e-6
# minimum CPU utilization by this process for `all_cores` to give a valid result
BUSY = 0.8
Batch = list[tuple[Tensor, Tensor, Tensor]]
Clock = Callable[[], float]


class Cpu(Device):
    kind = "cpu"
    backend = "gloo"
    native_fp16 = native_fp8 = False
    costly: frozenset[object] = COSTLY | {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    }
    casts = True  # bf16 elementwise ops are slow unless compiled

    def __init__(self, index: int = 0) -> None:
        """Sets up the CPU, which all ranks of a node share."""
        self.torch_device = torch.device("cpu")

    def start(self) -> None:
        # The AdamW moments of rare tokens decay into denormals, which cost 100 cycles each.
        torch.set_flush_denormal(True)
        by_onednn(cpu_speed.of_this_machine().by_onednn)

    @cached_property
    def name(self) -> str:  # type: ignore[override]  # only read
        lines = self._cpuinfo.splitlines()
        return next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
            "CPU",
        )

    @cached_property
    def native_bf16(self) -> bool:  # type: ignore[override]  # only read
        """Returns whether bf16 matmuls were faster than fp32 when benchmarked on this machine.

        Some CPUs have bf16 instructions but no matching speedup.
        """
        return cpu_speed.of_this_machine().half

    @cached_property
    def _cpuinfo(self) -> str:
        path = Path("/proc/cpuinfo")
        return path.read_text() if path.exists() else ""

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Returns the FLOP/s of the rank's threads, as measured with a small model's matmuls.

        CPUs never come close to their nominal peak. hardware/cpu_speed.py caches the measurement.
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
        """Returns the peak resident set size, in bytes.

        ru_maxrss is in bytes on macOS and in KiB elsewhere (getrusage(2)).
        """
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )

    def synchronize(self) -> None:
        pass  # CPU calls are synchronous

    def generators(self) -> list[torch.Generator]:
        return [torch.default_generator]


def by_onednn(whether: bool) -> None:
    """Selects the library for fp32 matmuls: oneDNN if `whether`, otherwise MKL.

    MKL takes a slow path on CPUs from vendors other than Intel. This is the only switch for oneDNN
    in torch 2.13, and it also permits oneDNN to use bf16 internally. Where bf16 has no advantage,
    such as on CPUs without AMX, oneDNN still computes in fp32, which `is_exact` checks.
    """
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    matmul.fp32_precision = "bf16" if whether else "ieee"


def is_exact() -> bool:
    """Returns whether oneDNN matmuls keep fp32 accuracy, forward and backward."""
    by_onednn(True)
    try:
        return max(error_of(*each) for each in batch(torch.float32)) < FP32_ERROR
    finally:
        by_onednn(False)


def error_of(x: Tensor, weight: Tensor, gradient: Tensor) -> float:
    """Returns the largest relative error of the matmuls, measured against fp64."""
    pairs = zip(
        products(x, weight, gradient),
        products(x.double(), weight.double(), gradient.double()),
        strict=True,
    )
    return max(float((found - true).norm() / true.norm()) for found, true in pairs)


def products(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a linear layer's output, input gradient and weight gradient."""
    return torch.nn.functional.linear(x, weight), gradient @ weight, gradient.T @ x


def batch(format_: torch.dtype, parts: int = 1) -> Batch:
    """Returns an input, weight and output gradient for each shape in SHAPES.

    Inputs and output gradients cover only 1 / `parts` of the tokens.
    """
    rows, dice = max(1, TOKENS // parts), torch.Generator().manual_seed(1)
    sizes = [((rows, width), (inner, width), (rows, inner)) for width, inner in SHAPES]
    return [tuple(torch.randn(size, generator=dice).to(format_) for size in each) for each in sizes]  # type: ignore[misc]


def multiply(given: Batch, threads: int) -> None:
    torch.set_num_threads(threads)  # affects only this Python thread
    for each in given:
        products(*each)


def flops() -> float:
    return sum(3 * 2.0 * TOKENS * width * inner for width, inner in SHAPES)


def best_seconds(ways: dict[str, Callable[[], Any]], clock: Clock) -> dict[str, float]:
    """Returns each variant's best time, in seconds."""

    def seconds(name: str) -> float:
        began = clock()
        ways[name]()
        return clock() - began

    best = {name: min(seconds(name), seconds(name)) for name in ways}  # the first run is a warm-up
    left = [name for name in ways if best[name] < HOPELESS * min(best.values())]
    until, turns = time.perf_counter() + LEAST, 0
    while turns < TURNS or time.perf_counter() < until:
        best |= {name: min(best[name], seconds(name)) for name in left}
        turns += 1
    return best


def one_core() -> dict[str, float]:
    """Returns one core's FLOP/s per dtype, and with oneDNN if its fp32 matmuls are accurate."""
    whole, half = batch(torch.float32), batch(torch.bfloat16)

    def onednn() -> None:
        by_onednn(True)
        multiply(whole, 1)
        by_onednn(False)

    ways: dict[str, Callable[[], Any]] = {
        "fp32": partial(multiply, whole, 1),
        "bf16": partial(multiply, half, 1),
    }
    ways |= {"onednn": onednn} if is_exact() else {}
    return {"onednn": 0.0} | {
        name: flops() / seconds for name, seconds in best_seconds(ways, time.thread_time).items()
    }


def all_cores(cores: int, format_: torch.dtype) -> dict[str, float]:
    """Returns the total FLOP/s of all cores for two setups.

    `together` is one multi-threaded process, and `apart` is one single-threaded process per core.
    Threads stand in for the processes, since matmuls release the GIL. Returns {} if the machine is
    too busy to measure.
    """
    whole, parts = batch(format_), [batch(format_, cores) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as pool:
        began, busy = time.perf_counter(), time.process_time()
        while time.perf_counter() - began < LEAST / 4:
            list(pool.map(multiply, parts, [1] * cores))
        if time.process_time() - busy < BUSY * cores * (time.perf_counter() - began):
            return {}
        ways: dict[str, Callable[[], Any]] = {
            "together": partial(multiply, whole, cores),
            "apart": lambda: list(pool.map(multiply, parts, [1] * cores)),
        }
        return {
            name: flops() / seconds
            for name, seconds in best_seconds(ways, time.perf_counter).items()
        }


def measure() -> CpuSpeed:
    """Benchmarks this machine's CPUs, which takes about a second."""
    cpu, version, cores = here()
    found = CpuSpeed(cpu, version, cores, **one_core())
    if cores == 1:
        return found
    by_onednn(found.by_onednn)
    try:
        wide = all_cores(cores, torch.bfloat16 if found.half else torch.float32)
    finally:
        by_onednn(False)
    return CpuSpeed(cpu, version, cores, found.fp32, found.onednn, found.bf16, **wide)
