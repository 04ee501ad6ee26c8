"""Defines the interface of a rank's part of the model in any layout, and the code that all of
torch's layouts share.
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
    # scale of the loss in fp16 (engine/loss_scale.py): gradients are divided by it before they are
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
