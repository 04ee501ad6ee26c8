"""The backends: where a job can run. Nothing outside this folder and launch/ asks which one it has, or what that can do."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from .. import hardware
from ..config import Config, Terms
from .base import Backend, Can
from .batch import Batch
from .ec2 import Ec2
from .local import Local
from .sagemaker import SageMaker
from .slurm import Slurm
from .ssh import Ssh

__all__ = ["BACKENDS", "Backend", "backend_of", "lingers", "terms_of"]

BACKENDS: dict[str, type[Local | Ssh | Slurm | Batch | SageMaker]] = {
    backend.name: backend for backend in (Local, Ssh, Ec2, Slurm, Batch, SageMaker)
}


@functools.cache
def backend_of(config: Config) -> Backend:
    """The backend that the config names, made once: it keeps its connections."""
    return BACKENDS[config.fleet.backend](config)


def lingers(config: Config) -> float:
    """Hours for which nodes are paid after a launch has ended: ec2's stop themselves after fleet.idle_minutes."""
    if config.fleet.backend != Ec2.name:
        return 0.0
    return math.inf if config.fleet.idle_minutes is None else config.fleet.idle_minutes / 60


def terms_of(name: str) -> Terms:
    """The rules that the backend of that name adds to a config's."""
    return Terms(hardware.node if BACKENDS[name].is_here else _node_elsewhere, _refuse)


def _node_elsewhere(instance_type: str | None, nodes: int) -> hardware.Node:
    if instance_type is None:
        return hardware.Node(1, "a host of no known type runs one; fleet.instance_type says more")
    return hardware.node(instance_type, nodes)


def _refuse(config: Config) -> Iterator[tuple[str, str]]:
    """What the config's backend does not take, and what it asks for that the backend can't."""
    backend = BACKENDS[config.fleet.backend]
    yield from backend.refuse(config)
    if config.fleet.slow == "replace" and Can.LEAVE_OUT not in backend.can:
        able = ", ".join(name for name, other in BACKENDS.items() if Can.LEAVE_OUT in other.can)
        yield "fleet.slow", f"replace: the {backend.name} backend can't leave a host out; warn works, or one of: {able}"
