"""The interface of a rank's part of the model, however it is divided, and what all of torch's
layouts share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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

from ...models.network import Network
from .. import optimizer as updates
from ..batches import MicroBatch
from ..optimizers import local
from ..timing import Stopwatch
from .gradients import unscale

State = dict[str, Any]
# Every moment under its parameter's name: so ranks that hold different parameters, as pipeline
# stages do, save and load together.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
MOMENTS = "state."  # the prefix of an optimizer's entries that the config does not decide


class Parts(Protocol):
    """A rank's part of the model and its optimizer. All ranks call every method together, but for
    `broken`.
    """

    data: int  # which of the `ways` parts of a global batch this rank trains on
    ways: int
    scale: (
        Tensor | None
        # of the loss in fp16 (engine/loss_scale.py): gradients are divided by it before they are
        # clipped
    )

    @property
    def whole(self) -> Network | None:
        """The model, where this rank holds all of it."""
        ...

    def listen(self, watch: Stopwatch) -> None:
        """Registers a hook for the moment when a backward pass has computed its last gradient, if
        it can be seen.
        """
        ...

    def train(self, batches: Iterator[tuple[int, MicroBatch]], watch: Stopwatch) -> Tensor:
        """Computes the gradients of the global batch's mean loss; returns this rank's share of it.

        `batches` are this rank's micro-batches, each with how many come after it. The mean of all
        ranks' shares is the loss.
        """
        ...

    def update(self, rate: float, skips: Callable[[Tensor], Tensor]) -> None:
        """One optimizer step at a learning rate, on gradients clipped to `train.gradient_clip`; the
        gradients are then gone.

        `skips` maps the gradients' global norm before clipping to 1.0 where the step must change
        nothing, else to 0.0. Norm and answer stay on the device.
        """
        ...

    def evaluate(self, batches: Iterable[MicroBatch], most: int) -> Tensor:
        """This rank's share of the summed loss of all ranks' batches: the shares add up to it.
        `most`: sequences of any rank.
        """
        ...

    def state(self) -> State:
        """The live tensors of the model and the optimizer, each under a name that no layout
        changes.
        """
        ...

    def restore(self, state: State) -> None:
        """Loads a state of `state()` that was filled from a checkpoint."""
        ...

    def weights(self) -> State:
        """The live tensors of the model by name."""
        ...

    def set_weights(self, weights: Mapping[str, Tensor], whole: bool = False) -> None:
        """Loads weights of `weights()`, or `whole` tensors of which each rank takes its slices and
        leaves the rest.
        """
        ...

    def broken(self) -> list[str]:
        """The parameters of this rank that have a number which is not finite, by name; waits for
        the device.
        """
        ...


class TorchParts:
    """A model and its optimizer as objects of torch: the half of `Parts` that is the same in every
    layout of torch's own.
    """

    scale: Tensor | None = None

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, limit: float = 0.0
    ) -> None:
        """`limit`: the norm to which gradients are clipped; 0 clips nothing."""
        self.model, self.optimizer, self.limit = model, optimizer, limit

    def clip(self, limit: float) -> Tensor:
        """Scales the gradients down to `limit` where their global norm is over it (0: never);
        returns the norm before.
        """
        return updates.clip(self.model.parameters(), limit)

    def update(self, rate: float, skips: Callable[[Tensor], Tensor]) -> None:
        updates.set_learning_rate(self.optimizer, rate)
        if self.scale is not None:
            unscale(self.model.parameters(), self.scale)
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
        """Settings such as the weight decay stay the config's: only the moments are loaded."""
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
