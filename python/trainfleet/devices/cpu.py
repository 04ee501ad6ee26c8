"""CPU as a training device: gloo, and OMP_NUM_THREADS cores per rank.

`measure` benchmarks matmuls in each number format and library, for hardware/cpu_speed.py. It times
the forward and backward pass of a small model's layer: three matmuls with 1,024 tokens. They run on
one core and are timed in the thread's CPU seconds, so other load on the machine has little effect.
The variants take turns, and each variant's best turn counts.
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
from .base import COSTLY, Usual

TOKENS = 1024
# Matrix shapes of a model slightly wider than the preset `tiny`, and of the preset `small`.
SHAPES = ((192, 512), (384, 1024))
TURNS, LEAST = 4, 0.25  # minimum turns per variant, and minimum total seconds
# If a format is this many times slower than the fastest one in the first turn, the CPU has no
# instructions for it.
HOPELESS = 4.0
# Maximum relative error of an exact fp32 matmul. The error of fp32 itself is 3e-7; TF32's and
# bf16's are over 3e-4.
FP32_ERROR = 2e-6
# Minimum share of the cores' time that the measurement must get to compare processes with threads.
BUSY = 0.8
Batch = list[tuple[Tensor, Tensor, Tensor]]
Clock = Callable[[], float]


class Cpu(Usual):
    kind = "cpu"
    backend = "gloo"
    native_fp16 = native_fp8 = False
    costly: frozenset[object] = COSTLY | {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    }
    casts = True  # elementwise operations on bf16 are slow without compilation

    def __init__(self, index: int = 0) -> None:
        """Opens the CPU, which all ranks of a node share."""
        self.torch_device = torch.device("cpu")

    def start(self) -> None:
        # AdamW's moments of rare tokens decay into denormals, which cost 100 cycles each.
        torch.set_flush_denormal(True)
        by_onednn(cpu_speed.of_this_machine().by_onednn)

    @cached_property
    def name(self) -> str:
        lines = self._cpuinfo.splitlines()
        return next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
            "CPU",
        )

    @cached_property
    def native_bf16(self) -> bool:
        """Returns whether bf16 matmuls were measured to be faster on this machine.

        CPUs may have bf16 instructions that bring no speedup.
        """
        return cpu_speed.of_this_machine().half

    @cached_property
    def _cpuinfo(self) -> str:
        path = Path("/proc/cpuinfo")
        return path.read_text() if path.exists() else ""

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Returns the measured FLOP/s of the rank's threads in a small model's matmuls.

        No CPU comes close to its nominal peak. hardware/cpu_speed.py caches the measurement.
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
        """Returns the maximum resident set size.

        ru_maxrss is in bytes on macOS and in KiB elsewhere (getrusage(2)).
        """
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )

    def synchronize(self) -> None:
        pass  # CPU calls return only when their work is done

    def generators(self) -> list[torch.Generator]:
        return [torch.default_generator]


def by_onednn(whether: bool) -> None:
    """Makes torch use oneDNN for fp32 matmuls if `whether`, otherwise MKL.

    MKL takes a slow path on CPUs from vendors other than Intel.

    This is torch's (2.13) only switch for oneDNN, and it also allows bf16 internally. On CPUs where
    bf16 brings oneDNN no advantage, such as those without AMX, oneDNN still computes in fp32.
    `is_exact` checks that.
    """
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    matmul.fp32_precision = "bf16" if whether else "ieee"


def is_exact() -> bool:
    """Returns whether oneDNN's matmuls are as exact as fp32, in forward and backward passes."""
    by_onednn(True)
    try:
        return max(error_of(*each) for each in batch(torch.float32)) < FP32_ERROR
    finally:
        by_onednn(False)


def error_of(x: Tensor, weight: Tensor, gradient: Tensor) -> float:
    """Returns the largest relative error of the matmuls, compared with fp64."""
    pairs = zip(
        products(x, weight, gradient),
        products(x.double(), weight.double(), gradient.double()),
        strict=True,
    )
    return max(float((found - true).norm() / true.norm()) for found, true in pairs)


def products(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a layer's output, the gradient of its input and the gradient of its weight."""
    return torch.nn.functional.linear(x, weight), gradient @ weight, gradient.T @ x


def batch(format_: torch.dtype, parts: int = 1) -> Batch:
    """Returns input, weight and output gradient for each shape in SHAPES.

    The input and the gradient contain 1 / `parts` of the tokens.
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
    """Returns the seconds of each variant's fastest turn."""

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
    """Returns one core's FLOP/s in each format, and in fp32 with oneDNN if that is exact."""
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
    """Returns the FLOP/s of all cores in one process, `together`, and in one process per core,
    `apart`.

    Returns {} if other processes take too much of the cores' time. Python threads simulate the
    processes, because they hold no lock during a matmul.
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
    """Measures the speed of this machine's CPUs, which takes about a second."""
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
