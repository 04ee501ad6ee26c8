"""The machines on which a dataset is tokenized: data.tokenize_instance_type's, where it is set, in
the place of the fleet's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..hardware import node_types
from .types import Config


def tokenizing(config: Config) -> Config:
    """The config as its tokenize job has it: one machine of data.tokenize_instance_type, bought on
    demand; without that key, as it is.

    What the config says of the training machines' memory, licences, image and reservation is not
    said of this one.
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
    """The types that data.tokenize_instance_type takes: of x86 processors, as the images are,
    without accelerators and EFA.
    """
    return [
        row.name for row in node_types.INSTANCE_TYPES.values() if row.kind == "cpu" and not row.efa
    ]


def refuse(config: Config) -> Iterator[tuple[str, str]]:
    """A type on which the images do not run, or whose devices would be paid for unused: (key,
    message).
    """
    name = config.data.tokenize_instance_type
    if name is not None and name not in (works := fitting()):
        row = node_types.instance(name)
        why = (
            "tokenizing has no use for its accelerators or its EFA"
            if row
            else "it is not in the table of instance types"
        )
        yield (
            "data.tokenize_instance_type",
            f"{name!r}: {why}; {', '.join(works)} works, or null for the fleet's own machines",
        )
