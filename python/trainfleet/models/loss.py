"""The losses: in nats per guessed token, over fp32 logits, since a sum over the vocabulary needs them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..config.memory import LOGITS_BYTES

IGNORED = -100  # the target of a token that is not guessed
Surprise = Callable[[Tensor, Tensor, str], Tensor]  # fp32 logits [N, V], targets [N] and how to reduce -> nats


def surprise(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Cross-entropy of logits that are whole, or a DTensor's slices."""
    return F.cross_entropy(logits, targets, reduction=reduction)


def next_token_loss(
    x: Tensor, head: nn.Linear, targets: Tensor, reduction: str = "mean", surprise: Surprise = surprise
) -> Tensor:
    """Cross-entropy of every position of x [B, T, D] against targets [B, T].

    Where all logits would take more than LOGITS_BYTES, they are computed piece by piece, and again for the backward pass; torch's
    own linear_cross_entropy (2.13) is neither compiled nor of slices of the vocabulary. Where a rank has a part of the sequence,
    it has a slice of the vocabulary too, and all goes at once.
    """
    pieces = -(-targets.numel() * head.out_features * 4 // LOGITS_BYTES) if x.shape[:2] == targets.shape else 1
    if pieces == 1:
        return _surprise(head, x, targets, reduction, surprise)
    parts = zip(x.flatten(0, 1).chunk(pieces), targets.flatten().chunk(pieces), strict=True)
    losses = [checkpoint(_surprise, head, *part, "sum", surprise, use_reentrant=False) for part in parts]
    total = torch.stack(losses).sum()
    return total / targets.numel() if reduction == "mean" else total


def _surprise(head: nn.Linear, x: Tensor, targets: Tensor, reduction: str, surprise: Surprise) -> Tensor:
    return surprise(head(x).float().flatten(0, -2), targets.flatten(), reduction)


def hidden_token_loss(
    x: Tensor,
    head: Callable[[Tensor, Tensor], Tensor],
    targets: Tensor,
    guesses: int,
    parts: int = 1,
    reduction: str = "mean",
    surprise: Surprise = surprise,
) -> Tensor:
    """Cross-entropy of the positions of x [B, T, D] whose target is not IGNORED: `guesses` of each sequence at most.

    Only these go through the output layer, which for BERT-Large saves a tenth of all FLOPs. Their number is given, as to count
    them would make the host wait for the device. Where x is one of `parts` of each sequence, the mean over the parts is the mean.
    """
    count, length = targets.shape
    flat = F.pad(targets.flatten(), (0, 1), value=IGNORED)  # one more, for the positions that no guess fills
    chosen = first_positions(flat != IGNORED, count * min(guesses, length))
    total = surprise(head(x, chosen.clamp(max=count * length - 1)).float(), flat[chosen], "sum")
    return total * (parts / (count * guesses)) if reduction == "mean" else total


def first_positions(mask: Tensor, size: int) -> Tensor:
    """Where a mask [N] is true: its first `size` positions, [size], filled up with N - 1.

    By a running count and a scatter: every device has these, while torch.nonzero_static (2.13) is not among PyTorch/XLA's.
    """
    turn = torch.where(mask, mask.long().cumsum(0) - 1, size).clamp(max=size)  # the last place is for all that does not count
    positions = torch.arange(len(mask), device=mask.device)
    return torch.full((size + 1,), len(mask) - 1, device=mask.device).scatter(0, turn, positions)[:size]
