"""AWS's published training speeds on Trainium, for comparison with predicted ones. Pure.

github.com/aws-neuron/aws-neuron-sdk,
about-neuron/benchmarks/trn1/training_data_{decoder,encoder}.csv, page of 2026-02-19 and its
history: the newest row of each model. AWS has never published any for Trn2 or Trn3.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..config import Config
from ..config.tables import read_table
from ..hardware import node_types

MEASURED = "trn1.32xlarge"


@dataclass(frozen=True)
class PublishedSpeed:
    """Sequences per second of a model on `nodes` MEASURED nodes. `sdk` is the Neuron version that
    reached it.
    """

    preset: str
    nodes: int
    length: int
    sequences: float
    layout: str
    sdk: str


ROWS = tuple(
    PublishedSpeed(**row) for row in read_table(Path(__file__).with_name("published.yaml"))
)


def beside(config: Config) -> str:
    """Returns AWS's speed per node for this model on this type of node; "" if the nodes are not
    Trainium's.
    """
    row = config.fleet.node_type
    if row is None or row.accelerator is None or row.accelerator.kind != "neuron":
        return ""
    family = row.family
    if row.accelerator != node_types.INSTANCE_TYPES[MEASURED].accelerator:
        return f"AWS has published no training speed of {family}"
    same = [
        one
        for one in ROWS
        if one.preset == config.model.preset and one.length == config.train.sequence_length
    ]
    if not same:
        return (
            f"AWS has published no speed of this model on {family} with "
            f"{config.train.sequence_length:,} tokens per sequence"
        )
    near = min(same, key=lambda one: abs(one.nodes - config.fleet.nodes))
    speed = near.sequences * near.length / near.nodes
    nodes = f"{near.nodes} nodes" if near.nodes > 1 else "one node"
    return (
        f"AWS: {speed:,.0f} tokens/s per node, on {nodes} of {MEASURED} ({near.layout}; Neuron "
        f"{near.sdk})"
    )
