"""Training losses, in nats per predicted token. Logits are converted to fp32, because a sum over
the vocabulary needs that precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.memory import LOGITS_BYTES

MOST = 2.0**15  # half of the fp16 maximum
IGNORED = -100  # target of a token that is not predicted
# Function that maps fp32 logits [N, V], targets [N] and a reduction to a loss in nats.
Surprise = Callable[[Tensor, Tensor, str], Tensor]


def surprise(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Returns the cross-entropy of logits, which may be a DTensor sharded along the vocabulary."""
    return F.cross_entropy(logits, targets, reduction=reduction)


def next_token_loss(
    x: Tensor,
    head: nn.Linear,
    targets: Tensor,
    reduction: str = "mean",
    surprise: Surprise = surprise,
) -> Tensor:
    """Returns the cross-entropy of every position of x [B, T, D] against targets [B, T].

    If the logits would exceed LOGITS_BYTES, they are computed in pieces, together with their
    gradients (`Pieces`). With tensor parallelism, x is only part of the sequence and the head is a
    vocabulary slice, so all logits are computed at once.
    """
    pieces = (
        -(-targets.numel() * head.out_features * 4 // LOGITS_BYTES)
        if x.shape[:2] == targets.shape
        else 1
    )
    # Pieces support only a plain linear layer without bias.
    if pieces == 1 or type(head) is not nn.Linear or len(list(head.parameters())) > 1:
        return _surprise(head, x, targets, reduction, surprise)
    x, targets = x.flatten(0, 1), targets.flatten()
    if torch.is_grad_enabled():
        total: Tensor = Pieces.apply(x, head.weight, targets, pieces)  # type: ignore[no-untyped-call]
    else:
        parts = zip(x.chunk(pieces), targets.chunk(pieces), strict=True)
        total = torch.stack([_surprise(head, *part, "sum", surprise) for part in parts]).sum()
    return total / targets.numel() if reduction == "mean" else total


class Pieces(torch.autograd.Function):
    """Summed cross-entropy of x [N, D] through a matrix [V, D].

    The forward pass computes the loss and its gradients in pieces of x, so no logits are kept for
    the backward pass. Recomputing them there would cost the head four matmuls instead of three.

    torch.utils.checkpoint recomputes them and does not run on PyTorch/XLA (2.9). Once compiled, it
    saves nothing, because the backward pass computes all logits before it uses any (torch 2.13).
    torch.compile does not compile torch's linear_cross_entropy (2.13).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, pieces: int) -> Tensor:
        total = torch.zeros((), device=x.device)
        to_x, to_weight = (
            [],
            torch.zeros_like(weight, dtype=torch.float if weight.dtype == torch.half else None),
        )
        for part, wanted in zip(x.chunk(pieces), targets.chunk(pieces), strict=True):
            logits = F.linear(part, weight)
            format_, logits = logits.dtype, logits.float()
            loss, slope = surprise_and_slope(logits, wanted)
            slope = slope.to(format_)
            total = total + loss
            to_x.append((slope @ weight).to(x.dtype))
            add_product(to_weight, slope.t(), part)
        ctx.save_for_backward(torch.cat(to_x), to_weight)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        to_x, to_weight = ctx.saved_tensors
        return to_x * gradient, to_weight * gradient, None, None


def surprise_and_slope(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the summed cross-entropy of fp32 logits [N, V] and its gradient. The gradient
    overwrites the logits.
    """
    guessed = (targets != IGNORED)[:, None]
    places = torch.where(guessed, targets[:, None], 0)
    largest, wanted = logits.amax(1, keepdim=True), logits.gather(1, places)
    slope = logits.sub_(largest).exp_()
    sums = slope.sum(1, keepdim=True)
    slope.div_(sums).scatter_add_(1, places, -torch.ones_like(wanted)).mul_(guessed)
    return torch.where(guessed, largest + sums.log() - wanted, 0).sum(), slope


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds a matmul's result to `total` in place, without a copy if all tensors have the same
    dtype.

    `left` has magnitudes up to 1. In fp16, `right` is scaled down so that no sum overflows, because
    the loss scale is applied only later.
    """
    if left.dtype == torch.half:
        room = (MOST / (len(right) * right.abs().amax().float())).clamp(max=1.0)
        total.addcmul_(left @ (right * room).half(), 1 / room)
    elif total.dtype == left.dtype == right.dtype:
        total.addmm_(left, right)
    else:  # autocast casts matmuls but not weights
        total.add_(left @ right.to(left.dtype))


def _surprise(
    head: nn.Linear, x: Tensor, targets: Tensor, reduction: str, surprise: Surprise
) -> Tensor:
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
    """Returns the cross-entropy of the positions in x [B, T, D] whose target is not IGNORED, at
    most `guesses` per sequence.

    Only these positions pass through the output layer, which saves a tenth of BERT-Large's FLOPs.
    Their number is an argument, because counting them would make the host wait for the device. If x
    is one of `parts` of each sequence, averaging over all parts gives the mean loss.
    """
    count, length = targets.shape
    # one extra position to pad `chosen` with
    flat = F.pad(targets.flatten(), (0, 1), value=IGNORED)
    chosen = first_positions(flat != IGNORED, count * min(guesses, length))
    total = surprise(head(x, chosen.clamp(max=count * length - 1)).float(), flat[chosen], "sum")
    return total * (parts / (count * guesses)) if reduction == "mean" else total


def first_positions(mask: Tensor, size: int) -> Tensor:
    """Returns the first `size` positions at which a mask [N] is true, padded with N - 1.

    A cumulative sum and a scatter work on every device, whereas PyTorch/XLA lacks
    torch.nonzero_static (2.13).
    """
    # The extra last slot receives all positions that are not selected.
    turn = torch.where(mask, mask.long().cumsum(0) - 1, size).clamp(max=size)
    positions = torch.arange(len(mask), device=mask.device)
    return torch.full((size + 1,), len(mask) - 1, device=mask.device).scatter(0, turn, positions)[
        :size
    ]
