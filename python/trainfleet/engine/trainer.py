"""The training loop."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import torch

from ..config import Config
from ..config.families import FAMILIES
from ..config.schedule import learning_rate
from ..config.types import Train
from ..data.dataset import Dataset
from ..data.manifest import VALIDATION
from ..models.custom_model import module_at
from ..process.install_paths import page
from ..run.records import VALID_LOSS
from ..run.run_folder import Record
from ..trust.errors import RunError
from . import batches, generate
from .batches import Batches, Samples
from .checkpoint import Checkpoints
from .parallel import arrange
from .record import Recorder
from .step_guard import Scale, StepGuard
from .timing import Stopwatch
from .vote import Decision, Vote
from .world import World

COLLECT_EVERY = 100  # steps between garbage collections, which all ranks run in sync


class Trainer:
    """One rank's training loop, starting from the newest checkpoint.

    All ranks do the same work, except that only rank 0 has a recorder.
    """

    def __init__(
        self,
        config: Config,
        samples: Samples,
        world: World,
        checkpoints: Checkpoints,
        watch: Stopwatch,
    ) -> None:
        self.config = config
        self.train = config.train
        self.samples = samples
        self.world = world
        self.checkpoints = checkpoints
        self.watch = watch
        self.device = world.device
        self.precision = world.precision(self.train.precision)
        # Ranks draw different random numbers, for example for dropout, but initialize the weights
        # identically.
        torch.manual_seed(self.train.seed + world.rank)
        self.parts = arrange(config, world)
        self.parts.listen(watch)
        # must come last, because it also restores the random number generators
        self.progress = checkpoints.resume(self.parts)
        self.batches = Batches(samples, config, self.parts.data, self.parts.ways, self.device)
        self.scale = (
            Scale(self.device.torch_device, self.progress.scale)
            if self.precision == torch.float16
            else None
        )
        self.parts.scale = self.scale.factor if self.scale else None
        self.guard = StepGuard(self.train, world, self.progress.guard, self.scale)
        self.after_step = callback_of(self.train)

    def fit(self, recorder: Recorder | None, vote: Vote) -> str:
        """Trains until the last step or until all ranks agree to stop.

        Returns `finished` or `stopped`.
        """
        # If ranks collected garbage at different times, they would stall each other.
        gc.disable()
        first, last = self.progress.step + 1, self.train.steps
        self.watch.start_training(before=self.progress.seconds_trained)
        for step in range(first, last + 1):
            logged = step in (1, last) or due(step, self.train.log_every)
            self.watch.begin(step, sampled=logged)
            self.advance(step)
            self.after_step(step, self)
            if step == first:
                self.device.synchronize()
                self.watch.first_step()
            valid = self.validate() if step == last or due(step, self.train.validate_every) else {}
            if logged or valid:
                self.log(recorder, valid)
            decision = vote.agreed(self.checkpoints.proposal())
            ending = decision.stop or step == last
            self.save_if_due(step, decision, ending, recorder)
            if ending:
                return "finished" if step == last else "stopped"
            if due(step - first, COLLECT_EVERY):
                gc.collect()
                gc.freeze()  # exempts the survivors, such as the model, from later collections
        return "finished"

    def advance(self, step: int) -> None:
        """Runs one optimizer step, unless the guard skips it, without waiting for the device."""
        loss = self.parts.train(self.watch.fetch(self.batches.of(step)), self.watch)
        with self.watch.part("optimizer"):
            self.parts.update(
                learning_rate(self.train, step), lambda norm: self.guard.skips(step, loss, norm)
            )
        self.progress.advance(self.train)

    def validate(self) -> dict[str, float]:
        """Returns the mean validation loss, overall and per source of a mixture, by metric name.

        Omits splits that are shorter than one sequence. The losses do not depend on the number of
        ranks.
        """
        found, rank, ranks = {}, self.parts.data, self.parts.ways
        samples, train = self.samples, self.train
        for split in (VALIDATION, *samples.validation_parts):
            count = batches.validation_count(samples, self.config, split)
            if not count:
                continue
            with self.watch.stage("validate"):
                own = batches.validation(samples, self.config, rank, ranks, self.device, split)
                total = self.parts.evaluate(own, most=-(-count // ranks))
                guesses = samples.learned(split, 0, count, train.sequence_length, train.seed)
                family = FAMILIES[self.config.model.family]
                guesses = guesses or count * family.guesses(train.sequence_length)
                name = split.replace(VALIDATION, VALID_LOSS, 1)
                found[name] = float(self.world.sum(total) / guesses)
        return found

    def log(self, recorder: Recorder | None, valid: Record) -> None:
        """Logs a step's metrics. `valid` contains the validation losses, or is empty if validation
        was not due.

        The host waits for the device only here and at checkpoints.
        """
        skipped = self.guard.check(self.parts, self.config.name)
        loss, norm = self.guard.seen.tolist()
        if self.device.tells_time:
            self.watch.tell()
        if recorder:
            meters: Record = {"memory_bytes": self.device.memory_used(), "skipped": skipped}
            meters |= self.device.meters() | (self.scale.meters() if self.scale else {})
            recorder.step(loss, norm, valid, meters)
        if recorder and valid and self.train.sample_prompts:
            self.sample(recorder)

    def sample(self, recorder: Recorder) -> None:
        """Records the model's continuations of `train.sample_prompts`."""
        model, prompts = self.parts.whole, self.train.sample_prompts
        assert model, "config/cross_checks.py requires whole models"
        model.eval()
        with (
            self.watch.stage("validate"),
            suppress(FloatingPointError),
            torch.compiler.set_stance("force_eager"),
        ):
            texts = generate.answers(model, cast(Dataset, self.samples), prompts)
            for prompt, text in zip(prompts, texts, strict=True):
                recorder.sampled(prompt, text)
        model.train()

    def save_if_due(
        self, step: int, decision: Decision, last: bool, recorder: Recorder | None
    ) -> None:
        """Starts a checkpoint if one is due and records finished saves."""
        try:
            if self.checkpoints.due(step, decision) or last:
                self.save(last)
        finally:  # record saves even if a failed save ends the run
            if recorder:
                recorder.saved(self.checkpoints.news())

    def save(self, last: bool) -> None:
        """Starts a checkpoint of this step. If `last`, waits until it is committed."""
        self.guard.check(self.parts, self.config.name)
        if self.config.checkpoint.is_off:
            return
        self.progress.seconds_trained, self.progress.guard = self.watch.trained, self.guard.state()
        self.progress.scale = self.scale.state() if self.scale else ()
        with self.watch.stage("checkpoint"):
            self.checkpoints.save(self.parts, self.progress, float(self.guard.seen[0]))
            if last:
                self.checkpoints.settle()


def callback_of(train: Train) -> Callable[[int, Trainer], object]:
    """Returns the function in `train.callback`, or a no-op if it is not set.

    An exception in the callback ends the run.

    Raises:
        RunError: the file can't be loaded or does not define the function.
    """
    if train.callback is None:
        return lambda step, trainer: None
    found = getattr(module_at(train.callback, "train.callback"), "after_step", None)
    if not callable(found):
        raise RunError(
            "has no callback",
            where=train.callback,
            why="it must define after_step(step, trainer)",
            next=f"see the example in {page('docs/how-to/own-model.md')}",
        )
    return found  # type: ignore[no-any-return]


def due(step: int, every: int) -> bool:
    """Returns whether an action that runs every `every` steps is due. 0 means never."""
    return every > 0 and step % every == 0
