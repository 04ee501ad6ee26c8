"""The config as frozen dataclasses, a field per key: the only definition of a key.

They make schema/config.schema.json and schema/README.md (reference.py), the checks and defaults of
a file (schema.py), and its conversion (`load`, once, at the edge). After `load` each value that
training needs is set (derive.py reports the derived ones).
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
    """All of a config."""

    name: Annotated[str, Key(pattern=NAME, examples=["first-run"])]
    """The run's name. Its folder is runs/<name>; running the same name again resumes it."""
    fleet: Fleet
    """The machines."""
    data: Data
    """The text and how it becomes tokens."""
    model: Model
    """The network. A preset sets every dimension; a dimension given here overrides it."""
    train: Train
    """The training run."""
    checkpoint: Checkpoint
    """Saving the run's state. A save runs beside training, one at a time; the last step is always
    saved."""
    budget: BudgetConfig
    """What the run may cost."""

    @property
    def fleet_name(self) -> str:
        """Returns the name of the config that made these machines: everything in an account has it
        as a tag.
        """
        return self.fleet.aws.share_fleet_of or self.name

    @property
    def world_size(self) -> int:
        return self.fleet.nodes * self.fleet.ranks_per_node

    @property
    def data_parallel(self) -> int:
        """Ranks that see different sequences: the world over the degrees that share one."""
        layout = self.train.parallelism
        return self.world_size // (layout.tensor * layout.pipeline * layout.context)

    @property
    def degrees(self) -> dict[str, int]:
        """The layout as results.json and checkpoints tell it."""
        layout = self.train.parallelism
        return {
            "dp": self.data_parallel,
            "fsdp": layout.fsdp,
            "tp": layout.tensor,
            "pp": layout.pipeline,
            "cp": layout.context,
        }


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by their dotted keys: `train.steps`."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
