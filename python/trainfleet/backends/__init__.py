"""The backends: where a job can run. Nothing outside this folder and launch/ asks which one it has, or what that can do."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

from .. import hardware
from ..config import Config, Terms
from ..config.owned import untold
from .base import Backend, Can

if TYPE_CHECKING:
    from .batch import Batch
    from .local import Local
    from .sagemaker import SageMaker
    from .slurm import Slurm
    from .ssh import Ssh

__all__ = ["BACKENDS", "Backend", "backend_of", "terms_of", "terms_to_examine"]

CLASSES = {"local": "Local", "ssh": "Ssh", "ec2": "Ec2", "slurm": "Slurm", "batch": "Batch", "sagemaker": "SageMaker"}


OWNED = ("ssh", "slurm")  # that run on machines of which only their owner can tell


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


def terms_of(name: str) -> Terms:
    """The rules that the backend of that name adds to a config's."""
    return replace(terms_to_examine(name), refuse=_refuse)


def terms_to_examine(name: str) -> Terms:
    """The same for `make doctor`, which finds out what nodes are that nobody has told of."""
    here = BACKENDS[name].is_here
    return Terms(_node_here if here else _node_elsewhere, _refuse_known, here)


def is_guest(config: Config) -> bool:
    """Whether the machines are another config's, which alone makes, changes and removes them."""
    return config.fleet_name != config.name and Can.MACHINES in BACKENDS[config.fleet.backend].can


def shared(config: Config) -> Config:
    """The config for runs of other names, on the machines that are made for this one."""
    from .honoured import honours

    if not honours(config, "fleet.aws.name"):
        return config
    return replace(config, fleet=replace(config.fleet, aws=replace(config.fleet.aws, name=config.fleet_name)))


def _node_here(row: hardware.NodeType | None, nodes: int) -> hardware.Node:
    """A node that this machine plays: its share of what that machine has."""
    if row is None or not row.owned:
        return hardware.node(row, nodes)
    return hardware.Node(max(1, row.accelerators // nodes), f"{row.name} over {nodes} nodes", hardware.stack_of(row))


def _node_elsewhere(row: hardware.NodeType | None, nodes: int) -> hardware.Node:
    if row is None:
        what = "a host of no known kind runs one, on its cores"
        return hardware.Node(1, f"{what}; fleet.instance_type or fleet.accelerator says more, which make doctor finds")
    return hardware.node(row, nodes)


def _refuse(config: Config) -> Iterator[tuple[str, str]]:
    """What the config's backend does not take, what it asks for that the backend can't, and nodes that nobody has told of."""
    fleet = config.fleet
    if not fleet.is_told and fleet.device != "cpu" and fleet.backend in OWNED and not fleet.slurm.create:
        yield untold(fleet)
    yield from _refuse_known(config)


def _refuse_known(config: Config) -> Iterator[tuple[str, str]]:
    """The same, but for what the nodes are."""
    backend, own = BACKENDS[config.fleet.backend], config.fleet.accelerator
    yield from backend.refuse(config)
    yield from _refuse_arm(config)
    if own and own.usd_per_hour is not None and not (backend.name in OWNED or backend.is_here):
        counts = f"AWS's own prices count on the {backend.name} backend"
        yield "fleet.accelerator.usd_per_hour", f"{own.usd_per_hour:g}: {counts}; leave it out"
    if config.fleet.slow == "replace" and Can.LEAVE_OUT not in backend.can:
        able = ", ".join(name for name, other in BACKENDS.items() if Can.LEAVE_OUT in other.can)
        yield "fleet.slow", f"replace: the {backend.name} backend can't leave a host out; warn works, or one of: {able}"


def _refuse_arm(config: Config) -> Iterator[tuple[str, str]]:
    """What is made here for x86-64 alone, of nodes with ARM's processors (GB200, GH200)."""
    fleet, kind = config.fleet, config.fleet.node_type
    if kind is None or kind.accelerator is None or not kind.accelerator.arm:
        return
    why = f"the processors of {kind.accelerator.label} are ARM's, and what is built here is for x86-64"
    if fleet.image != "none":
        yield "fleet.image", f"{fleet.image}: {why}; none works, with a Python of yours (fleet.python)"
    elif fleet.python is None and (fleet.backend == "ssh" or fleet.hosts):
        yield "fleet.python", f"null: {why}; the path of a Python there that has torch works"
