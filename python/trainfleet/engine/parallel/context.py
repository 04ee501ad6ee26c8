"""Implements context parallelism: each rank has a part of every sequence, and gathers the keys and
values of the others for attention.

Llama 3 was trained this way (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2). With
grouped heads, keys and values are small compared to the queries. Any kind of attention can be
computed from them, and this runs anywhere an all-gather does.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from ...models.network import Attend, Network


def positions(length: int, rank: int, ranks: int) -> Tensor:
    """Returns a rank's positions in a sequence: of 2 R pieces the r-th from the start and the r-th
    from the end.

    So all ranks have the same amount of work: with causal attention a late piece costs more than an
    early one.
    """
    pieces = torch.arange(length).chunk(2 * ranks)
    return torch.cat((pieces[rank], pieces[2 * ranks - 1 - rank]))


def spread(
    model: Network, length: int, rank: int, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Replaces every attention of the model by one over the entire sequence, of which this rank has
    `positions`.
    """
    ranks = group.size()
    model.positions, model.parts = positions(length, rank, ranks).to(device), ranks
    order = (
        torch.cat([positions(length, other, ranks) for other in range(ranks)]).argsort().to(device)
    )
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, Attend):
                setattr(parent, name, GatheredAttend(child, rank, group, order))


class GatheredAttend(nn.Module):
    """Attention of this rank's queries to the keys of all."""

    def __init__(self, whole: Attend, rank: int, group: dist.ProcessGroup, order: Tensor) -> None:
        super().__init__()
        self.causal, self.dropout = whole.causal, whole.dropout
        self.rank, self.group, self.order = rank, group, order

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: None = None) -> Tensor:
        """Maps q, k, v [B, heads, T / R, E] to [B, H, T / R, E]. There is no mask:
        config/cross_checks.py refuses configs that need one.
        """
        gathered = [GatherSequence.apply(part, self.group) for part in (k, v)]  # type: ignore[no-untyped-call]
        k, v = (part.index_select(2, self.order) for part in gathered)
        if not self.causal:
            return self._attend(q, k, v, None)
        pieces, size = (self.rank, 2 * self.group.size() - 1 - self.rank), q.shape[2] // 2
        outs = []
        for piece, part in zip(pieces, q.chunk(2, dim=2), strict=True):
            end = (piece + 1) * size  # a piece sees all before it, and itself causally
            outs.append(
                self._attend(part, k[:, :, :end], v[:, :, :end], causal_lower_right(size, end))
            )
        return torch.cat(outs, dim=2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        dropout, shared = self.dropout if self.training else 0.0, q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, enable_gqa=shared
        )


class GatherSequence(torch.autograd.Function):
    """Gathers [B, K, T / R, E] of each rank to [B, K, T, E], in rank order; backward sums the
    gradients and scatters them.
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
