"""The losses: in nats a guessed token, over fp32 logits, since a sum over the vocabulary needs them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..config.memory import LOGITS_BYTES

IGNORED = -100  # the target of a token that is not guessed


def next_token_loss(x: Tensor, head: nn.Linear, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of every position of x [B, T, D] against targets [B, T].

    Where all logits would take more than LOGITS_BYTES, they are computed piece by piece, and again for the backward pass; torch's
    own linear_cross_entropy (2.13) is neither compiled nor of slices of the vocabulary. Where a rank has a part of the sequence,
    it has a slice of the vocabulary too, and all goes at once.
    """
    pieces = -(-targets.numel() * head.out_features * 4 // LOGITS_BYTES) if x.shape[:2] == targets.shape else 1
    if pieces == 1:
        return _surprise(head, x, targets, reduction)
    parts = zip(x.flatten(0, 1).chunk(pieces), targets.flatten().chunk(pieces), strict=True)
    losses = [checkpoint(_surprise, head, *part, "sum", use_reentrant=False) for part in parts]
    total = torch.stack(losses).sum()
    return total / targets.numel() if reduction == "mean" else total


def _surprise(head: nn.Linear, x: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(head(x).float().flatten(0, -2), targets.flatten(), reduction=reduction)


def hidden_token_loss(
    x: Tensor,
    head: Callable[[Tensor, Tensor], Tensor],
    targets: Tensor,
    guesses: int,
    parts: int = 1,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of the positions of x [B, T, D] whose target is not IGNORED: `guesses` of each sequence at most.

    Only these go through the output layer, which for BERT-Large saves a tenth of all FLOPs. Their number is given, as to count
    them would make the host wait for the device. Where x is one of `parts` of each sequence, the mean over the parts is the mean.
    """
    count, length = targets.shape
    flat = F.pad(targets.flatten(), (0, 1), value=IGNORED)  # one more, for the places that no guess fills
    chosen = torch.nonzero_static(flat != IGNORED, size=count * min(guesses, length), fill_value=count * length).squeeze(1)
    total = F.cross_entropy(head(x, chosen.clamp(max=count * length - 1)).float(), flat[chosen], reduction="sum")
    return total * (parts / (count * guesses)) if reduction == "mean" else total
