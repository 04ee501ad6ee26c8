"""Saves and resumes a run for its training loop.

A checkpoint's files hold the model, the optimizer's moments and every rank's random number
generators. Everything else is in the marker or follows from the step: the learning rate, and the
next samples. The optimizer's settings come from the config and are never saved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...checkpoints import changes
from ...checkpoints.marker import Commit, versions
from ...checkpoints.store import store_of
from ...config import Config
from ...config.types import Train
from ...run.run_folder import Run
from ...trust.errors import RunError
from ..parallel.rank_model import Parts
from ..vote import Decision, Proposal
from ..world import World
from . import resuming, saving
from .checkpoint_group import Peers
from .saving import Save, Snapshot


@dataclass
class TrainingProgress:
    """The progress of training: steps, samples and tokens done, seconds over all attempts, and the
    state of guard and loss scale.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0
    seconds_trained: float = 0.0
    guard: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()

    def advance(self, train: Train) -> None:
        """Counts one step."""
        self.step += 1
        self.samples += train.global_batch_size
        self.tokens += train.global_batch_size * train.sequence_length


@dataclass(frozen=True)
class Saved:
    """The outcome of a save: committed at `address`, or failed with `error`."""

    step: int
    address: str
    seconds: float
    error: RunError | None


class Checkpoints:
    """Saves at step boundaries while training continues, and resumes a run. All ranks call every
    method together.
    """

    def __init__(self, run: Run, config: Config, dataset: str, world: World) -> None:
        """Prepares saving; `dataset` is the identity of the training tokens."""
        self.run, self.config, self.dataset, self.world = run, config, dataset, world
        self.policy = config.checkpoint
        self.store = store_of(run, self.policy.path)
        self.peers = Peers()
        self.snapshot: Snapshot | None = None
        self.under_way: Save | None = None
        self.failed: RunError | None = None  # the error of the last save
        self.done: list[Saved] = []
        self.began = time.monotonic()  # time of the last save, or of this attempt's start
        self.asked = False  # a save was requested by the clock

    @property
    def stops(self) -> bool:
        """Tells whether a failed save ends the run."""
        return self.policy.on_failure == "stop"

    def proposal(self) -> Proposal:
        """Returns this rank's request at a step boundary; the vote gives all ranks the same
        decision.
        """
        self._look()
        late = self.world.first and 0 < self.policy.every_seconds <= time.monotonic() - self.began
        first, self.asked = late and not self.asked, self.asked or late
        return Proposal(save=first, fail=self.failed is not None and self.stops)

    def due(self, step: int, decision: Decision) -> bool:
        """Tells whether a save begins at this boundary.

        Raises:
            RunError: one failed, and the run must stop then (checkpoint.on_failure).
        """
        if decision.fail:
            self.settle()
        return decision.save or (
            self.policy.every_steps > 0 and step % self.policy.every_steps == 0
        )

    def save(self, parts: Parts, progress: TrainingProgress, loss: float) -> None:
        """Begins to save the current state; training may change it once this returns.

        It waits for a save that is still under way: `checkpoint.every` holds on a slow disk, too.

        Raises:
            RunError: that one failed, and the run must stop then; on all ranks, as it failed on
                all.
        """
        self._wait()
        if self.failed and self.stops:
            raise self.failed
        self.began, self.asked = time.monotonic(), False
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
        """Returns when no save is under way.

        Raises:
            RunError: the last one failed.
        """
        self._wait()
        if self.failed:
            raise self.failed

    def news(self) -> list[Saved]:
        """Returns the outcomes of the saves that ended since the last call."""
        self._look()
        done, self.done = self.done, []
        return done

    def resume(self, parts: Parts) -> TrainingProgress:
        """Loads the newest good checkpoint, else the one of `train.init_from`, else none. Returns
        the progress.

        Raises:
            RunError: there are checkpoints and all are bad, or they belong to another run than the
                config's.
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
            self._tell("initialized", f"the weights start as those of {source}", source=source)

    def _resumed(self, commit: Commit, changed: Mapping[str, tuple[Any, Any]], same: bool) -> None:
        differences = "".join(f"; {key} was {was}, is {now}" for key, (was, now) in changed.items())
        cause = (
            "on another kind of device"
            if commit.world_size == self.peers.size
            else f"by {commit.world_size} ranks"
        )
        ranks = "" if same else f"; saved {cause}, so random numbers start again"
        self._tell(
            "resumed",
            f"continues from {self.store.address(commit.step)}{differences}{ranks}",
            step=commit.step,
            world_size=self.peers.size,
            saved_by=commit.world_size,
            changed={key: list(values) for key, values in changed.items()},
        )

    def _tell(self, event: str, message: str, **fields: Any) -> None:
        if self.peers.first:
            self.run.record(event, **fields)
            print(message, flush=True)

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
            config=changes.flatten(self.config),
            versions=versions(torch=torch.__version__),
            files={},
        )

    def _wait(self) -> None:
        if self.under_way:
            self.under_way.join()
        self._look()

    def _look(self) -> None:
        """Records the outcome of a save that has ended."""
        save = self.under_way
        if save is None or save.is_alive():
            return
        self.under_way = None
        error = save.error
        if error is not None and not isinstance(error, RunError):
            raise error
        self.failed = error
        self.done.append(Saved(save.step, self.store.address(save.step), save.seconds, error))
