"""Matrix products on CPUs: which library computes them, and how fast each format and library is
here, for hardware/cpu_speed.py.

What is measured is a small model's layer, forward and backward: three products of 1,024 tokens by a
matrix, on one core, in CPU seconds of its thread, so that other work on the machine counts little.
Ways take turns, and the best turn of each counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..hardware.cpu_speed import CpuSpeed, here

TOKENS = 1024
# of matrices: of a model a little wider than the preset `tiny`, and of `small`
SHAPES = ((192, 512), (384, 1024))
TURNS, LEAST = 4, 0.25  # of each way: so many, and so many seconds of all ways together
HOPELESS = (
    4.0  # times as long as the fastest, in the first turn: a format without instructions of its own
)
FP32_ERROR = 2e-6  # of a product, relative: fp32's own is 3e-7, and TF32's and bf16's are over 3e-4
# of the cores' time that the measurement must get, or processes and threads are not compared
BUSY = 0.8
Batch = list[tuple[Tensor, Tensor, Tensor]]
Clock = Callable[[], float]


def by_onednn(whether: bool) -> None:
    """Computes fp32 products by oneDNN instead of MKL, which takes a slow path on CPUs of other
    makers.

    torch (2.13) has no other switch for it than this one, which allows bf16 inside. On a CPU whose
    products in bf16 are of no advantage to oneDNN, as those without AMX, it computes in fp32 all
    the same: `is_exact` makes sure.
    """
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    matmul.fp32_precision = "bf16" if whether else "ieee"


def is_exact() -> bool:
    """Whether products by oneDNN are as exact as fp32 is, forward and backward."""
    by_onednn(True)
    try:
        return max(error_of(*each) for each in batch(torch.float32)) < FP32_ERROR
    finally:
        by_onednn(False)


def error_of(x: Tensor, weight: Tensor, gradient: Tensor) -> float:
    """How far products are from those in fp64, relative."""
    pairs = zip(
        products(x, weight, gradient),
        products(x.double(), weight.double(), gradient.double()),
        strict=True,
    )
    return max(float((found - true).norm() / true.norm()) for found, true in pairs)


def products(x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's forward pass, its input's gradient and its weight's."""
    return torch.nn.functional.linear(x, weight), gradient @ weight, gradient.T @ x


def batch(format_: torch.dtype, parts: int = 1) -> Batch:
    """Input, weight and gradient of each shape; one of so many parts of the tokens."""
    rows, dice = max(1, TOKENS // parts), torch.Generator().manual_seed(1)
    sizes = [((rows, width), (inner, width), (rows, inner)) for width, inner in SHAPES]
    return [tuple(torch.randn(size, generator=dice).to(format_) for size in each) for each in sizes]  # type: ignore[misc]


def multiply(given: Batch, threads: int) -> None:
    torch.set_num_threads(threads)  # of this Python thread
    for each in given:
        products(*each)


def flops() -> float:
    return sum(3 * 2.0 * TOKENS * width * inner for width, inner in SHAPES)


def best_seconds(ways: dict[str, Callable[[], Any]], clock: Clock) -> dict[str, float]:
    """The seconds of each way's best turn."""

    def seconds(name: str) -> float:
        began = clock()
        ways[name]()
        return clock() - began

    best = {name: min(seconds(name), seconds(name)) for name in ways}  # the first time warms up
    left = [name for name in ways if best[name] < HOPELESS * min(best.values())]
    until, turns = time.perf_counter() + LEAST, 0
    while turns < TURNS or time.perf_counter() < until:
        best |= {name: min(best[name], seconds(name)) for name in left}
        turns += 1
    return best


def one_core() -> dict[str, float]:
    """FLOP/s of a core in each format; of fp32 by oneDNN too, where that is exact."""
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
    """FLOP/s of all cores in one process, `together`, and in as many, `apart`; nothing where other
    work has too much of them.

    Processes are played by Python's threads, which hold no lock while they multiply.
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
    """The speed of this machine's CPUs, measured in about a second."""
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
