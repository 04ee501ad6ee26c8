"""Defines the engine's interface to a device. No code outside this package knows which one it is
on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

Call = TypeVar("Call", bound=Callable[..., Any])
# Selective recomputation keeps these results on any device: products and attention. The device
# chooses attention's kernel.
COSTLY = frozenset(
    {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
)


class Dice(Protocol):
    """The saved part of a random number generator."""

    def get_state(self) -> Tensor: ...
    def set_state(self, state: Tensor, /) -> object: ...
    def manual_seed(self, seed: int, /) -> object: ...


class Device(Protocol):
    """One rank's device."""

    kind: str  # cpu, cuda, neuron or neuron_xla
    backend: str  # torch.distributed's backend for tensors on the device
    torch_device: torch.device
    costly: frozenset[object]  # operations with a result that selective recomputation keeps
    single: str  # the format of fp32 products; 10 bits of a factor may be enough (tf32)
    gradient_sums: torch.dtype  # the format in which gradients of several ranks are added up
    loss_sums: torch.dtype  # format in which losses of a validation are added up
    fused_adamw: bool  # torch's fused AdamW, which can skip a step, runs on it
    # fp32 weights are cast for each product of bf16; otherwise once per step, as ranks gather them
    casts: bool
    lazy: bool  # the device is a `Lazy` one
    # `clock` times the device's work; otherwise the host's recording of it, and no rank is judged
    # by it
    tells_time: bool
    # False if programs are only recorded, to be compiled ahead: values read back are meaningless
    executes: bool

    def start(self) -> None:
        """Takes the device for this process; called once, before the process group is made."""
        ...

    def joined(self, rank: int, size: int) -> None:
        """Checks the device once the process group is made. Raises RunError if the device assigns
        this process another rank, or none.
        """
        ...

    def compiled(self, call: Call, dynamic: bool = False) -> Call:
        """Compiles a computation for the device when it is called; `dynamic` serves all shapes with
        one code.
        """
        ...

    def generator(self, seed: int) -> torch.Generator:
        """Returns a new generator for values that are drawn on the device."""
        ...

    @property
    def name(self) -> str:
        """Its maker's name for it."""
        ...

    @property
    def native_bf16(self) -> bool:
        """Tells whether it has instructions for bf16 products."""
        ...

    @property
    def native_fp16(self) -> bool:
        """Tells whether fp16 products run several times as fast as fp32 ones."""
        ...

    @property
    def native_fp8(self) -> bool:
        """Tells whether it has instructions for fp8 products."""
        ...

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Returns nominal FLOP/s of this rank's share of the device, without sparsity."""
        ...

    def upload(self, array: np.ndarray) -> Tensor:
        """Copies an array to the device; the copy may still be under way when this returns."""
        ...

    def memory_bytes(self) -> int:
        """Returns the bytes that the rank can use at most."""
        ...

    def memory_used(self) -> int:
        """Returns the most bytes that the rank has used so far."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has finished all queued work."""
        ...

    def clock(self) -> Callable[[], float]:
        """Records an event in the device's queue. The returned function gives its time in seconds,
        once the device is past it.
        """
        ...

    def host_buffer(self, like: Tensor) -> Tensor:
        """Returns a contiguous tensor of that shape and type on the host, which the device can fill
        at its full speed.
        """
        ...

    def meters(self) -> dict[str, float]:
        """Returns further metrics of the node's devices; {} without a tool that measures them."""
        ...

    def generators(self) -> Sequence[Dice]:
        """Returns the generators that training on it may draw from: the host's first."""
        ...


class Usual:
    """The common part of most devices, for the classes of `Device`."""

    single = "float32"
    gradient_sums, loss_sums = torch.float32, torch.float64
    fused_adamw = executes = tells_time = True
    casts = lazy = False

    def joined(self, rank: int, size: int) -> None:
        pass

    def compiled(self, call: Call, dynamic: bool = False) -> Call:
        return cast(Call, torch.compile(call, dynamic=dynamic))

    def generator(self, seed: int) -> torch.Generator:
        """Returns the host's: first values are then the same as on a CPU."""
        return torch.Generator().manual_seed(seed)

    def clock(self) -> Callable[[], float]:
        """Reads the host's clock. If operations are only recorded, it times the recording: the
        profiler has the device's own times.
        """
        moment = time.perf_counter()
        return lambda: moment

    def host_buffer(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype)

    def meters(self) -> dict[str, float]:
        return {}


class Lazy(Device, Protocol):
    """A device that only records operations, and runs all recorded ones as one compiled program."""

    def settle(self) -> None:
        """Ends the program that is being recorded, and starts it; returns before it has run."""
        ...

    def compilations(self) -> int:
        """Returns how many programs were compiled so far."""
        ...

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        """Returns a context in which products of fp32 numbers are computed in that format."""
        ...
