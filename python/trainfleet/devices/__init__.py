"""Devices that ranks compute on: one file per kind, and the devices of other platforms
(config/platforms.py).

No code outside this package chooses a device, or checks its kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ..config import platforms
from ..hardware import node_types
from ..trust.errors import RunError
from .base import Device
from .cpu import Cpu
from .cuda import Cuda
from .neuron import Neuron

__all__ = ["Device", "nearest", "planned"]

KINDS: dict[str, Callable[[int], Device]] = {device.kind: device for device in (Cpu, Cuda, Neuron)}


def planned(kind: str) -> Device:
    """Returns this rank's device, not yet started. Its kind is the plan's (`fleet.platform`), and
    its number on the node is LOCAL_RANK.

    Raises:
        RunError: the node has no such device, its driver is missing, or this torch can't use it. No
            other device is opened instead.
    """
    opened = KINDS.get(kind) or platforms.opening(kind)
    if opened is None:
        why = f"the supported devices are {', '.join([*KINDS, *platforms.devices()])}"
        raise RunError(
            f"ranks can't use the device {kind} yet",
            where="fleet.platform",
            why=why,
            next="make plan",
        )
    idle = node_types.local_accelerators() if kind == Cpu.kind and index() == 0 else 0
    if idle:
        print(
            f"{idle} accelerators of this node are idle, because ranks use the CPUs "
            "(fleet.platform is cpu)",
            flush=True,
        )
    return opened(index())


def nearest() -> Device:
    """Starts and returns the fastest device that this process finds. This is for processes that
    read a model and have no planned device.
    """
    device = Cuda(index()) if Cuda.found() else Cpu()
    device.start()
    return device


def index() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
