"""Interface between the engine and a device.

No code outside this package depends on the kind of device.
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
# Operations that selective recomputation never recomputes: matmuls. Each device may add its
# attention kernels.
COSTLY = frozenset(
    {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
)


class Dice(Protocol):
    """Random number generator that can save and restore its state."""

    def get_state(self) -> Tensor: ...
    def set_state(self, state: Tensor, /) -> object: ...
    def manual_seed(self, seed: int, /) -> object: ...


class Device(Protocol):
    """A rank's device."""

    kind: str  # cpu, cuda, neuron or neuron_xla
    backend: str  # torch.distributed backend for tensors on the device
    torch_device: torch.device
    costly: frozenset[object]  # operations that selective recomputation never recomputes
    single: str  # number format of fp32 matmuls; tf32 keeps only 10 mantissa bits
    gradient_sums: torch.dtype  # number format for summing gradients across ranks
    loss_sums: torch.dtype  # number format for summing validation losses
    fused_adamw: bool  # whether the device supports torch's fused AdamW, which can skip a step
    # Whether fp32 weights are cast to bf16 for each matmul. Otherwise, they are cast once per step,
    # when ranks gather them.
    casts: bool
    lazy: bool  # whether the device implements `Lazy`
    # Whether `clock` measures the device's work. Otherwise it measures how long the host records
    # that work, which says nothing about slow ranks.
    tells_time: bool
    # False if programs are only recorded for ahead-of-time compilation. Values read back are then
    # meaningless.
    executes: bool

    def start(self) -> None:
        """Acquires the device for this process.

        Called once, before the process group is created.
        """
        ...

    def joined(self, rank: int, size: int) -> None:
        """Checks the device after the process group has been created.

        Raises:
            RunError: the device assigns this process a different rank or no rank.
        """
        ...

    def compiled(self, call: Call, dynamic: bool = False) -> Call:
        """Wraps a function so that it is compiled for the device when called.

        With `dynamic`, one program serves all shapes.
        """
        ...

    def generator(self, seed: int) -> torch.Generator:
        """Returns a new seeded generator for random values on the device."""
        ...

    @property
    def name(self) -> str:
        """Returns the manufacturer's name for the device."""
        ...

    @property
    def native_bf16(self) -> bool:
        """Returns whether the device has instructions for bf16 matmuls."""
        ...

    @property
    def native_fp16(self) -> bool:
        """Returns whether fp16 matmuls run several times as fast as fp32 ones."""
        ...

    @property
    def native_fp8(self) -> bool:
        """Returns whether the device has instructions for fp8 matmuls."""
        ...

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Returns the nominal FLOP/s of this rank's share of the device, without sparsity."""
        ...

    def upload(self, array: np.ndarray) -> Tensor:
        """Copies an array to the device. The copy may still be in flight when this returns."""
        ...

    def memory_bytes(self) -> int:
        """Returns the maximum memory available to the rank, in bytes."""
        ...

    def memory_used(self) -> int:
        """Returns the rank's peak memory use so far, in bytes."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has finished all queued work."""
        ...

    def clock(self) -> Callable[[], float]:
        """Records an event in the device's queue.

        The returned function gives the event's time in seconds. Call it only after the device has
        passed the event.
        """
        ...

    def host_buffer(self, like: Tensor) -> Tensor:
        """Returns a contiguous host tensor of the same shape and type, for fast copies from the
        device.
        """
        ...

    def meters(self) -> dict[str, float]:
        """Returns additional metrics of the node's devices, or {} if no tool measures them."""
        ...

    def generators(self) -> Sequence[Dice]:
        """Returns all generators that training on the device may use, starting with the host's."""
        ...


class Usual:
    """Defaults shared by most classes of `Device`."""

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
        """Reads the host clock.

        If operations are only recorded, this times the recording. The profiler records device
        times.
        """
        moment = time.perf_counter()
        return lambda: moment

    def host_buffer(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype)

    def meters(self) -> dict[str, float]:
        return {}


class Lazy(Device, Protocol):
    """Device that only records operations, and runs all recorded ones as one compiled program."""

    def settle(self) -> None:
        """Starts the recorded program, without waiting for it to finish."""
        ...

    def compilations(self) -> int:
        """Returns the number of programs compiled so far."""
        ...

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        """Returns a context in which matmuls of fp32 tensors are computed in `dtype`."""
        ...
