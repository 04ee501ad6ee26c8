"""Applies a model's parallel plan with NxD Core's layers, and runs pipeline stages with NxDPPModel.

engine/parallel/tensor.py applies the same plan with DTensor. Hidden states are [B, T, D], so NxD
divides sequences along dimension 1.

Stages have a manual partition, which uses modules unchanged, whereas the automatic one would trace
the model. It is available in NxD Core 0.10 and later
(neuronx_distributed/pipeline/manual_pipe_stage.py).
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

import neuronx_distributed as nxd
import torch
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
)
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_distributed.parallel_layers.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from neuronx_distributed.pipeline.manual_pipe_stage import PipelineStageModule
from torch import Tensor, nn

from trainfleet.engine.batches import MicroBatch, join
from trainfleet.engine.parallel.pipeline import cut
from trainfleet.engine.parallel.tensor import find_tied
from trainfleet.models.loss import IGNORED
from trainfleet.models.network import Network

SEQUENCE = 1  # sequence dimension of [B, T, D]
META = torch.device("meta")


def realise(model: Network, precision: torch.dtype, copies: int, rank: int) -> None:
    """Replaces the model's layers with NxD's on the meta device.

    Each new layer holds this rank's slice. `copies` is the number of adjacent tensor ranks with the
    same key-value heads, or 1 if each rank has different ones.
    """
    plan, tied = model.plan, tied_names(model)
    for name, module in named(model, plan.embeddings):
        replace(model, name, embedding(module, whole=name != plan.divided, precision=precision))
    for name, module in named(model, plan.column):
        parted = name != plan.head or plan.head in plan.gathered
        held = copies if any(fnmatchcase(name, each) for each in plan.copied) else 1
        replace(model, name, column(module, parted, precision, held, rank))
    for name, module in named(model, plan.row):
        replace(model, name, row(module, precision))
    for _, module in named(model, plan.norms):
        for parameter in module.parameters():
            parameter.sequence_parallel_enabled = True  # makes NxD sum the gradients
    divide = (
        reduce_scatter_to_sequence_parallel_region
        if plan.divided in plan.embeddings
        else scatter_to_sequence_parallel_region
    )
    model.get_submodule(plan.divided).register_forward_hook(lambda _, __, x: divide(x, SEQUENCE))
    for _, module in named(model, plan.alike):
        module.register_forward_pre_hook(gather)
    for module, owner, parameter in tied:
        model.get_submodule(module)._parameters[parameter] = model.get_submodule(owner)._parameters[
            parameter
        ]
    model.surprise = surprise


def named(model: nn.Module, patterns: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Returns the modules whose names match any of the patterns."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if any(fnmatchcase(name, each) for each in patterns)
    ]


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def tied_names(model: nn.Module) -> list[tuple[str, str, str]]:
    """Returns the module name, owner name and parameter name for each tied parameter."""
    names = {module: name for name, module in model.named_modules()}
    return [
        (names[module], names[owner], parameter)
        for module, (owner, parameter) in find_tied(model).items()
    ]


def embedding(module: nn.Embedding, whole: bool, precision: torch.dtype) -> nn.Module:
    """Creates a parallel embedding.

    With `whole`, every rank gets the entire output. Otherwise, a hook reduces the output and
    divides it among the ranks.
    """
    with META:
        layer = ParallelEmbedding(
            module.num_embeddings,
            module.embedding_dim,
            device=META,
            dtype=precision,
            collect_output=whole,
        )
    return layer  # type: ignore[no-any-return]


def column(
    module: nn.Linear, parted: bool, precision: torch.dtype, copies: int = 1, rank: int = 0
) -> nn.Module:
    """Creates a column-parallel layer.

    `parted` is whether the input is only the rank's part of the sequence. `copies` is the number of
    ranks with the same slice; the gradient norm counts only the first copy.
    """
    layer = ColumnParallelLinear(
        module.in_features,
        module.out_features * copies,
        bias=module.bias is not None,
        gather_output=False,
        dtype=precision,
        device=META,
        sequence_parallel_enabled=parted,
        sequence_dimension=SEQUENCE if parted else None,
    )
    for parameter in layer.parameters() if copies > 1 else ():
        parameter.copies, parameter.shared = copies, rank % copies > 0
    return layer  # type: ignore[no-any-return]


def row(module: nn.Linear, precision: torch.dtype) -> nn.Module:
    return RowParallelLinear(  # type: ignore[no-any-return]
        module.in_features,
        module.out_features,
        bias=module.bias is not None,
        input_is_parallel=True,
        dtype=precision,
        device=META,
        sequence_parallel_enabled=True,
        sequence_dimension=SEQUENCE,
    )


def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """All-gathers the sequence for a module that all ranks compute identically.

    Each rank therefore gets the module's entire gradient.
    """
    return gather_from_sequence_parallel_region(
        inputs[0], SEQUENCE, to_model_parallel=False
    ), *inputs[1:]


def surprise(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Returns the cross-entropy of vocab-parallel logits [N, V / ranks], ignoring IGNORED
    targets.
    """
    guessed = targets != IGNORED
    # parallel_cross_entropy overwrites the logits
    losses: Tensor = (
        parallel_cross_entropy(logits.clone(), torch.where(guessed, targets, 0)) * guessed
    )
    return losses.sum() / guessed.sum() if reduction == "mean" else losses.sum()


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
