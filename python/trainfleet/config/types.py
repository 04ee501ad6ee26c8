"""The config as frozen dataclasses with a field per key. This is the only definition of a key.

These dataclasses generate schema/config.schema.json and schema/README.md (reference.py). They also
define the checks and defaults of a file (schema.py) and its conversion (`load`, once, at the edge).
After `load`, each value that training needs is set (derive.py reports the derived values).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from .key import NAME, Key
from .types_backends import Aws, BatchConfig, ParallelCluster, Queue, SageMakerConfig, SlurmConfig
from .types_fleet import Devices, Fleet, Fsx, SshConfig
from .types_train import BudgetConfig, Checkpoint, Data, Layout, Model, Source, Train

__all__ = [
    "Aws",
    "BatchConfig",
    "BudgetConfig",
    "Checkpoint",
    "Config",
    "Data",
    "Devices",
    "Fleet",
    "Fsx",
    "Layout",
    "Model",
    "ParallelCluster",
    "Queue",
    "SageMakerConfig",
    "SlurmConfig",
    "Source",
    "SshConfig",
    "Train",
    "flat",
]


@dataclass(frozen=True)
class Config:
    """A complete config."""

    name: Annotated[str, Key(pattern=NAME, examples=["first-run"])]
    """The run's name. Its folder is runs/<name>; running the same name again resumes it."""
    fleet: Fleet
    """The machines."""
    data: Data
    """The text and its tokenization."""
    model: Model
    """The model. A preset sets every dimension; a dimension set here overrides it."""
    train: Train
    """The training run."""
    checkpoint: Checkpoint
    """Saving of the run's state. Saves run in the background, one at a time; the last step is
    always saved."""
    budget: BudgetConfig
    """The cost limit of the run."""

    @property
    def fleet_name(self) -> str:
        """Returns the name of the config that made these machines. Every AWS resource of the fleet
        is tagged with it.
        """
        return self.fleet.aws.share_fleet_of or self.name

    @property
    def world_size(self) -> int:
        return self.fleet.nodes * self.fleet.ranks_per_node

    @property
    def data_parallel(self) -> int:
        """Returns the number of ranks that train on different sequences: the world size over the
        product of the other degrees.
        """
        layout = self.train.parallelism
        return self.world_size // (layout.tensor * layout.pipeline * layout.context)

    @property
    def degrees(self) -> dict[str, int]:
        """Returns the layout as recorded in results.json and checkpoints."""
        layout = self.train.parallelism
        return {
            "dp": self.data_parallel,
            "fsdp": layout.fsdp,
            "tp": layout.tensor,
            "pp": layout.pipeline,
            "cp": layout.context,
        }


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields nested values with their dotted keys, such as `train.steps`."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
