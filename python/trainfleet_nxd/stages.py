"""Runs stages by NxDPPModel with its manual partition, which takes modules unchanged; its other one
would trace our model.

The manual partition exists in NxD Core 0.10 and later
(neuronx_distributed/pipeline/manual_pipe_stage.py).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import neuronx_distributed as nxd
import torch
from neuronx_distributed.pipeline.manual_pipe_stage import PipelineStageModule
from torch import Tensor, nn

from trainfleet.engine.batches import MicroBatch, join
from trainfleet.engine.parallel.pipeline import cut
from trainfleet.models.network import Network

from .layers import tied_names

TIED = "tied"


class Piece(nn.Module):
    """A stage in NxD's form: a list of tokens, or a hidden state -> a hidden state, or at the end
    features in a tuple.
    """

    def __init__(self, part: Network | None, weight: str, like: Tensor | None) -> None:
        """Wraps a stage; `part`: None for a stage of another rank. `weight`: the name of the tied
        weight in this stage; `like`: its shape.
        """
        super().__init__()
        self.part, self.weight, self.ends = part, weight, False
        self.ghost = None if like is None else torch.empty_like(like, device="meta")

    @property
    def tied(self) -> Tensor:
        found: Any = attrgetter(self.weight)(self.part) if self.part is not None else self.ghost
        return found  # type: ignore[no-any-return]

    def forward(self, x: Any) -> Any:
        assert self.part is not None
        found = self.part.features(x[0] if isinstance(x, list) else x)
        return (found,) if self.ends else found


class Stages:
    """The stages of all ranks: this rank's own, and placeholders for the others."""

    def __init__(self, root: Network, count: int, stage: int) -> None:
        """Leaves only this rank's stage in the model. All of it is still on the meta device."""
        self.count, self.stage, self.reduction = count, stage, "mean"
        tied = tied_names(root)
        weights = (
            {0: f"{tied[0][1]}.{tied[0][2]}", count - 1: f"{tied[0][0]}.{tied[0][2]}"}
            if tied
            else {}
        )
        shape = attrgetter(weights[0])(root) if tied else None
        self.head = cut(root, count, [stage])[0].part
        self.pieces = [
            Piece(self.head if each == stage else None, weights.get(each, ""), shape)
            for each in range(count)
        ]
        self.pieces[-1].ends = True
        self.tied = [self.pieces[each] for each in weights]
        self.model: Any = None

    def initialize(self, settings: dict[str, Any]) -> None:
        """Hands the stages to NxD, once they have their values; a stage's own parameters are then
        on the device.
        """
        if self.tied:
            PipelineStageModule.mark_weight_sharing([(piece, TIED) for piece in self.tied], TIED)
            if self.stage == self.count - 1:
                # of the two, the first stage's counts in the norm
                self.pieces[-1].tied.shared = True  # type: ignore[attr-defined]
        settings["pipeline_config"] |= {
            "manual_pp_partition": True,
            "manual_pp_stage_partition_fn": lambda layers, count: {
                layer: index for index, layer in enumerate(layers)
            },
            "manual_pp_loss_fn": self.loss,
            "use_optimizer_wrapper": True,
            "return_loss_on_cpu": False,
        }
        self.model = nxd.initialize_parallel_model(settings, lambda: self.pieces)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.head.loss(x, targets, self.reduction)

    def train(self, batches: list[MicroBatch]) -> Tensor | None:
        """Computes the gradients of the mean loss, and returns the loss on the last stage."""
        self.reduction = "mean"
        return self._run(self.model.run_train, batches)

    def evaluate(self, batches: list[MicroBatch]) -> Tensor | None:
        """Returns the mean over micro-batches of their summed losses, on the last stage."""
        self.reduction = "sum"
        return self._run(self.model.run_eval, batches)

    def _run(self, run: Callable[..., Tensor | None], batches: list[MicroBatch]) -> Tensor | None:
        inputs, targets, _ = join(batches)
        # NxD itself moves each micro-batch to the device
        return run(inputs=inputs.cpu(), labels=targets.cpu())
