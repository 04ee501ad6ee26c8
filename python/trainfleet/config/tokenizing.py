"""Selects the machines that tokenize a dataset, data.tokenize_instance_type or the fleet's, and
checks whether it can be made of conversations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..hardware import node_types
from .families import FAMILIES
from .types import Config
from .vocabulary import TRAINED


def tokenizing(config: Config) -> Config:
    """Returns the config of a tokenize job.

    If data.tokenize_instance_type is set, the job runs on one on-demand machine of that type.
    Memory, licences, image and reservation are reset, because they are for the training machines.
    Otherwise the config is returned unchanged.
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
    """Returns the allowed values of data.tokenize_instance_type.

    These instance types have x86 processors, which the images need, and neither accelerators nor
    EFA.
    """
    return [
        row.name for row in node_types.INSTANCE_TYPES.values() if row.kind == "cpu" and not row.efa
    ]


def refuse(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the key and message if data.tokenize_instance_type is not an allowed value, or if the
    config can't train on conversations.
    """
    if config.data.conversations and config.data.tokenizer == TRAINED:
        yield (
            "data.conversations",
            f"true: data.tokenizer {TRAINED} has no chat template; use a chat model's folder",
        )
    if config.data.conversations and not FAMILIES[config.model.family].causal:
        yield "data.conversations", f"true: {config.model.family} models can't answer; use false"
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
