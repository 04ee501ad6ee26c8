"""Computes the losses in nats per guessed token, over fp32 logits, since a sum over the vocabulary
needs fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.memory import LOGITS_BYTES

MOST = 2.0**15  # half of the largest number of fp16
IGNORED = -100  # the target of a token that is not guessed
# fp32 logits [N, V], targets [N] and the reduction -> nats
Surprise = Callable[[Tensor, Tensor, str], Tensor]


def surprise(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Computes cross-entropy of complete logits, or of a DTensor's slices."""
    return F.cross_entropy(logits, targets, reduction=reduction)


def next_token_loss(
    x: Tensor,
    head: nn.Linear,
    targets: Tensor,
    reduction: str = "mean",
    surprise: Surprise = surprise,
) -> Tensor:
    """Computes cross-entropy of every position of x [B, T, D] against targets [B, T].

    If all logits would take more than LOGITS_BYTES, they are computed piece by piece, and once: a
    piece's gradients are computed with its loss (`Pieces`). A rank with a part of the sequence also
    has a slice of the vocabulary; then all logits are computed at once.
    """
    pieces = (
        -(-targets.numel() * head.out_features * 4 // LOGITS_BYTES)
        if x.shape[:2] == targets.shape
        else 1
    )
    # not a plain matrix, or one with a bias
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
    """Computes the summed cross-entropy of x [N, D] through a matrix [V, D], in pieces of x, with
    the gradients on the way.

    So no piece's logits are kept or computed twice: the product x W is 1 of 3 that the head needs,
    and a backward pass that computes the logits again makes it 4. torch.utils.checkpoint, which
    would do that, does not run on PyTorch/XLA (2.9). Once compiled it saves nothing, as the
    backward pass computes all logits before it uses any (torch 2.13). torch's own
    linear_cross_entropy (2.13) is not compiled.
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
    """Returns the summed cross-entropy of fp32 logits [N, V], and its gradient, which overwrites
    them.
    """
    guessed = (targets != IGNORED)[:, None]
    places = torch.where(guessed, targets[:, None], 0)
    largest, wanted = logits.amax(1, keepdim=True), logits.gather(1, places)
    slope = logits.sub_(largest).exp_()
    sums = slope.sum(1, keepdim=True)
    slope.div_(sums).scatter_add_(1, places, -torch.ones_like(wanted)).mul_(guessed)
    return torch.where(guessed, largest + sums.log() - wanted, 0).sum(), slope


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds a product of matrices to a total, in place; without a copy if all have one number
    format.

    `left` has numbers up to 1. In fp16 `right` is scaled down so that no sum overflows: the loss
    scale comes too late for that.
    """
    if left.dtype == torch.half:
        room = (MOST / (len(right) * right.abs().amax().float())).clamp(max=1.0)
        total.addcmul_(left @ (right * room).half(), 1 / room)
    elif total.dtype == left.dtype == right.dtype:
        total.addmm_(left, right)
    else:  # products are cast (autocast), and the weights are not
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
    """Computes cross-entropy of the positions of x [B, T, D] with a target other than IGNORED: at
    most `guesses` per sequence.

    Only these go through the output layer, which for BERT-Large saves a tenth of all FLOPs. Their
    number is given, as counting them would make the host wait for the device. If x is one of
    `parts` of each sequence, the mean over the parts is the mean.
    """
    count, length = targets.shape
    # one more, for the positions that no guess fills
    flat = F.pad(targets.flatten(), (0, 1), value=IGNORED)
    chosen = first_positions(flat != IGNORED, count * min(guesses, length))
    total = surprise(head(x, chosen.clamp(max=count * length - 1)).float(), flat[chosen], "sum")
    return total * (parts / (count * guesses)) if reduction == "mean" else total


def first_positions(mask: Tensor, size: int) -> Tensor:
    """Returns the first `size` positions at which a mask [N] is true, [size], filled up with N - 1.

    It uses a running count and a scatter: every device has these, while torch.nonzero_static (2.13)
    is not among PyTorch/XLA's.
    """
    # the last place takes everything that does not count
    turn = torch.where(mask, mask.long().cumsum(0) - 1, size).clamp(max=size)
    positions = torch.arange(len(mask), device=mask.device)
    return torch.full((size + 1,), len(mask) - 1, device=mask.device).scatter(0, turn, positions)[
        :size
    ]
