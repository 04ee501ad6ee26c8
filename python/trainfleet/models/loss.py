"""The losses: in nats a guessed token, over fp32 logits, since a sum over the vocabulary needs them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100  # the target of a token that is not guessed


def next_token_loss(x: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy of every position of x [B, T, D] against targets [B, T]."""
    return F.cross_entropy(head(x).float().flatten(0, 1), targets.flatten(), reduction=reduction)


def hidden_token_loss(
    x: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor, guesses: int, reduction: str = "mean"
) -> Tensor:
    """Cross-entropy of the positions of x [B, T, D] whose target is not IGNORED: `guesses` of each sequence.

    Only these go through the output layer, which for BERT-Large saves a tenth of all FLOPs. Their number is given, as to count
    them would make the host wait for the device.
    """
    flat = targets.flatten()
    chosen = torch.nonzero_static(flat != IGNORED, size=guesses * targets.shape[0], fill_value=0).squeeze(1)
    return F.cross_entropy(head(x.flatten(0, 1)[chosen]).float(), flat[chosen], reduction=reduction)
