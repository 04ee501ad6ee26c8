"""The engine's interface to a device. No code outside this package knows which kind of device it
uses.
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
# Operations with results that selective recomputation keeps on every device: matrix products. Each
# device may add its attention kernels.
COSTLY = frozenset(
    {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
)


class Dice(Protocol):
    """Random number generator with a state that is saved."""

    def get_state(self) -> Tensor: ...
    def set_state(self, state: Tensor, /) -> object: ...
    def manual_seed(self, seed: int, /) -> object: ...


class Device(Protocol):
    """Device of one rank."""

    kind: str  # cpu, cuda, neuron or neuron_xla
    backend: str  # torch.distributed's backend for tensors on the device
    torch_device: torch.device
    costly: frozenset[object]  # operations with results that selective recomputation keeps
    single: str  # format of fp32 products; tf32 keeps only 10 bits of a factor
    gradient_sums: torch.dtype  # format in which gradients of several ranks are summed
    loss_sums: torch.dtype  # format in which validation losses are summed
    fused_adamw: bool  # whether torch's fused AdamW, which can skip a step, runs on the device
    # Whether fp32 weights are cast for each product in bf16. Otherwise they are cast once per step,
    # when ranks gather them.
    casts: bool
    lazy: bool  # whether the device is a `Lazy` device
    # Whether `clock` times the device's work. Otherwise it times how the host records that work,
    # and no rank is judged by it.
    tells_time: bool
    # False if programs are only recorded, to be compiled ahead. Values read back are then
    # meaningless.
    executes: bool

    def start(self) -> None:
        """Acquires the device for this process. Called once, before the process group is
        created.
        """
        ...

    def joined(self, rank: int, size: int) -> None:
        """Checks the device after the process group was created. Raises RunError if the device
        assigns this process another rank or no rank.
        """
        ...

    def compiled(self, call: Call, dynamic: bool = False) -> Call:
        """Returns a computation that is compiled for the device when it is called. With `dynamic`,
        one program serves all shapes.
        """
        ...

    def generator(self, seed: int) -> torch.Generator:
        """Returns a new generator for values that are drawn on the device."""
        ...

    @property
    def name(self) -> str:
        """Returns the manufacturer's name for the device."""
        ...

    @property
    def native_bf16(self) -> bool:
        """Tells whether the device has instructions for bf16 products."""
        ...

    @property
    def native_fp16(self) -> bool:
        """Tells whether fp16 products run several times as fast as fp32 ones."""
        ...

    @property
    def native_fp8(self) -> bool:
        """Tells whether the device has instructions for fp8 products."""
        ...

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Returns the nominal FLOP/s of this rank's share of the device, without sparsity."""
        ...

    def upload(self, array: np.ndarray) -> Tensor:
        """Copies an array to the device. The copy may be unfinished when this returns."""
        ...

    def memory_bytes(self) -> int:
        """Returns the most bytes that the rank can use."""
        ...

    def memory_used(self) -> int:
        """Returns the most bytes that the rank has used so far."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has finished all queued work."""
        ...

    def clock(self) -> Callable[[], float]:
        """Records an event in the device's queue. The returned function gives the event's time in
        seconds, once the device has passed the event.
        """
        ...

    def host_buffer(self, like: Tensor) -> Tensor:
        """Returns a contiguous host tensor of the same shape and type, which the device can fill at
        full speed.
        """
        ...

    def meters(self) -> dict[str, float]:
        """Returns additional metrics of the node's devices; {} if no tool measures them."""
        ...

    def generators(self) -> Sequence[Dice]:
        """Returns the generators that training on the device may use, the host's generator
        first.
        """
        ...


class Usual:
    """Defaults that most classes of `Device` share."""

    single = "float32"
    gradient_sums, loss_sums = torch.float32, torch.float64
    fused_adamw = executes = tells_time = True
    casts = lazy = False

    def joined(self, rank: int, size: int) -> None:
        pass

    def compiled(self, call: Call, dynamic: bool = False) -> Call:
        return cast(Call, torch.compile(call, dynamic=dynamic))

    def generator(self, seed: int) -> torch.Generator:
        """Returns a generator on the host, so that initial values are the same as on a CPU."""
        return torch.Generator().manual_seed(seed)

    def clock(self) -> Callable[[], float]:
        """Reads the host's clock. If operations are only recorded, the clock times the recording;
        the profiler has the device's own times.
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
        """Ends the program that is being recorded and starts it, without waiting until it has
        run.
        """
        ...

    def compilations(self) -> int:
        """Returns the number of programs that were compiled so far."""
        ...

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        """Returns a context in which products of fp32 numbers are computed in `dtype`."""
        ...
