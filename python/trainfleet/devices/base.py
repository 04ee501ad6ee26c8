"""What the engine may ask of a device. Nothing outside this package knows which one it is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Device(Protocol):
    """One rank's device."""

    kind: str  # cpu or cuda
    backend: str  # of torch.distributed, for tensors on it
    torch_device: torch.device

    @property
    def name(self) -> str:
        """As its maker calls it."""
        ...

    @property
    def native_bf16(self) -> bool:
        """Whether bf16 products have instructions of their own."""
        ...

    @property
    def native_fp8(self) -> bool:
        """Whether fp8 products have."""
        ...

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Nominal FLOP/s of this rank's share of the device, without sparsity."""
        ...

    def place(self, array: np.ndarray) -> Tensor:
        """The array on the device; the copy may still be under way when this returns."""
        ...

    def memory_bytes(self) -> int:
        """What the rank could use at most."""
        ...

    def memory_used(self) -> int:
        """The most that the rank has used so far."""
        ...

    def synchronize(self) -> None:
        """Returns when all that was asked of the device is done."""
        ...

    def mark(self) -> Callable[[], float]:
        """A moment in what the device does, put in its queue now; its seconds, to be asked for once the device has come there."""
        ...

    def host_buffer(self, like: Tensor) -> Tensor:
        """A contiguous tensor of that shape and type on the host, which the device can fill at its full speed."""
        ...

    def generators(self) -> list[torch.Generator]:
        """The random numbers that training on it may draw from: the host's first."""
        ...
