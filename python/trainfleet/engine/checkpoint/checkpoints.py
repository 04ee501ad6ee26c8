"""Save and resume interface for the training loop.

Checkpoint files contain the model, the optimizer's moments and every rank's random number
generators. The marker file stores the progress. The learning rate and the next samples are derived
from the step. Optimizer settings are never saved, because they come from the config.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...checkpoints import marker
from ...checkpoints.marker import Commit, versions
from ...checkpoints.store import store_of
from ...config import Config
from ...config.types import Train
from ...run.run_folder import Run
from ...trust.errors import RunError
from ..parallel.rank_model import Parts
from ..vote import Decision
from ..world import World
from . import resuming, saving
from .checkpoint_group import Peers
from .saving import Save, Snapshot


@dataclass
class TrainingProgress:
    """Training progress over all attempts, including the state of the step guard and loss scale."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    seconds_trained: float = 0.0
    guard: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()

    def advance(self, train: Train) -> None:
        """Adds one step."""
        self.step += 1
        self.samples += train.global_batch_size
        self.tokens += train.global_batch_size * train.sequence_length


@dataclass(frozen=True)
class Saved:
    """Result of a save: committed at `address`, or failed with `error`."""

    step: int
    address: str
    seconds: float
    error: RunError | None


class Checkpoints:
    """Background saves, and resuming, for the training loop.

    Every method must be called on all ranks.
    """

    def __init__(self, run: Run, config: Config, dataset: str, world: World) -> None:
        """Sets up saving.

        `dataset` identifies the training data.
        """
        self.run = run
        self.config = config
        self.dataset = dataset
        self.world = world
        self.policy = config.checkpoint
        self.store = store_of(run, self.policy.path)
        self.peers = Peers()
        self.snapshot: Snapshot | None = None
        self.under_way: Save | None = None
        self.failed: RunError | None = None  # error of the last save
        self.done: list[Saved] = []
        self.began = time.monotonic()  # start of the last save, or of this attempt
        self.asked = False  # whether checkpoint.every_seconds has already triggered a save

    @property
    def stops(self) -> bool:
        """Returns whether a failed save ends the run."""
        return self.policy.on_failure == "stop"

    def proposal(self) -> Decision:
        """Returns this rank's vote after a step: whether to save, and whether a failed save ends
        the run.

        All ranks' votes are combined into one decision.
        """
        self._look()
        late = self.world.first and 0 < self.policy.every_seconds <= time.monotonic() - self.began
        first, self.asked = late and not self.asked, self.asked or late
        return Decision(save=first, fail=self.failed is not None and self.stops)

    def due(self, step: int, decision: Decision) -> bool:
        """Returns whether to save after this step.

        Raises:
            RunError: a save failed and checkpoint.on_failure is "stop".
        """
        if decision.fail:
            self.settle()
        return decision.save or (
            self.policy.every_steps > 0 and step % self.policy.every_steps == 0
        )

    def save(self, parts: Parts, progress: TrainingProgress, loss: float) -> None:
        """Starts saving the current state.

        Training may modify the state once this returns. If the previous save is still running,
        waits for it, so that no due checkpoint is dropped on a slow disk.

        Raises:
            RunError: the previous save failed and checkpoint.on_failure is "stop". Raised on all
                ranks.
        """
        self._wait()
        if self.failed and self.stops:
            raise self.failed
        self.began = time.monotonic()
        self.asked = False
        device = self.world.device
        state = parts.state() | {"random": {str(self.peers.rank): resuming.read(device)}}
        if self.snapshot is None:
            self.snapshot = Snapshot(self.peers, state)
        self.snapshot.take(state, device)
        snapshot, commit = self.snapshot, self._commit(progress, loss)
        self.under_way = Save(
            progress.step,
            lambda: saving.write(self.peers, self.store, snapshot, commit, self.policy),
        )

    def settle(self) -> None:
        """Waits until no save is in flight.

        Raises:
            RunError: the last save failed.
        """
        self._wait()
        if self.failed:
            raise self.failed

    def news(self) -> list[Saved]:
        """Returns the results of all saves that have finished since the last call."""
        self._look()
        done, self.done = self.done, []
        return done

    def resume(self, parts: Parts) -> TrainingProgress:
        """Loads the newest valid checkpoint and returns the training progress.

        If the run has no checkpoint, loads the weights of `train.init_from`, if set.

        Raises:
            RunError: all checkpoints are damaged, or they belong to a different run.
        """
        self.peers.one("can't remove leftovers of unfinished saves", self.store.sweep)
        found, passed = resuming.find(self.peers, self.store, self.config, self.dataset)
        for damage in passed:
            self._tell(
                "damaged",
                f"{damage.address} is damaged and was set aside: {damage.why}",
                **asdict(damage),
            )
        if found is None:
            self._begin(parts)
            return TrainingProgress()
        commit, device = found.commit, self.world.device
        same = resuming.load(self.peers, self.store, commit, parts, device)
        if not same:
            resuming.seed_all(device, self.config.train.seed, commit.step, self.peers.rank)
        self._resumed(commit, found.changed, same)
        return TrainingProgress(
            commit.step,
            commit.samples,
            commit.tokens,
            commit.seconds_trained,
            commit.guard,
            commit.scale,
        )

    def _begin(self, parts: Parts) -> None:
        resuming.seed_all(self.world.device, self.config.train.seed, 0, self.peers.rank)
        if address := self.config.train.init_from:
            source = resuming.load_weights(self.peers, address, parts, self.config)
            self._tell("initialized", f"loaded the initial weights from {source}", source=source)

    def _resumed(self, commit: Commit, changed: Mapping[str, tuple[Any, Any]], same: bool) -> None:
        differences = "".join(
            f"; {key} changed from {was} to {now}" for key, (was, now) in changed.items()
        )
        cause = (
            "on a different type of device"
            if commit.world_size == self.peers.size
            else f"by {commit.world_size} ranks"
        )
        ranks = "" if same else f"; saved {cause}, so the random number generators were reseeded"
        self._tell(
            "resumed",
            f"resumes from {self.store.address(commit.step)}{differences}{ranks}",
            step=commit.step,
            world_size=self.peers.size,
            saved_by=commit.world_size,
            changed={key: list(values) for key, values in changed.items()},
        )

    def _tell(self, event: str, message: str, **fields: Any) -> None:
        if self.peers.first:
            self.run.record(event, **fields)
            print(message)

    def _commit(self, progress: TrainingProgress, loss: float) -> Commit:
        return Commit(
            step=progress.step,
            samples=progress.samples,
            tokens=progress.tokens,
            seconds_trained=progress.seconds_trained,
            guard=progress.guard,
            scale=progress.scale,
            loss=loss if math.isfinite(loss) else None,
            time=time.time(),
            world_size=self.peers.size,
            layout=self.config.degrees,
            dataset=self.dataset,
            config=marker.flatten(self.config),
            versions=versions(torch=torch.__version__),
            files={},
        )

    def _wait(self) -> None:
        if self.under_way:
            self.under_way.join()
        self._look()

    def _look(self) -> None:
        """Records the result of the save in flight if it has finished."""
        save = self.under_way
        if save is None or save.is_alive():
            return
        self.under_way = None
        error = save.error
        if error is not None and not isinstance(error, RunError):
            raise error
        self.failed = error
        self.done.append(Saved(save.step, self.store.address(save.step), save.seconds, error))
