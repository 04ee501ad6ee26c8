"""Applies a model's parallel plan with NxD Core's layers.

engine/parallel/tensor.py applies the same plan with DTensor. Hidden states are [B, T, D], so NxD
divides sequences along dimension 1.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

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
from torch import Tensor, nn

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
