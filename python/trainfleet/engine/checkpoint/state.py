"""Saving a run's state and taking it up again, by all ranks together."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_bytes
from torch.distributed.checkpoint.state_dict_saver import save as save_bytes

from ...config.types import Train
from ...errors import RunError
from ...runs import Run, unwritable
from ..world import World
from . import commit as commits
from .commit import Commit, Identity


@dataclass
class Progress:
    """Where training stands: steps, samples and tokens done, and the seconds that they took, over all attempts."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    seconds_trained: float = 0.0

    def advance(self, train: Train) -> None:
        """Counts one step."""
        self.step += 1
        self.samples += train.global_batch
        self.tokens += train.global_batch * train.sequence_length


class Checkpoints:
    """The checkpoints of one run: each holds model, optimizer, every rank's RNG and the progress."""

    def __init__(self, run: Run, world: World, identity: Identity, keep: int) -> None:
        self.run, self.world, self.identity, self.keep = run, world, identity, keep

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> Path:
        """Commits the state as the checkpoint of `progress.step`, then lets go of the oldest; all ranks call it.

        Each rank writes its part, replicated tensors being shared out among the ranks that hold them.
        """
        hidden = self.run.checkpoints / f".{self.run.checkpoint(progress.step).name}"
        if self.world.first:
            commits.begin(self.run, progress.step)
        self.world.wait()
        try:
            save_bytes(self._state(model, optimizer, self.world.size), checkpoint_id=hidden)  # syncs its files
        except OSError as error:
            raise unwritable(hidden, error) from error
        if self.world.first:
            commits.commit(self.run, hidden, self._commit(progress, commits.sizes(hidden)))
            commits.retain(self.run, self.keep)
        return self.run.checkpoint(progress.step)

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
        """Loads the newest committed checkpoint, if there is one; where training stands then.

        Raises:
            RunError: it is damaged, or of another dataset, model or batch than the config asks for.
        """
        folder = commits.newest(self.run)
        if folder is None:
            return Progress()
        found = commits.read_commit(folder)
        commits.check_same(found.identity, self.identity, folder)
        state = self._state(model, optimizer, found.world_size)
        try:
            load_bytes(state, checkpoint_id=folder)
        except (OSError, RuntimeError, ValueError) as error:
            raise RunError(
                "can't be read",
                where=str(folder),
                why=str(error),
                next=f"go on from the checkpoint before it: rm -r {folder}, then make train",
            ) from error
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        if "random" in state:
            torch.set_rng_state(state["random"][str(self.world.rank)])
        return Progress(found.step, found.samples, found.tokens, found.seconds_trained)

    def _state(self, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: int) -> dict[str, Any]:
        """What a checkpoint by `ranks` ranks holds. Random states are of ranks, so only as many ranks can go on with them."""
        state: dict[str, Any] = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        if ranks == self.world.size:
            state["random"] = {str(self.world.rank): torch.get_rng_state()}
        return state

    def _commit(self, progress: Progress, files: dict[str, int]) -> Commit:
        return Commit(
            progress.step, progress.samples, progress.tokens, progress.seconds_trained,
            self.world.size, self.identity, torch.__version__, files,
        )  # fmt: skip


def load_model(folder: Path, model: nn.Module) -> Commit:
    """Fills a model's weights from a checkpoint, in this process alone; the checkpoint's marker comes back."""
    found = commits.read_commit(folder)
    weights: dict[str, Tensor] = model.state_dict()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is wanted here
        load_bytes({"model": weights}, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(weights)
    return found
