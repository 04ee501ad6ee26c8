"""Defines the interface of a rank's part of the model in any layout, the code that all of torch's
layouts share, and plain data parallelism: every rank has the entire model.
"""

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
# Every moment under its parameter's name: so ranks with different parameters, like pipeline stages,
# save and load together.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
MOMENTS = "state."  # prefix of an optimizer's entries that the config does not set


class Parts(Protocol):
    """A rank's part of the model and its optimizer. All ranks call every method together, except
    `broken`.
    """

    data: int  # index of this rank's part among the `ways` parts of a global batch
    ways: int
    # scale of the loss in fp16 (engine/step_guard.py): gradients are divided by it before they are
    # clipped
    scale: Tensor | None

    @property
    def whole(self) -> Network | None:
        """The model, if this rank holds all of it."""
        ...

    def listen(self, watch: Stopwatch) -> None:
        """Registers a hook for the moment when a backward pass has computed its last gradient, if
        it can be seen.
        """
        ...

    def train(self, batches: Iterator[tuple[int, MicroBatch]], watch: Stopwatch) -> Tensor:
        """Computes the gradients of the global batch's mean loss. Returns this rank's share of the
        loss.

        `batches` are this rank's micro-batches, each with the number of later ones. The mean of all
        ranks' shares is the loss.
        """
        ...

    def update(self, rate: float, skips: Callable[[Tensor], Tensor]) -> None:
        """Does one optimizer step at a learning rate, on gradients clipped to
        `train.gradient_clip`; it then frees the gradients.

        `skips` maps the gradients' global norm before clipping to 1.0 if the step must change
        nothing, else to 0.0. Norm and answer stay on the device.
        """
        ...

    def evaluate(self, batches: Iterable[MicroBatch], most: int) -> Tensor:
        """Returns this rank's share of the summed loss of all ranks' batches: the shares add up to
        it. `most`: largest number of sequences of any rank.
        """
        ...

    def state(self) -> State:
        """Returns the live tensors of the model and the optimizer, each under a name that no layout
        changes.
        """
        ...

    def restore(self, state: State) -> None:
        """Loads a state of `state()` that was filled from a checkpoint."""
        ...

    def weights(self) -> State:
        """Returns the live tensors of the model by name."""
        ...

    def set_weights(self, weights: Mapping[str, Tensor], whole: bool = False) -> None:
        """Loads weights of `weights()`, or `whole` tensors from which each rank takes its
        slices.
        """
        ...

    def broken(self) -> list[str]:
        """Returns the names of this rank's parameters with a number that is not finite; waits for
        the device.
        """
        ...


class TorchParts:
    """A model and its optimizer as objects of torch: the half of `Parts` that all of torch's own
    layouts share.
    """

    scale: Tensor | None = None

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, limit: float = 0.0
    ) -> None:
        """Wraps them; `limit`: the norm to which gradients are clipped; 0 clips nothing."""
        self.model, self.optimizer, self.limit = model, optimizer, limit

    def clip(self, limit: float) -> Tensor:
        """Scales the gradients down to `limit` if their global norm is larger (0: never). Returns
        the norm before.
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
        """Loads only the moments: settings such as the weight decay stay the config's."""
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
    """The entire model on every rank. Gradients are averaged over the ranks in buckets while the
    backward pass still runs.
    """

    model: models.Network

    def __init__(
        self, config: Config, world: World, precision: torch.dtype = torch.float32
    ) -> None:
        """Sets up the model; `precision`: the format of products, to which their factors are
        cast.
        """
        self.device, train = world.device, config.train
        self.precision = precision
        self.data, self.ways = world.rank, world.size
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
        # only now: otherwise the pass of two tokens would be compiled first, and later all code for
        # any shape
        if train.compile:
            blocks.compile_blocks(self.model, parts, train.recomputation, self.device)

    @property
    def whole(self) -> models.Network:
        return self.model

    def listen(self, watch: Stopwatch) -> None:
        if self.ways > 1:
            watch.hear(self.model.get_submodule(self.model.plan.first[0]))

    def _settle_buckets(self) -> None:
        """Makes DDP rebuild its buckets now, by a backward pass of two tokens; discards its
        gradients.

        DDP rebuilds them after its first backward pass, and gloo's order of summation depends on
        the place of a gradient. Without this, a resumed run's first step would differ from an
        unbroken run's in its last bits (seen with 4 ranks).
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
                with watch.own_work(), self._casting():
                    loss = shared(batch.inputs, **batch.named) / self.micro_batches
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
