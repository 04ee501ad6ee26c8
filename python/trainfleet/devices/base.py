"""What the engine may ask of a device. Nothing outside this package knows which one it is on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

Call = TypeVar("Call", bound=Callable[..., Any])
# What selective recomputation keeps on any device: products and attention, whose kernel the device
# chooses.
COSTLY = frozenset(
    {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
)


class Dice(Protocol):
    """A generator of random numbers, as far as its state is saved."""

    def get_state(self) -> Tensor: ...
    def set_state(self, state: Tensor, /) -> object: ...
    def manual_seed(self, seed: int, /) -> object: ...


class Device(Protocol):
    """One rank's device."""

    kind: str  # cpu, cuda, neuron or neuron_xla
    backend: str  # of torch.distributed, for tensors on the device
    torch_device: torch.device
    costly: frozenset[object]  # operations whose result selective recomputation keeps
    single: str  # the format of products of fp32, for whose factors 10 bits may be enough (tf32)
    gradient_sums: torch.dtype  # the format in which gradients of several ranks are added up
    loss_sums: torch.dtype  # and the losses of a validation
    fused_adamw: bool  # whether torch's fused AdamW runs on it, which can leave a step out
    # whether fp32 weights are cast for each product of bf16; else once for all of a step's, as
    # ranks gather them
    casts: bool
    lazy: bool  # whether it is a `Lazy` one
    # whether `clock` is of what the device does; else of when the host recorded it, and no rank is
    # judged by it
    tells_time: bool
    # False where programs are only recorded, to be compiled ahead: what is read back means nothing
    executes: bool

    def start(self) -> None:
        """Takes the device for this process; called once, before the process group is made."""
        ...

    def joined(self, rank: int, size: int) -> None:
        """Called once the process group is made. RunError where the device takes this process for
        another rank, or for alone.
        """
        ...

    def compiled(self, call: Call, dynamic: bool = False) -> Call:
        """The same computation, compiled for the device as it is called; `dynamic` serves all
        shapes with one code.
        """
        ...

    def generator(self, seed: int) -> torch.Generator:
        """A new generator for values that are drawn on the device."""
        ...

    @property
    def name(self) -> str:
        """As its maker calls it."""
        ...

    @property
    def native_bf16(self) -> bool:
        """Whether bf16 products have instructions of their own."""
        ...

    @property
    def native_fp16(self) -> bool:
        """Whether fp16 products run several times as fast as fp32 ones."""
        ...

    @property
    def native_fp8(self) -> bool:
        """Whether fp8 products have."""
        ...

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Nominal FLOP/s of this rank's share of the device, without sparsity."""
        ...

    def upload(self, array: np.ndarray) -> Tensor:
        """The array on the device; the copy may still be under way when this returns."""
        ...

    def memory_bytes(self) -> int:
        """Bytes that the rank can use at most."""
        ...

    def memory_used(self) -> int:
        """The most bytes that the rank has used so far."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has finished all that was queued."""
        ...

    def clock(self) -> Callable[[], float]:
        """Records an event in the device's queue; the function returned gives its time in seconds,
        once the device is past it.
        """
        ...

    def host_buffer(self, like: Tensor) -> Tensor:
        """A contiguous tensor of that shape and type on the host, which the device can fill at its
        full speed.
        """
        ...

    def meters(self) -> dict[str, float]:
        """Further metrics of the node's devices; {} without a tool that measures them."""
        ...

    def generators(self) -> Sequence[Dice]:
        """The generators that training on it may draw from: the host's first."""
        ...


class Usual:
    """What most devices do alike, for the classes of `Device`."""

    single = "float32"
    gradient_sums, loss_sums = torch.float32, torch.float64
    fused_adamw = executes = tells_time = True
    casts = lazy = False

    def joined(self, rank: int, size: int) -> None:
        pass

    def compiled(self, call: Call, dynamic: bool = False) -> Call:
        return cast(Call, torch.compile(call, dynamic=dynamic))

    def generator(self, seed: int) -> torch.Generator:
        """The host's: first values are then those that a CPU draws."""
        return torch.Generator().manual_seed(seed)

    def clock(self) -> Callable[[], float]:
        """The host's; where operations are only recorded, of that: the device's own times are the
        profiler's.
        """
        moment = time.perf_counter()
        return lambda: moment

    def host_buffer(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype)

    def meters(self) -> dict[str, float]:
        return {}


class Lazy(Device, Protocol):
    """A device that only records operations, and runs all that were recorded as one compiled
    program.
    """

    def settle(self) -> None:
        """Ends the program that is being recorded, and has it run; returns before it has."""
        ...

    def compilations(self) -> int:
        """How many programs were compiled so far."""
        ...

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        """A context in which products of fp32 numbers are computed in that format."""
        ...
