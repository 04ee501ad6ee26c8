"""The devices that ranks compute on, each a file. Nothing outside this package chooses one, or asks which kind it has."""

from __future__ import annotations

import os

from .. import hardware
from ..errors import RunError
from .base import Device
from .cpu import Cpu
from .cuda import Cuda
from .neuron import Neuron
from .neuron_xla import NeuronXla

__all__ = ["Device", "confinable", "nearest", "planned"]

KINDS: dict[str, type[Cpu] | type[Cuda] | type[Neuron] | type[NeuronXla]] = {
    device.kind: device for device in (Cpu, Cuda, Neuron, NeuronXla)
}


def planned(kind: str) -> Device:
    """This rank's device, number LOCAL_RANK of its node, of the kind that the plan says (`fleet.stack`); not yet started.

    Raises:
        RunError: the node has no such device, its driver is missing, or this torch can't use it. Nothing else is opened instead.
    """
    if kind not in KINDS:
        raise RunError(
            f"no rank can compute on {kind} yet", where="fleet.stack", why=f"the devices are {', '.join(KINDS)}", next="make plan"
        )
    idle = hardware.local_accelerators() if kind == Cpu.kind and index() == 0 else 0
    if idle:
        print(f"{idle} accelerators of this node stay idle: fleet.stack is cpu, so ranks compute on CPUs", flush=True)
    return KINDS[kind](index())


def nearest() -> Device:
    """The fastest device that this process finds, started: for one that looks at a model, and was not planned to run anywhere."""
    device = Cuda(index()) if Cuda.found() else Cpu()
    device.start()
    return device


def confinable() -> bool:
    """Starts the nearest device; whether it computes behind the wall of sandbox.py. A GPU's driver opens devices and sockets."""
    return isinstance(nearest(), Cpu)


def index() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
