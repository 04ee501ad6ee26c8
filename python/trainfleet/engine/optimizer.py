"""AdamW as language models use it, its learning rate as a function of the step, and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..config.types import Train


def build(model: nn.Module, train: Train) -> torch.optim.AdamW:
    """AdamW that decays matrices and not norms: shrinking a norm's gain only changes the scale of what follows it."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=(train.beta1, train.beta2), fused=True)


def learning_rate(train: Train, step: int) -> float:
    """The rate of step 1, 2, ...: linear warm-up to the peak, then a cosine to the floor, reached in the last step."""
    if step <= train.warmup_steps:
        return train.learning_rate * step / train.warmup_steps
    done = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return train.learning_rate * (train.learning_rate_floor + (1 - train.learning_rate_floor) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """The gradients' global norm, left on the device; they are scaled down to `limit` when over it (0: never)."""
    parameters = list(parameters)
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if limit:
        clip_grads_with_norm_(parameters, limit, norm)
    return norm
