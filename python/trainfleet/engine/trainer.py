"""The training loop."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

from .. import models
from ..config import Config
from ..config.families import FAMILIES
from ..errors import RunError
from . import batches, optimizer
from .batches import Batch, Batches, Samples
from .checkpoint import Checkpoints
from .meter import Stopwatch
from .record import Recorder
from .stopping import Vote
from .world import World, accumulating

COLLECT_EVERY = 100  # steps between garbage collections, at the same step on all ranks


class Trainer:
    """One rank of a training run, from its newest checkpoint on. All ranks do the same; rank 0's recorder also writes."""

    def __init__(self, config: Config, samples: Samples, world: World, checkpoints: Checkpoints, watch: Stopwatch) -> None:
        self.config, self.train, self.samples = config, config.train, samples
        self.world, self.checkpoints, self.watch, self.device = world, checkpoints, watch, world.device
        self.precision = self.device.precision(self.train.precision)
        torch.manual_seed(self.train.seed + world.rank)  # what a rank draws by itself; the weights are the same on all
        self.model = models.build(config.model)
        self.model.initialize(self.train.seed)
        self.model.to(self.device.torch_device)
        self.optimizer = optimizer.build(self.model, self.train)
        self.shared = world.share(self.model)
        self.settle_buckets()
        self.progress = checkpoints.resume(self.model, self.optimizer)  # last: it also takes up the random numbers
        self.batches = Batches(samples, config, world.rank, world.size, self.device)
        self.bad_step = torch.zeros((), dtype=torch.int64, device=self.device.torch_device)

    def fit(self, recorder: Recorder | None, vote: Vote) -> str:
        """Trains to the last step: `finished`, or `stopped` when the ranks agreed to stop before it."""
        gc.disable()  # a collection at a moment of its own makes all other ranks wait for this one
        first, last = self.progress.step + 1, self.train.steps
        self.watch.start_training(before=self.progress.seconds_trained)
        for step in range(first, last + 1):
            self.watch.begin(step)
            loss, norm = self.advance(step)
            if step == first:
                self.device.synchronize()
                self.watch.first_step()
            valid_loss = self.validate() if step == last or due(step, self.train.validate_every) else None
            if step in (1, last) or due(step, self.train.log_every) or valid_loss is not None:
                self.log(recorder, loss, norm, valid_loss)
            answer = vote.agreed(self.checkpoints.wish())
            ending = answer.stop or step == last
            if self.checkpoints.due(step, answer) or ending:
                self.save(loss, last=ending)
            if recorder:
                recorder.saved(self.checkpoints.news())
            if ending:
                return "finished" if step == last else "stopped"
            if step == first or due(step, COLLECT_EVERY):
                collect_garbage()
        return "finished"

    def settle_buckets(self) -> None:
        """Has DDP lay out its buckets for good, with a backward pass of two tokens that nothing remains of.

        It lays them out anew after the first pass, and gloo adds up ranks in an order that depends on a gradient's place: a
        resumed run's first step, with the first layout, would differ from an unbroken run's in its last bits (4 ranks, seen).
        """
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=self.device.torch_device)
        self.loss(self.shared, (tokens, tokens)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.zero_grad(set_to_none=True)

    def advance(self, step: int) -> tuple[Tensor, Tensor]:
        """One step of the optimizer; this rank's mean loss and the gradients' global norm, both left on the device."""
        optimizer.set_learning_rate(self.optimizer, optimizer.learning_rate(self.train, step))
        loss = self.accumulate(step)
        norm = optimizer.clip(self.model.parameters(), self.train.gradient_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.bad_step = torch.where((self.bad_step == 0) & ~norm.isfinite(), step, self.bad_step)
        self.progress.advance(self.train)
        return loss, norm

    def accumulate(self, step: int) -> Tensor:
        """Leaves the gradients of the global batch's mean loss in the parameters; this rank's part of that loss comes back."""
        total = torch.zeros((), device=self.device.torch_device)
        for left, batch in self.batches.of(step):
            with accumulating(self.shared, more=left > 0):
                with self.watch.own_work():
                    loss = self.loss(self.shared, batch) / self.batches.per_step
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def loss(self, model: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
        """In nats a guessed token; what is guessed is the model's to say."""
        inputs, targets = batch
        with self.device.compute(self.precision):
            return model(inputs, targets=targets, reduction=reduction)  # type: ignore[no-any-return]

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over the validation sequences, the same for any number of ranks."""
        with self.watch.stage("validate"):
            total = torch.zeros((), dtype=torch.float64, device=self.device.torch_device)
            self.model.eval()
            for batch in batches.validation(self.samples, self.config, self.world.rank, self.world.size, self.device):
                total += self.loss(self.model, batch, reduction="sum")
            self.model.train()
            guesses = FAMILIES[self.config.model.family].guesses(self.train.sequence_length)
            tokens = batches.validation_count(self.samples, self.config) * guesses
            return float(self.world.sum(total) / tokens)

    def log(self, recorder: Recorder | None, loss: Tensor, norm: Tensor, valid_loss: float | None) -> None:
        """A line of metrics. Here and at a checkpoint, and nowhere else, the host waits for the device."""
        mean = self.world.mean(loss).item()
        if recorder:
            recorder.step(mean, norm.item(), valid_loss, self.device.memory_used())
        self.require_finite()

    def save(self, loss: Tensor, last: bool) -> None:
        """Begins a checkpoint of this step, or after the last step makes one."""
        mean = self.world.mean(loss).item()
        self.require_finite()
        self.progress.seconds_trained = self.watch.trained
        with self.watch.stage("checkpoint"):
            self.checkpoints.save(self.model, self.optimizer, self.progress, mean)
            if last:
                self.checkpoints.settle()

    def require_finite(self) -> None:
        """RunError, on all ranks as they share the norm, if a step had gradients that were not finite."""
        if step := int(self.bad_step.item()):
            raise RunError(
                f"the loss or its gradients were not finite in step {step}",
                where=f"run {self.config.name}",
                why=f"it diverged at learning rate {optimizer.learning_rate(self.train, step):.2g}; nothing since was saved",
                next="lower train.learning_rate or raise train.warmup_steps; make train then goes on from the last checkpoint",
            )


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens at this one."""
    return every > 0 and step % every == 0


def collect_garbage() -> None:
    """Collects, and takes all that is still alive, such as the model, out of later collections."""
    gc.collect()
    gc.freeze()
