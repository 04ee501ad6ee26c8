"""Defines the interface to a rank's part of the model, the torch layouts' base class, and DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from ... import models
from ...config import Config
from ...models.network import Network
from .. import optimizer as updates
from ..batches import MicroBatch
from ..optimizers import local
from ..timing import Stopwatch
from ..world import World
from . import blocks, gradients

State = dict[str, Any]
# Keys optimizer state by parameter name, so that ranks with different parameters, such as pipeline
# stages, can save and load together.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
MOMENTS = "state."  # prefix of entries with optimizer state, as opposed to settings


class Parts(Protocol):
    """A rank's part of the model, and its optimizer.

    Every method except `broken` must be called on all ranks.
    """

    data: int  # this rank's data-parallel index, in range(ways)
    ways: int
    # fp16 loss scale (engine/step_guard.py); gradients are divided by it before clipping
    scale: Tensor | None

    @property
    def whole(self) -> Network | None:
        """The entire model, or None if this rank holds only part of it."""
        ...

    def listen(self, watch: Stopwatch) -> None:
        """Registers a hook that records when a backward pass computes its last gradient.

        Does nothing if the layout can't observe it.
        """
        ...

    def train(self, batches: Iterator[tuple[int, MicroBatch]], watch: Stopwatch) -> Tensor:
        """Runs forward and backward over this rank's micro-batches.

        Accumulates the gradient of the global mean loss. Returns this rank's term of the global
        loss, which is the mean over all ranks' terms. `batches` yields (micro-batches left,
        micro-batch).
        """
        ...

    def update(self, rate: float, skips: Callable[[Tensor], Tensor]) -> None:
        """Runs one optimizer step, then frees the gradients.

        Gradients are clipped to `train.gradient_clip`. `skips` maps the global gradient norm before
        clipping to 1.0 if the step must be skipped, otherwise to 0.0. Both values stay on the
        device.
        """
        ...

    def evaluate(self, batches: Iterable[MicroBatch], most: int) -> Tensor:
        """Returns this rank's term of the summed loss, which is the sum over all ranks' terms.

        `most` is the maximum number of sequences on any rank.
        """
        ...

    def state(self) -> State:
        """Returns the live tensors of the model and optimizer, with names independent of the
        layout.
        """
        ...

    def restore(self, state: State) -> None:
        """Loads a state that has the same structure as `state()`."""
        ...

    def weights(self) -> State:
        """Returns the model's live tensors by name."""
        ...

    def set_weights(self, weights: Mapping[str, Tensor], whole: bool = False) -> None:
        """Loads tensors with the same structure as `weights()`.

        If `whole`, the tensors are unsharded, and each rank takes its slices.
        """
        ...

    def broken(self) -> list[str]:
        """Returns the names of this rank's parameters that contain non-finite values.

        Waits for the device.
        """
        ...


class TorchParts:
    """Base class for all layouts that use a torch model and optimizer."""

    scale: Tensor | None = None

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, limit: float = 0.0
    ) -> None:
        """Wraps a model and optimizer.

        `limit` is the maximum gradient norm; 0 disables clipping.
        """
        self.model = model
        self.optimizer = optimizer
        self.limit = limit

    def clip(self, limit: float) -> Tensor:
        """Clips gradients to the global norm `limit` and returns the original norm.

        A limit of 0 disables clipping.
        """
        return updates.clip(self.model.parameters(), limit)

    def update(self, rate: float, skips: Callable[[Tensor], Tensor]) -> None:
        updates.set_learning_rate(self.optimizer, rate)
        if self.scale is not None:
            gradients.unscale(self.model.parameters(), self.scale)
        updates.leave_out(self.optimizer, skips(self.clip(self.limit)))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> State:
        moments = get_optimizer_state_dict(self.model, self.optimizer, options=BY_NAME)
        return {
            "model": self.weights(),
            "optimizer": {
                name: value for name, value in moments.items() if name.startswith(MOMENTS)
            },
        }

    def restore(self, state: State) -> None:
        """Loads the weights and moments.

        Optimizer settings, such as weight decay, come from the config instead.
        """
        self.set_weights(state["model"])
        settings = get_optimizer_state_dict(self.model, self.optimizer, options=BY_NAME)
        set_optimizer_state_dict(
            self.model, self.optimizer, settings | state["optimizer"], options=BY_NAME
        )

    def weights(self) -> State:
        return get_model_state_dict(self.model)

    def set_weights(self, weights: Mapping[str, Tensor], whole: bool = False) -> None:
        options = StateDictOptions(full_state_dict=True, strict=False) if whole else None
        set_model_state_dict(self.model, dict(weights), options=options)

    def broken(self) -> list[str]:
        return [
            name
            for name, parameter in self.model.named_parameters()
            if not local(parameter).isfinite().all()
        ]


