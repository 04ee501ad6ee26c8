"""Tensor and sequence parallelism with DTensor, and context parallelism.

With context parallelism, each rank holds a part of every sequence, and gathers the other ranks'
keys and values for attention. With grouped-query attention, keys and values are small compared to
the queries. This method works with any kind of attention and requires only an all-gather. Llama 3
was trained this way (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from ...models.network import Attend, Network, ParallelPlan, Total
from ..optimizers import whole

PART, WHOLE = Shard(1), Replicate()  # placements along the sequence, dimension 1 of [B, T, D]


def split(model: Network, mesh: DeviceMesh) -> None:
    """Slices every matrix for tensor parallelism.

    Between modules, each rank's hidden state covers only part of the sequence.
    """
    tied = find_tied(model)
    for module in model.modules():
        if isinstance(module, Total):
            module.register_forward_hook(lambda _, inputs, loss: whole(loss))
    parallelize_module(model, mesh, styles(model.plan))
    for module, (owner, name) in tied.items():  # retie, because parallelize_module sliced each copy
        module._parameters[name] = owner._parameters[name]


def styles(plan: ParallelPlan) -> dict[str, ParallelStyle]:
    """Returns the parallel style of each module.

    Only the logits stay a DTensor, because the loss is vocab-parallel.
    """
    found: dict[str, ParallelStyle] = {}
    for name in plan.embeddings:
        found[name] = RowwiseParallel(
            input_layouts=WHOLE, output_layouts=PART if name == plan.divided else WHOLE
        )
    if plan.divided not in plan.embeddings:
        found[plan.divided] = PrepareModuleOutput(output_layouts=WHOLE, desired_output_layouts=PART)
    found |= {name: SequenceParallel(use_local_output=True) for name in plan.norms}
    found |= {
        name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in plan.head_norms
    }
    found |= {name: GatherInput() for name in plan.gathered if name not in plan.column}
    found |= {name: GatherInput(alike=True) for name in plan.alike}
    found |= {name: ColwiseParallel() for name in plan.column}
    found |= {name: RowwiseParallel(output_layouts=PART) for name in plan.row}
    gathered = plan.head in plan.gathered
    found[plan.head] = ColwiseParallel(
        input_layouts=PART if gathered else WHOLE, use_local_output=False
    )
    return found


class GatherInput(ParallelStyle):
    """Parallel style that gathers a module's first input along the sequence.

    The backward pass reduce-scatters the input's gradient. A replicated module (`alike`) receives a
    plain tensor instead of a DTensor, so that each rank computes its full gradient.
    """

    def __init__(self, alike: bool = False) -> None:
        super().__init__()
        self.alike = alike

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            part: Tensor = inputs[0]
            whole = DTensor.from_local(part, device_mesh, (PART,), run_check=False).redistribute(
                placements=(WHOLE,)
            )
            return (whole.to_local() if self.alike else whole), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


def find_tied(model: nn.Module) -> dict[nn.Module, tuple[nn.Module, str]]:
    """Returns the owner and parameter name of the shared weight, for each module with a tied
    parameter.
    """
    owners: dict[int, nn.Module] = {}
    found = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            owner = owners.setdefault(id(parameter), module) if parameter is not None else module
            if owner is not module:
                found[module] = (owner, name)
    return found


def positions(length: int, rank: int, ranks: int) -> Tensor:
    """Returns a rank's token positions in a sequence.

    The sequence is cut into 2 R pieces. Rank r gets the r-th piece from the start and the r-th from
    the end, which balances the load, because later pieces cost more in causal attention.
    """
    pieces = torch.arange(length).chunk(2 * ranks)
    return torch.cat((pieces[rank], pieces[2 * ranks - 1 - rank]))


def spread(
    model: Network, length: int, rank: int, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Replaces the model's attention modules with context-parallel ones.

    Also restricts the model to this rank's positions in each sequence.
    """
    ranks = group.size()
    model.positions = positions(length, rank, ranks).to(device)
    model.parts = ranks
    order = (
        torch.cat([positions(length, other, ranks) for other in range(ranks)]).argsort().to(device)
    )
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, Attend):
                setattr(parent, name, GatheredAttend(child, rank, group, order))


class GatheredAttend(nn.Module):
    """Context-parallel attention, in which this rank's queries attend to all ranks' keys."""

    def __init__(self, whole: Attend, rank: int, group: dist.ProcessGroup, order: Tensor) -> None:
        super().__init__()
        self.causal = whole.causal
        self.dropout = whole.dropout
        self.rank = rank
        self.group = group
        self.order = order

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns the attention output [B, H, T / R, E] for q, k and v [B, heads, T / R, E].

        A mask [B, 1, T / R, T] marks the keys that each query attends to.
        """
        gathered = [GatherSequence.apply(part, self.group) for part in (k, v)]  # type: ignore[no-untyped-call]
        k, v = (part.index_select(2, self.order) for part in gathered)
        if not self.causal or mask is not None:
            return self._attend(q, k, v, mask)
        pieces = (self.rank, 2 * self.group.size() - 1 - self.rank)
        size = q.shape[2] // 2
        outs = []
        for piece, part in zip(pieces, q.chunk(2, dim=2), strict=True):
            end = (piece + 1) * size  # a piece attends to earlier pieces, and causally to itself
            outs.append(
                self._attend(part, k[:, :, :end], v[:, :, :end], causal_lower_right(size, end))
            )
        return torch.cat(outs, dim=2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        shared = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=shared
        )


class GatherSequence(torch.autograd.Function):
    """All-gather of [B, K, T / R, E] to [B, K, T, E] in rank order, with autograd support.

    The backward pass reduce-scatters the gradient.
    """

    @staticmethod
    def forward(ctx, part, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        parts = [
            torch.empty_like(part, memory_format=torch.contiguous_format)
            for _ in range(group.size())
        ]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        parts = [part.contiguous() for part in gradient.chunk(ctx.group.size(), dim=2)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None
