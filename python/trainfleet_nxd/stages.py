"""Runs pipeline stages with NxDPPModel and a manual partition.

The manual partition uses modules unchanged, whereas the automatic one would trace the model. It is
available in NxD Core 0.10 and later (neuronx_distributed/pipeline/manual_pipe_stage.py).
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
    """Stage with the interface that NxD expects.

    The input is a list of tokens, or a hidden state. The output is a hidden state, or in the last
    stage, a tuple with the features.
    """

    def __init__(self, part: Network | None, weight: str, like: Tensor | None) -> None:
        """Wraps a stage.

        `part` is the stage, or None if it belongs to another rank. `weight` is the name of the tied
        weight in this stage. `like` is a tensor with the tied weight's shape.
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
    """All stages: this rank's stage, and placeholders for those of other ranks."""

    def __init__(self, root: Network, count: int, stage: int) -> None:
        """Removes the stages of other ranks from the model, which is on the meta device."""
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
        """Passes the stages to NxD, which moves this rank's parameters to the device.

        The stages must already have their initial values.
        """
        if self.tied:
            PipelineStageModule.mark_weight_sharing([(piece, TIED) for piece in self.tied], TIED)
            if self.stage == self.count - 1:
                # the gradient norm counts only the first stage's copy
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
        """Computes the gradients of the mean loss.

        Returns the loss on the last stage and None on other stages.
        """
        self.reduction = "mean"
        return self._run(self.model.run_train, batches)

    def evaluate(self, batches: list[MicroBatch]) -> Tensor | None:
        """Returns the summed loss per micro-batch, averaged over micro-batches.

        Returns None except on the last stage.
        """
        self.reduction = "sum"
        return self._run(self.model.run_eval, batches)

    def _run(self, run: Callable[..., Tensor | None], batches: list[MicroBatch]) -> Tensor | None:
        inputs, targets = join(batches)[:2]
        # NxD moves each micro-batch to the device
        return run(inputs=inputs.cpu(), labels=targets.cpu())
