"""Devices that ranks compute on.

This package has one file per kind of device. Other platforms may add devices (config/platforms.py).
No code outside this package chooses a device or checks its kind.
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
    """Returns this rank's device as planned, not yet started.

    `fleet.platform` in the plan determines the kind, and LOCAL_RANK is the index on the node.

    Raises:
        RunError: the node has no such device, its driver is missing, or this torch can't use it.
            There is no fallback to another device.
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
    """Starts and returns the fastest device available to this process.

    Used by processes that load a model and have no planned device.
    """
    device = Cuda(index()) if Cuda.found() else Cpu()
    device.start()
    return device


def index() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
