"""Refits a run to fewer nodes: the global batch and the data order stay; only the division of the
work changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from . import cross_checks
from .types import Config


def smaller(config: Config) -> Iterator[Config]:
    """The config for one node less, and so on down to fleet.min_nodes, without the numbers that no
    rule allows.
    """
    least = config.fleet.min_nodes or config.fleet.nodes
    for nodes in range(config.fleet.nodes - 1, least - 1, -1):
        candidate = refit(config, nodes)
        if not any(cross_checks.check(candidate, set(), 0)):
            yield candidate


def refit(config: Config, nodes: int) -> Config:
    """The config for `nodes` nodes; each rank accumulates more micro-batches, none larger than
    before: that one fitted.

    The state is sharded over as many ranks as before, or the most that divide those that are left.
    """
    fewer = replace(
        config,
        fleet=replace(
            config.fleet, nodes=nodes, min_nodes=min(config.fleet.min_nodes or nodes, nodes)
        ),
    )
    layout, ways = config.train.parallelism, fewer.data_parallel
    shard = max(
        (degree for degree in range(1, min(layout.fsdp, ways) + 1) if ways % degree == 0),
        default=1,
    )
    fewer = replace(fewer, train=replace(fewer.train, parallelism=replace(layout, fsdp=shard)))
    part = fewer.train.global_batch_size // fewer.data_parallel if fewer.data_parallel else 0
    fits = [size for size in range(1, config.train.micro_batch_size + 1) if part % size == 0]
    return replace(fewer, train=replace(fewer.train, micro_batch_size=fits[-1])) if fits else fewer
