"""The config as frozen dataclasses, with one field per key.

These dataclasses are the only definition of the keys. They generate schema/config.schema.json and
schema/README.md (reference.py), and provide the checks and defaults for config files (schema.py).
`load` converts a file to a Config once, at the edge of the program. Its result has a value for
every key that training needs.
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
    "Refusals",
    "Rows",
    "SageMakerConfig",
    "SlurmConfig",
    "Source",
    "SshConfig",
    "Train",
    "Values",
    "flat",
]


Values = dict[str, Any]  # a config that is not yet complete
Rows = Iterator[tuple[str, Any, str]]  # key within its group, value, and the reason
Refusals = Iterator[tuple[str, str]]  # key and message of each setting that a rule rejects


@dataclass(frozen=True)
class Config:
    """Complete config."""

    name: Annotated[str, Key(pattern=NAME, examples=["first-run"])]
    """Run name, used as the folder runs/<name>. Launching a run with an existing name resumes that
    run."""
    fleet: Fleet
    """Backend, nodes, accelerators and storage."""
    data: Data
    """Training text and its tokenization."""
    model: Model
    """Model shape. A preset sets every dimension, and dimensions set here override it."""
    train: Train
    """Training settings."""
    checkpoint: Checkpoint
    """Checkpoint settings. Checkpoints are saved in the background, one at a time. The last step is
    always saved."""
    budget: BudgetConfig
    """Cost limit of the run."""
    watch: Annotated[
        tuple[str, ...],
        Key(maxItems=16, uniqueItems=True, items={"minLength": 1, "maxLength": 1024}),
    ] = ()
    """Folders whose runs `make watch` shows in addition to those in runs/. Each entry contains run
    folders, such as ../other/runs or s3://bucket/prefix/runs."""

    @property
    def fleet_name(self) -> str:
        """Returns the name of the config that created the machines.

        All of the fleet's AWS resources are tagged with this name.
        """
        return self.fleet.aws.share_fleet_of or self.name

    @property
    def world_size(self) -> int:
        return self.fleet.nodes * self.fleet.ranks_per_node

    @property
    def step_tokens(self) -> int:
        """Returns the number of tokens in a global batch."""
        return self.train.global_batch_size * self.train.sequence_length

    @property
    def data_parallel(self) -> int:
        """Returns the number of ranks that train on different sequences.

        It is the world size divided by the product of the other degrees.
        """
        layout = self.train.parallelism
        return self.world_size // (layout.tensor * layout.pipeline * layout.context)

    @property
    def degrees(self) -> dict[str, int]:
        """Returns the parallelism degrees as recorded in results.json and checkpoints."""
        layout = self.train.parallelism
        return {
            "dp": self.data_parallel,
            "fsdp": layout.fsdp,
            "tp": layout.tensor,
            "pp": layout.pipeline,
            "cp": layout.context,
        }


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields all values of a nested dict with their dotted keys, such as `train.steps`."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
