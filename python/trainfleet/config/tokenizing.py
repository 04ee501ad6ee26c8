"""Chooses the machines that tokenize a dataset: data.tokenize_instance_type if it is set, otherwise
the fleet's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..hardware import node_types
from .types import Config


def tokenizing(config: Config) -> Config:
    """Returns the config of a tokenize job: one on-demand machine of data.tokenize_instance_type,
    or the config unchanged without that key.

    The memory, licences, image and reservation in the config are for the training machines, so they
    are reset.
    """
    if config.data.tokenize_instance_type is None:
        return config
    aws = replace(config.fleet.aws, capacity="on-demand", reservation=None, ami=None)
    batch = replace(config.fleet.batch, shared_memory_gib=None, consumable_resources=())
    fleet = replace(
        config.fleet,
        instance_type=config.data.tokenize_instance_type,
        nodes=1,
        spot=False,
        aws=aws,
        batch=batch,
    )
    return replace(config, fleet=fleet)


def fitting() -> list[str]:
    """Returns the allowed values of data.tokenize_instance_type: types with x86 processors, which
    the images need, and without accelerators or EFA.
    """
    return [
        row.name for row in node_types.INSTANCE_TYPES.values() if row.kind == "cpu" and not row.efa
    ]


def refuse(config: Config) -> Iterator[tuple[str, str]]:
    """Refuses a type that can't run the images, or with devices that tokenizing would not use.
    Yields (key, message).
    """
    name = config.data.tokenize_instance_type
    if name is not None and name not in (works := fitting()):
        row = node_types.instance(name)
        why = (
            "tokenizing does not use its accelerators or EFA"
            if row
            else "it is not in the table of instance types"
        )
        yield (
            "data.tokenize_instance_type",
            f"{name!r}: {why}; use one of {', '.join(works)}, or null for the fleet's machines",
        )
