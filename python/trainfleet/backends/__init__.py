"""The backends: where a job can run. Nothing outside this folder and launch/ asks which one it has,
or what that can do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module

from ..config import BackendTerms, Config
from ..config.owned_machines import untold
from ..hardware import node_types
from ..process import plugins
from ..trust.errors import BackendError
from .base import Backend, Can

__all__ = ["BACKENDS", "Backend", "backend_of", "terms_of", "terms_to_examine"]

OURS = {
    "local": "Local",
    "ssh": "Ssh",
    "ec2": "Ec2",
    "slurm": "Slurm",
    "batch": "Batch",
    "sagemaker": "SageMaker",
}


class Backends(Mapping[str, type[Backend]]):
    """The class of each backend by its name: ours, and those that installed packages add
    (process/plugins.py).

    One is loaded when it is asked for: all together take 0.06 s.
    """

    def __getitem__(self, name: str) -> type[Backend]:
        if name in OURS:
            found: object = getattr(import_module(f".{name}", __name__), OURS[name])
        elif (found := plugins.offered(plugins.OF_BACKENDS, name)) is None:
            raise KeyError(name)
        if (
            not isinstance(found, type)
            or Backend not in found.__mro__
            or getattr(found, "name", "") != name
        ):
            why = f"it must be a class of trainfleet.backends.base.Backend whose name is {name!r}"
        elif missing := sorted(
            {*Backend.__annotations__} - {*dir(found)} | vars(found)["__abstractmethods__"]
        ):
            why = f"it lacks {', '.join(missing)}"
        else:
            return found
        raise BackendError(
            "is not a backend",
            where=f"{plugins.OF_BACKENDS}: {name}",
            why=why,
            next="mend that package",
        )

    def __iter__(self) -> Iterator[str]:
        yield from OURS
        yield from plugins.names(plugins.OF_BACKENDS)

    def __len__(self) -> int:
        return sum(1 for _ in self)


BACKENDS = Backends()


@functools.cache
def backend_of(config: Config) -> Backend:
    """The backend that the config names, made once: it keeps its connections."""
    return BACKENDS[config.fleet.backend](config)


def terms_of(name: str) -> BackendTerms:
    """The rules that the backend of that name adds to a config's."""
    return replace(terms_to_examine(name), refuse=_refuse)


def terms_to_examine(name: str) -> BackendTerms:
    """The same for `make doctor`, which finds out what nodes are that nobody has told of."""
    here = BACKENDS[name].is_here
    return BackendTerms(_node_here if here else _node_elsewhere, _refuse_known, here)


def is_guest(config: Config) -> bool:
    """Whether the machines are another config's, which alone makes, changes and removes them."""
    return config.fleet_name != config.name and Can.MACHINES in BACKENDS[config.fleet.backend].can


def shared(config: Config) -> Config:
    """The config for runs of other names, on the machines that are made for this one."""
    from .supported_keys import honours

    if not honours(config, "fleet.aws.name"):
        return config
    return replace(
        config, fleet=replace(config.fleet, aws=replace(config.fleet.aws, name=config.fleet_name))
    )


def _node_here(row: node_types.NodeType | None, nodes: int) -> node_types.Node:
    """A node that this machine plays: its share of what that machine has."""
    if row is None or not row.owned:
        return node_types.node(row, nodes)
    return node_types.Node(
        max(1, row.accelerators // nodes),
        f"{row.name} over {nodes} nodes",
        node_types.stack_of(row),
    )


def _node_elsewhere(row: node_types.NodeType | None, nodes: int) -> node_types.Node:
    if row is None:
        what = "a host of no known kind runs one, on its cores"
        return node_types.Node(
            1,
            f"{what}; fleet.instance_type or fleet.accelerator says more, which make doctor finds",
        )
    return node_types.node(row, nodes)


def _refuse(config: Config) -> Iterator[tuple[str, str]]:
    """What the config's backend does not take, what it asks for that the backend can't, and nodes
    that nobody has told of.
    """
    fleet = config.fleet
    if (
        not fleet.is_told
        and fleet.device != "cpu"
        and BACKENDS[fleet.backend].owned
        and not fleet.slurm.create
    ):
        yield untold(fleet)
    yield from _refuse_known(config)


def _refuse_known(config: Config) -> Iterator[tuple[str, str]]:
    """The same, but for what the nodes are."""
    backend, own = BACKENDS[config.fleet.backend], config.fleet.accelerator
    yield from backend.refuse(config)
    if config.fleet.options and backend.name in OURS and not backend.is_here:
        what = f"the {backend.name} backend has keys of its own; leave it out"
        yield "fleet.options", f"{config.fleet.options[0]}: {what}"
    yield from _refuse_arm(config)
    if own and own.usd_per_hour is not None and not (backend.owned or backend.is_here):
        counts = f"AWS's own prices count on the {backend.name} backend"
        yield "fleet.accelerator.usd_per_hour", f"{own.usd_per_hour:g}: {counts}; leave it out"
    if config.fleet.slow == "replace" and Can.LEAVE_OUT not in backend.can:
        # of others, one may not load
        able = ", ".join(name for name in OURS if Can.LEAVE_OUT in BACKENDS[name].can)
        yield (
            "fleet.slow",
            f"replace: the {backend.name} backend can't leave a host out; warn works, or one of: "
            f"{able}",
        )


def _refuse_arm(config: Config) -> Iterator[tuple[str, str]]:
    """What is made here for x86-64 alone, of nodes with ARM's processors (GB200, GH200)."""
    fleet, kind, backend = config.fleet, config.fleet.node_type, BACKENDS[config.fleet.backend]
    if kind is None or kind.accelerator is None or not kind.accelerator.arm:
        return
    why = (
        f"the processors of {kind.accelerator.label} are ARM's, and what is built here is for "
        "x86-64"
    )
    if fleet.image != "none":
        yield (
            "fleet.image",
            f"{fleet.image}: {why}; none works, with a Python of yours (fleet.python)",
        )
    elif fleet.python is None and (fleet.hosts or (backend.owned and Can.EXAMINE in backend.can)):
        yield "fleet.python", f"null: {why}; the path of a Python there that has torch works"
