"""The optimizer that the config names, and clipping."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..config.types import Train
from ..devices import Device
from ..models.network import Network
from .rounding import RoundedAdamW, renew
from .updates import AdamW, Lamb, Muon


def build(model: nn.Module, train: Train, device: Device, precision: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    """The optimizer of `train.optimizer`, which decays matrices and not vectors: a norm's gain only scales what follows it.

    `precision`: of the run's products, in which Muon's are computed too.
    """
    settings: dict[str, Any] = {"lr": train.learning_rate, "betas": (train.beta1, train.beta2), "eps": train.epsilon}
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decayed = {"weight_decay": train.weight_decay}
    vectors = {"params": [parameter for parameter in parameters.values() if parameter.ndim < 2], "weight_decay": 0.0}
    matrices = {name: parameter for name, parameter in parameters.items() if parameter.ndim >= 2}
    plain = [{"params": list(matrices.values()), **decayed}, vectors]
    if train.weights == "bf16":
        step = device.compiled(renew, dynamic=True) if train.compile else renew
        names = {parameter: name for name, parameter in parameters.items()}
        return RoundedAdamW(plain, names, train.seed, step, **settings)
    if train.optimizer == "adamw" and not device.fused_adamw:
        return AdamW(plain, **settings)
    if train.optimizer == "adamw":
        return torch.optim.AdamW(by_mesh(plain), fused=True, **settings)
    if train.optimizer == "lamb":
        return Lamb([plain[0] | {"matrix": True}, vectors], **settings)
    inside = f"{model.plan.blocks}." if isinstance(model, Network) else ""
    straight = [parameter for name, parameter in matrices.items() if name.startswith(inside)]
    others = [parameter for name, parameter in matrices.items() if not name.startswith(inside)]
    groups = [{"params": straight, "matrix": True, **decayed}, {"params": others, **decayed}, vectors]
    return Muon(groups, precision if precision in (torch.float32, torch.float16) else torch.bfloat16, **settings)


def by_mesh(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups, each split by the mesh of its parameters: a fused step takes parameters of one mesh only."""
    found = []
    for group in groups:
        ways: dict[Any, list[Tensor]] = {}
        for parameter in group["params"]:
            ways.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        found += [group | {"params": parameters} for parameters in ways.values()]
    return found


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def leave_out(optimizer: torch.optim.Optimizer, whether: Tensor) -> None:
    """Makes the next step change nothing where `whether`, on the device, is 1.0: the protocol of torch's fused optimizers."""
    optimizer.found_inf = whether  # type: ignore[attr-defined]


def clip(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """The gradients' global norm, left on the device; they are scaled down to `limit` when over it (0: never)."""
    parameters = list(parameters)
    norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if limit:
        clip_grads_with_norm_(parameters, limit, norm)
    return norm
