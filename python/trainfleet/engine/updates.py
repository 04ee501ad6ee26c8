"""AdamW, LAMB and Muon as torch optimizers, for sharded and split parameters too; a step can be skipped.

`found_inf`, a tensor on the device, is the protocol of torch's fused optimizers: where it is 1, a step changes nothing. So the
host never waits to learn whether a step is a good one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

Groups = Iterable[dict[str, Any]]
# Newton-Schulz's coefficients: a quintic whose slope at 0 is as steep as it can be (Jordan 2024, "Muon").
QUINTIC = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
MATCH = 0.2  # root mean square of AdamW's usual updates, which Muon's get, so that both take one learning rate (arXiv:2502.16982)


class Update(torch.optim.Optimizer, ABC):
    """An optimizer whose step is a function of one parameter, its gradient and its state. Weight decay is decoupled."""

    found_inf: Tensor | None = None

    def __init__(self, groups: Groups, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(list(groups), {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "matrix": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        keep = 1.0 if self.found_inf is None else 1 - self.found_inf
        gradient = parameter.grad if self.found_inf is None else torch.nan_to_num(parameter.grad, 0.0, 0.0, 0.0)  # type: ignore[arg-type]
        assert gradient is not None
        change = self.change(parameter, gradient, group, keep)
        parameter.mul_(1 - keep * group["lr"] * group["weight_decay"] * (not self.decays_in_change))
        parameter.sub_(change * (keep * group["lr"]))

    decays_in_change = False

    @abstractmethod
    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], keep: Any) -> Tensor:
        """The parameter's update before the learning rate; the state changes where `keep` is 1, and stays where it is 0."""

    def adam(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], keep: Any) -> Tensor:
        """Adam's change with its bias corrected (Kingma and Ba 2014, arXiv:1412.6980)."""
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += keep
        state["exp_avg"].add_((gradient - state["exp_avg"]) * ((1 - beta1) * keep))
        state["exp_avg_sq"].add_((gradient.square() - state["exp_avg_sq"]) * ((1 - beta2) * keep))
        steps = state["step"].clamp(min=1)
        root = (state["exp_avg_sq"] / (1 - beta2**steps)).sqrt() + group["eps"]
        change: Tensor = state["exp_avg"] / (1 - beta1**steps) / root
        return change


class AdamW(Update):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017), where torch's fused one does not run."""

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], keep: Any) -> Tensor:
        return self.adam(parameter, gradient, group, keep)


class Lamb(Update):
    """Adam, with each matrix's update scaled to the matrix's own norm (You et al. 2019, arXiv:1904.00962, algorithm 2)."""

    decays_in_change = True

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], keep: Any) -> Tensor:
        change = self.adam(parameter, gradient, group, keep)
        if not group["matrix"]:
            return change
        change = change + group["weight_decay"] * parameter
        size, length = whole(parameter.norm()), whole(change.norm())
        ratio = torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size))
        scaled: Tensor = change * ratio
        return scaled


class Muon(Update):
    """Orthogonalized momentum for the matrices of the blocks (Jordan 2024); AdamW for all else.

    A matrix of several ranks is gathered for it, as all of it is needed to make it orthogonal.
    """

    def change(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], keep: Any) -> Tensor:
        if not group["matrix"]:
            return self.adam(parameter, gradient, group, keep)
        state, beta = self.state[parameter], group["betas"][1]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].add_((gradient - state["momentum"]) * ((1 - beta) * keep))
        looked_ahead = gradient.lerp(state["momentum"], beta)  # Nesterov's
        matrix = whole(looked_ahead)
        straight: Tensor = orthogonal(matrix) * (MATCH * max(matrix.shape) ** 0.5)
        if isinstance(parameter, DTensor):
            return distribute_tensor(straight, parameter.device_mesh, parameter.placements)
        return straight


def orthogonal(matrix: Tensor) -> Tensor:
    """U V^T, nearly, of a matrix U S V^T: singular values come out between 0.7 and 1.2, by products alone."""
    a, b, c = QUINTIC
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(ROUNDS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    straight: Tensor = x.T if matrix.shape[0] > matrix.shape[1] else x
    return straight


def whole(tensor: Tensor) -> Tensor:
    """A tensor of several ranks, gathered."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full
