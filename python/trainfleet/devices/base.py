"""Interface between the engine and its devices. It hides the kind of device from all other code."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
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


@dataclass(frozen=True)
class DeviceEvent:
    """Event in a device's queue."""

    event: Any

    def __sub__(self, earlier: DeviceEvent) -> float:
        """Returns the seconds since an earlier event, once the device has reached both.

        Every pair is measured directly. Times since one origin would lose precision over days,
        because CUDA returns them in fp32.
        """
        return float(earlier.event.elapsed_time(self.event)) / 1000


class Device(Protocol):
    """A rank's device, as the engine sees it, with the defaults that most devices share."""

    kind: str  # cpu, cuda, neuron or neuron_xla
    name: str  # product name, as its vendor spells it
    native_bf16: bool  # whether it has instructions for bf16 matmuls
    native_fp16: bool  # whether fp16 matmuls are several times faster than fp32 ones
    native_fp8: bool  # whether it has instructions for fp8 matmuls
    backend: str  # torch.distributed backend for tensors on the device
    torch_device: torch.device
    costly: frozenset[object]  # operations that selective recomputation never recomputes
    # actual precision of fp32 matmuls: float32, or tf32 with its 10 mantissa bits
    single: str = "float32"
    gradient_sums: torch.dtype = torch.float32  # dtype for reducing gradients across ranks
    loss_sums: torch.dtype = torch.float64  # dtype for accumulating validation losses
    # whether the device supports torch's fused AdamW, which can skip a step
    fused_adamw: bool = True
    # Whether fp32 weights are cast to bf16 for each matmul. Otherwise, they are cast once per step,
    # when ranks gather them.
    casts: bool = False
    lazy: bool = False  # whether the device implements `Lazy`
    # Whether `clock` measures device time. Otherwise, it measures only how long the host takes to
    # record the work, which can't reveal a straggler.
    tells_time: bool = True
    # False if programs are only traced for ahead-of-time compilation, which makes values read back
    # from the device meaningless.
    executes: bool = True

    def start(self) -> None:
        """Acquires the device for this process.

        Called once, before the process group is created.
        """
        ...

    def joined(self, rank: int, size: int) -> None:
        """Checks that the device runtime agrees with torchrun on rank and world size.

        Called once the process group exists.

        Raises:
            RunError: the runtime (such as PyTorch/XLA's) reports a different rank or world size, or
                none.
        """
        return

    def compiled(self, call: Call, dynamic: bool = False) -> Call:
        """Compiles a function for the device, on its first call.

        With `dynamic`, a single program handles all shapes.
        """
        return cast(Call, torch.compile(call, dynamic=dynamic))

    def generator(self, seed: int) -> torch.Generator:
        """Returns a new generator for random values, seeded with `seed`.

        By default it is on the host, so that initial values match those drawn on a CPU.
        """
        return torch.Generator().manual_seed(seed)

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Returns the nominal peak FLOP/s, without sparsity, of this rank's share of the device."""
        ...

    def upload(self, array: np.ndarray) -> Tensor:
        """Copies an array to the device. The copy may still be in flight when this returns."""
        ...

    def memory_bytes(self) -> int:
        """Returns the maximum memory available to the rank, in bytes."""
        ...

    def memory_used(self) -> int:
        """Returns the rank's peak memory usage so far, in bytes."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has finished all queued work."""
        ...

    def clock(self) -> Any:
        """Records an event in the device's queue. The difference of two events is in seconds.

        Subtract them only after the device has reached both. By default returns the host's time. On
        a device that only records operations, it therefore measures the recording, and only the
        profiler reports device times.
        """
        return time.perf_counter()

    def host_buffer(self, like: Tensor) -> Tensor:
        """Returns a contiguous host tensor with the same shape and dtype, for fast copies from the
        device.
        """
        return torch.empty(like.shape, dtype=like.dtype)

    def meters(self) -> dict[str, float]:
        """Returns extra metrics for the node's devices, or {} if no monitoring tool is
        available.
        """
        return {}

    def generators(self) -> Sequence[Dice]:
        """Returns all generators that training on the device may use, starting with the host's."""
        ...


class Lazy(Device, Protocol):
    """Device that records operations and executes them later as one compiled program."""

    def settle(self) -> None:
        """Launches the recorded program without waiting for it to finish."""
        ...

    def compilations(self) -> int:
        """Returns the number of programs compiled so far."""
        ...

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        """Returns a context in which fp32 matmuls are computed in `dtype`."""
        ...


def this_rank() -> str:
    """Returns this rank and its node, for messages."""
    return f"rank {os.environ.get('RANK', '0')} on node {os.environ.get('GROUP_RANK', '0')}"
