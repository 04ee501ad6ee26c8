"""The backends: where a job can run. Nothing outside this folder and launch/ asks which one it has, or what that can do."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from .. import hardware
from ..config import Config, Terms
from .base import Backend, Can

if TYPE_CHECKING:
    from .batch import Batch
    from .local import Local
    from .sagemaker import SageMaker
    from .slurm import Slurm
    from .ssh import Ssh

__all__ = ["BACKENDS", "Backend", "backend_of", "lingers", "terms_of"]

CLASSES = {"local": "Local", "ssh": "Ssh", "ec2": "Ec2", "slurm": "Slurm", "batch": "Batch", "sagemaker": "SageMaker"}


class Backends(Mapping[str, "type[Local | Ssh | Slurm | Batch | SageMaker]"]):
    """The class of each backend by its name. One is loaded when it is asked for: all together take 0.06 s."""

    def __getitem__(self, name: str) -> type[Local | Ssh | Slurm | Batch | SageMaker]:
        kind = CLASSES[name]
        found: type[Local | Ssh | Slurm | Batch | SageMaker] = getattr(import_module(f".{name}", __name__), kind)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(CLASSES)

    def __len__(self) -> int:
        return len(CLASSES)


BACKENDS = Backends()


@functools.cache
def backend_of(config: Config) -> Backend:
    """The backend that the config names, made once: it keeps its connections."""
    return BACKENDS[config.fleet.backend](config)


def lingers(config: Config) -> float:
    """Hours for which nodes are paid after a launch has ended: ec2's stop themselves after fleet.idle_minutes."""
    if config.fleet.backend != "ec2":
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