class Replicas(TorchParts):
    """Data-parallel layout (DDP), with the entire model on every rank.

    Gradients are averaged in buckets during the backward pass.
    """

    model: models.Network

    def __init__(
        self, config: Config, world: World, precision: torch.dtype = torch.float32
    ) -> None:
        """Creates the model. `precision` is the autocast dtype."""
        self.device, train = world.device, config.train
        self.precision = precision
        self.data = world.rank
        self.ways = world.size
        self.micro_batches = train.global_batch_size // (world.size * train.micro_batch_size)
        with torch.device("meta"):
            model = models.build(config.model)
        blocks.draw(model, train.seed, self.device, torch.float32)
        super().__init__(
            model, updates.build(model, train, self.device, precision), train.gradient_clip
        )
        parts = list(model.get_submodule(model.plan.blocks).children())
        blocks.recompute(parts, train.recomputation, self.device)
        self.shared: torch.nn.Module = self.model
        if world.size > 1:
            self.shared = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self._settle_buckets()
        # Compile only after `_settle_buckets`. Otherwise, torch would compile for its two tokens
        # first, and for dynamic shapes after that.
        if train.compile:
            blocks.compile_blocks(self.model, parts, train.recomputation, self.device)

    @property
    def whole(self) -> models.Network:
        return self.model

    def listen(self, watch: Stopwatch) -> None:
        if self.ways > 1:
            watch.hear(self.model.get_submodule(self.model.plan.first[0]))

    def _settle_buckets(self) -> None:
        """Makes DDP rebuild its buckets now, by running a backward pass on two tokens and
        discarding the gradients.

        DDP rebuilds its buckets after the first backward pass, and gloo's summation order depends
        on a gradient's position in its bucket. Otherwise, the first step after a resume would
        differ in the last bits from an uninterrupted run (observed with 4 ranks).
        """
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=self.device.torch_device)
        self.shared(tokens, targets=tokens).backward()
        self.model.zero_grad(set_to_none=True)

    def train(self, batches: Iterator[tuple[int, MicroBatch]], watch: Stopwatch) -> Tensor:
        total = torch.zeros((), device=self.device.torch_device)
        for left, batch in batches:
            shared = self.shared
            with (
                shared.no_sync()
                if left and isinstance(shared, DistributedDataParallel)
                else nullcontext()
            ):
                reduction, divisor = batch.averaged(self.micro_batches)
                with watch.own_work(), self._casting():
                    loss = shared(batch.inputs, **batch.named, reduction=reduction) / divisor
                with watch.part("backward"):
                    gradients.scaled(loss, self.scale).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], most: int) -> Tensor:
        total = torch.zeros((), dtype=self.device.loss_sums, device=self.device.torch_device)
        self.model.eval()
        for batch in batches:
            with self._casting():
                total += self.model(batch.inputs, **batch.named, reduction="sum")
        self.model.train()
        return total

    def _casting(self) -> AbstractContextManager[object]:
        whole = self.precision == torch.float32
        return (
            nullcontext()
            if whole
            else torch.autocast(self.device.torch_device.type, self.precision)
        )
