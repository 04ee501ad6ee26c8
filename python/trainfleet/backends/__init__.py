"""Backends that run jobs. Only this package and launch/ know which backend a config uses and what
it supports.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from operator import attrgetter

from ..config import BackendTerms, Config, Refusals
from ..config.owned_machines import untold
from ..hardware import node_types
from ..process import install_paths
from ..trust.errors import BackendError
from .base import Backend, Can

__all__ = ["BACKENDS", "Backend", "backend_of", "terms_of", "terms_to_examine"]

LIMITS = ("fleet.max_lifetime_hours", "fleet.batch.timeout_hours", "fleet.sagemaker.max_hours")
OURS = {
    "local": "Local",
    "ssh": "Ssh",
    "ec2": "Ec2",
    "slurm": "Slurm",
    "batch": "Batch",
    "sagemaker": "SageMaker",
}


class Backends(Mapping[str, type[Backend]]):
    """Maps backend names to classes, including backends from installed packages
    (process/install_paths.py).

    Each class is imported on first access, because importing all of them takes 0.06 s.
    """

    def __getitem__(self, name: str) -> type[Backend]:
        if name in OURS:
            found: object = getattr(import_module(f".{name}", __name__), OURS[name])
        elif (found := install_paths.offered(install_paths.OF_BACKENDS, name)) is None:
            raise KeyError(name)
        if (
            not isinstance(found, type)
            or Backend not in found.__mro__
            or getattr(found, "name", "") != name
        ):
            why = (
                f"it must be a subclass of trainfleet.backends.base.Backend with the name {name!r}"
            )
        elif missing := sorted(
            {*Backend.__annotations__} - {*dir(found)} | vars(found)["__abstractmethods__"]
        ):
            why = f"it does not define {', '.join(missing)}"
        else:
            return found
        raise BackendError(
            "is not a backend",
            where=f"{install_paths.OF_BACKENDS}: {name}",
            why=why,
            next="fix or uninstall that package",
        )

    def __iter__(self) -> Iterator[str]:
        yield from OURS
        yield from install_paths.names_offered(install_paths.OF_BACKENDS)

    def __len__(self) -> int:
        return sum(1 for _ in self)


BACKENDS = Backends()


@functools.cache
def backend_of(config: Config) -> Backend:
    """Returns the config's backend.

    The instance is cached, because it holds open connections.
    """
    return BACKENDS[config.fleet.backend](config)


def terms_of(name: str) -> BackendTerms:
    """Returns the backend's config validation rules."""
    return replace(terms_to_examine(name), refuse=_refuse)


def terms_to_examine(name: str) -> BackendTerms:
    """Returns the validation rules that allow unknown accelerators.

    `make doctor` uses these rules, because it detects the accelerators.
    """
    here = BACKENDS[name].is_here
    return BackendTerms(_node_here if here else _node_elsewhere, _refuse_known, here)


def time_limits(config: Config) -> Iterator[tuple[str, float]]:
    """Yields the keys that limit how long the backend lets machines or jobs run, with their hours.
    Slurm is not included, because its jobs continue in the next allocation.
    """
    from .supported_keys import honours

    for key in LIMITS:
        if honours(config, key) and (hours := attrgetter(key)(config)):
            yield key, hours


def is_guest(config: Config) -> bool:
    """Returns whether this config uses machines that another config owns.

    Only the owning config creates, changes and removes the machines.
    """
    return config.fleet_name != config.name and Can.MACHINES in BACKENDS[config.fleet.backend].can


def shared(config: Config) -> Config:
    """Returns a copy of a config that can be renamed and still uses the same machines."""
    from .supported_keys import honours

    if not honours(config, "fleet.aws.share_fleet_of"):
        return config
    return replace(
        config,
        fleet=replace(
            config.fleet, aws=replace(config.fleet.aws, share_fleet_of=config.fleet_name)
        ),
    )


def _node_here(row: node_types.NodeType | None, nodes: int) -> node_types.Node:
    """Returns the local backend's simulated node, with an equal share of this machine's
    accelerators.
    """
    if row is None or not row.owned:
        return node_types.node(row, nodes)
    return node_types.Node(
        max(1, row.accelerators // nodes),
        f"{row.name}, split across {nodes} nodes",
        node_types.platform_of(row),
    )


def _node_elsewhere(row: node_types.NodeType | None, nodes: int) -> node_types.Node:
    if row is None:
        what = "the hosts' accelerators are unknown, so each host runs one CPU rank"
        return node_types.Node(
            1,
            f"{what}; set fleet.instance_type or fleet.accelerator (make doctor detects it)",
        )
    return node_types.node(row, nodes)


def _refuse(config: Config) -> Refusals:
    """Yields an error for each setting that the backend rejects, and one if the nodes' accelerators
    are unknown.
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


def _refuse_known(config: Config) -> Refusals:
    """Yields the same errors as `_refuse`, except for unknown accelerators."""
    backend, own = BACKENDS[config.fleet.backend], config.fleet.accelerator
    yield from backend.refuse(config)
    if config.fleet.options and backend.name in OURS and not backend.is_here:
        what = f"the {backend.name} backend does not use it; remove it"
        yield "fleet.options", f"{config.fleet.options[0]}: {what}"
    yield from _refuse_arm(config)
    if own and own.usd_per_hour is not None and not (backend.owned or backend.is_here):
        counts = f"the {backend.name} backend uses AWS prices"
        yield "fleet.accelerator.usd_per_hour", f"{own.usd_per_hour:g}: {counts}; remove it"
    if config.fleet.on_slow_node == "replace" and Can.LEAVE_OUT not in backend.can:
        # list only built-in backends, because importing a third-party one can fail
        able = ", ".join(name for name in OURS if Can.LEAVE_OUT in BACKENDS[name].can)
        yield (
            "fleet.on_slow_node",
            f"replace: the {backend.name} backend can't exclude hosts; set warn, or use one of "
            f"these backends: {able}",
        )


def _refuse_arm(config: Config) -> Refusals:
    """Yields an error for each setting that requires x86-64 builds, if the nodes have ARM CPUs.

    This applies to GB200 and GH200 nodes.
    """
    fleet, kind, backend = config.fleet, config.fleet.node_type, BACKENDS[config.fleet.backend]
    if kind is None or kind.accelerator is None or not kind.accelerator.arm:
        return
    why = f"{kind.accelerator.label} nodes have ARM CPUs, but trainfleet's builds are for x86-64"
    if fleet.container != "none":
        yield (
            "fleet.container",
            f"{fleet.container}: {why}; set none, and set fleet.python to your own Python",
        )
    elif fleet.python is None and (fleet.hosts or (backend.owned and Can.EXAMINE in backend.can)):
        yield "fleet.python", f"null: {why}; set the path of a Python with torch on the nodes"
