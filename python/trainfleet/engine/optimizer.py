"""Builds the configured optimizer, sets its learning rate, and clips gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..config.optimizers import OPTIMIZERS
from ..config.tables import named
from ..config.types import Train
from ..devices import Device
from ..models.network import Network
from .optimizers import AdamW, Group, Lamb, Muon, RoundedAdamW, renew


@dataclass(frozen=True)
class Making:
    """Inputs for building an optimizer.

    Weight decay applies to `matrices` but not to `vectors`, because a norm's gain only scales its
    output. `precision` is the matmul dtype. `inside` is the name prefix of the block parameters.
    """

    matrices: dict[str, nn.Parameter]
    vectors: dict[str, nn.Parameter]
    train: Train
    device: Device
    precision: torch.dtype
    inside: str

    @property
    def settings(self) -> Group:
        train = self.train
        return {
            "lr": train.learning_rate,
            "betas": (train.beta1, train.beta2),
            "eps": train.epsilon,
        }

    def groups(self, **of_matrices: Any) -> list[Group]:
        """Returns one parameter group for matrices and one for vectors.

        Keyword arguments apply only to the matrices.
        """
        decayed = {
            "params": list(self.matrices.values()),
            "weight_decay": self.train.weight_decay,
            **of_matrices,
        }
        return [decayed, self.undecayed]

    @property
    def undecayed(self) -> Group:
        return {"params": list(self.vectors.values()), "weight_decay": 0.0}


def build(
    model: nn.Module, train: Train, device: Device, precision: torch.dtype = torch.float32
) -> torch.optim.Optimizer:
    """Builds the optimizer named in `train.optimizer`.

    Raises:
        KeyError: config/optimizers.py does not define it.
    """
    make: Callable[[Making], torch.optim.Optimizer] = named(OPTIMIZERS[train.optimizer].made_by)
    parameters = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    matrices = {name: parameter for name, parameter in parameters.items() if parameter.ndim >= 2}
    vectors = {name: parameter for name, parameter in parameters.items() if parameter.ndim < 2}
    inside = f"{model.plan.blocks}." if isinstance(model, Network) else ""
    return make(Making(matrices, vectors, train, device, precision, inside))


def adamw(of: Making) -> torch.optim.Optimizer:
    """Builds AdamW.

    Uses RoundedAdamW for bf16 weights, otherwise torch's fused AdamW if the device supports it.
    """
    if of.train.param_dtype == "bf16":
        step = of.device.compiled(renew, dynamic=True) if of.train.compile else renew
        names = {parameter: name for name, parameter in (of.matrices | of.vectors).items()}
        return RoundedAdamW(of.groups(), names, of.train.seed, step, **of.settings)
    if of.device.fused_adamw:
        return torch.optim.AdamW(by_mesh(of.groups()), fused=True, **of.settings)
    return AdamW(of.groups(), **of.settings)


def lamb(of: Making) -> torch.optim.Optimizer:
    return Lamb(of.groups(matrix=True), **of.settings)


def muon(of: Making) -> torch.optim.Optimizer:
    """Builds Muon for matrices in the blocks, with AdamW for all other parameters.

    Muon computes in the matmul dtype: fp32, fp16 or bf16.
    """
    decayed = {"weight_decay": of.train.weight_decay}
    straight = [parameter for name, parameter in of.matrices.items() if name.startswith(of.inside)]
    others = [
        parameter for name, parameter in of.matrices.items() if not name.startswith(of.inside)
    ]
    groups = [
        {"params": straight, "matrix": True, **decayed},
        {"params": others, **decayed},
        of.undecayed,
    ]
    return Muon(
        groups,
        of.precision if of.precision in (torch.float32, torch.float16) else torch.bfloat16,
        **of.settings,
    )


def by_mesh(groups: list[Group]) -> list[Group]:
    """Splits parameter groups by device mesh.

    A fused optimizer step requires all parameters in a group to share a mesh.
    """
    found = []
    for group in groups:
        ways: dict[Any, list[Tensor]] = {}
        for parameter in group["params"]:
            ways.setdefault(
                parameter.device_mesh if isinstance(parameter, DTensor) else None, []
            ).append(parameter)
        found += [group | {"params": parameters} for parameters in ways.values()]
    return found


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def leave_out(optimizer: torch.optim.Optimizer, whether: Tensor) -> None:
    """Makes the next optimizer step a no-op if the device tensor `whether` is 1.0.

    Uses the `found_inf` protocol of torch's fused optimizers.
    """
    optimizer.found_inf = whether  # type: ignore[attr-defined]


def clip(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Clips gradients to the global norm `limit` and returns the original norm as a device tensor.

    A limit of 0 disables clipping.
    """
    parameters = list(parameters)
    norm = get_total_norm(
        [parameter.grad for parameter in parameters if parameter.grad is not None]
    )
    if limit:
        clip_grads_with_norm_(parameters, limit, norm)
    return norm
