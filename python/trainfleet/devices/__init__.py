"""Devices that ranks compute on, one module per kind.

Other platforms can add kinds (config/platforms.py). Only this package selects a device or checks
its kind.
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
    """Returns the device that the plan assigns to this rank, without starting it.

    `fleet.platform` in the plan determines the kind, and LOCAL_RANK the index on the node. There is
    no fallback to another kind of device.

    Raises:
        RunError: the node has no such device, its driver is missing, or this torch build can't use
            it.
    """
    opened = KINDS.get(kind) or platforms.opening(kind)
    if opened is None:
        raise RunError(
            f"ranks can't use the device {kind} yet",
            where="fleet.platform",
            why=f"the supported devices are {', '.join([*KINDS, *platforms.devices()])}",
            next="make plan",
        )
    idle = node_types.local_accelerators() if kind == Cpu.kind and index() == 0 else 0
    if idle:
        print(
            f"{idle} accelerators of this node are idle, because ranks use the CPUs "
            "(fleet.platform is cpu)"
        )
    return opened(index())


def nearest() -> Device:
    """Starts and returns the fastest device that this process can use.

    For processes that load a model outside a planned run.
    """
    device = Cuda(index()) if Cuda.found() else Cpu()
    device.start()
    return device


def index() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
