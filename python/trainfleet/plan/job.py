"""A job: what every backend carries. Tokenizing and training are both jobs, so both run wherever a backend runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .. import runs
from ..config import Config


@dataclass(frozen=True)
class Job:
    """`module arguments` on every rank of every node. What they print goes to logs/ in `folder`, the run's or the dataset's."""

    kind: str  # tokenize or train
    name: str
    folder: Path
    nodes: int
    ranks_per_node: int
    module: str
    arguments: tuple[str, ...]
    torchrun: bool  # whether ranks meet through torchrun, or one plain process a node does its share
    port: int | None = None
    environment: dict[str, str] = field(default_factory=dict)


def tokenize_job(config: Config) -> Job:
    """Turns the sources into data/<name>: unit i is the work of node i mod N, one process a core."""
    folder = runs.DATA / config.data.name
    return Job(
        "tokenize",
        config.data.name,
        folder,
        config.fleet.nodes,
        1,
        "trainfleet.data",
        (str(runs.run_of(config.name).config),),
        False,
    )


def train_job(config: Config) -> Job:
    """Trains in runs/<name>, from its newest checkpoint if there is one."""
    run = runs.run_of(config.name)
    fleet = config.fleet
    arguments = (str(run.folder),)
    return Job(
        "train", config.name, run.folder, fleet.nodes, fleet.ranks_per_node, "trainfleet.engine", arguments, True, fleet.port
    )
