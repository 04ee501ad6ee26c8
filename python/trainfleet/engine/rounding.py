"""AdamW on weights and moments in bf16, each rounded up or down by chance: half the memory of fp32,
and no change is lost.

bf16 has 8 significant bits. So a change of less than a 512th of a weight, like most, would be
rounded away at every step. With a beta2 of 0.999, a second moment would never fall. This rounds up
with a probability equal to the cut-off part, so each number is right on average (Gupta et al. 2015,
arXiv:1502.02551; for bf16, Zamirai et al. 2020, arXiv:2010.06192).

Chance is a function only of the seed, the step, the parameter's name and the number's place in the
entire matrix. So a resumed run rounds like an unbroken one, on any layout, and the copies of a
weight on several ranks stay equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .optimizers import Groups, local, part_of

CUT = 0xFFFF  # the bits of fp32 that bf16 does not have
# 2^32 over the golden ratio: its multiples are far apart (Knuth, volume 3, 6.4), as an int32
WEYL = 0x9E3779B9 - (1 << 32)
# MurmurHash3's multipliers (Appleby 2011), as int32
MURMUR = (0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))
# numbers with fp32 copies at a time: 256 MiB each, without compilation
AT_ONCE = 1 << 26
Step = Callable[..., None]
# a parameter's key [], and the place of this rank's part of it: rows [R, 1], columns [1, C]
Extent = tuple[Tensor, Tensor, Tensor]


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW on bf16 parameters. If `found_inf`, on the device, is 1.0, a step changes nothing."""

    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: Groups,
        names: Mapping[nn.Parameter, str],
        seed: int,
        step: Step,
        **settings: Any,
    ) -> None:
        """Sets up AdamW; `settings`: lr, betas and eps. `step` is `renew`, as it is or compiled:
        compiled, it reads and writes each number once.
        """
        super().__init__(list(groups), {"weight_decay": 0.0, **settings})
        self.names, self.seed = names, seed
        self.extents: dict[Tensor, Extent] = {}
        self.renew = step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [
                each for each in group["params"] if each.grad is not None and local(each).numel()
            ]
            numbers = numbers_of(group, parameters[0].device) if parameters else []
            for parameter in parameters:
                self._update(parameter, numbers)

    def _update(self, parameter: nn.Parameter, numbers: list[Tensor]) -> None:
        state, device = self.state[parameter], parameter.device
        if not state:
            state["step"] = torch.zeros((), device=device)
            state["exp_avg"], state["exp_avg_sq"] = (
                torch.zeros_like(parameter),
                torch.zeros_like(parameter),
            )
        keep = torch.ones((), device=device) if self.found_inf is None else 1 - self.found_inf
        state["step"] += keep
        key, rows, columns = self._extent(parameter)
        parts = [
            local(tensor).view(len(rows), -1)
            for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"])
        ]
        parts += [local(parameter.grad).reshape(len(rows), -1), rows]  # type: ignore[arg-type]
        for pieces in zip(
            *(torch.split(part, max(1, AT_ONCE // columns.numel())) for part in parts), strict=True
        ):
            self.renew(*pieces, columns, key, state["step"], keep, *numbers)

    def _extent(self, parameter: nn.Parameter) -> Extent:
        if parameter not in self.extents:
            digest = hashlib.sha256(f"{self.seed} {self.names[parameter]}".encode()).digest()
            key = torch.tensor(
                int.from_bytes(digest[:4], "big", signed=True),
                dtype=torch.int32,
                device=parameter.device,
            )
            self.extents[parameter] = key, *extent_of(parameter)
        return self.extents[parameter]


def numbers_of(group: dict[str, Any], device: torch.device) -> list[Tensor]:
    """Returns rate, decay, betas and epsilon as tensors, created on the device without a blocking
    copy.

    A float would become part of a compiled step's code, and torch's cache (2.13) then mistakes code
    with another float for it (seen).
    """
    values = (group["lr"], group["weight_decay"], *group["betas"], group["eps"])
    return [torch.full((), value, device=device) for value in values]


def renew(
    parameter: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    rows: Tensor,
    columns: Tensor,
    key: Tensor,
    step: Tensor,
    keep: Tensor,
    rate: Tensor,
    decay: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    epsilon: Tensor,
) -> None:
    """Does a step of a parameter and both its moments, bf16 [R, C], in fp32 (Loshchilov and Hutter
    2017, arXiv:1711.05101).

    `keep` is 1, or 0 for a step that changes nothing: a number that bf16 holds exactly is never
    rounded to another.
    """
    gradient = torch.where(keep > 0, gradient.float(), 0.0)
    mean = first.float() + (gradient - first.float()) * ((1 - beta1) * keep)
    square = second.float() + (gradient.square() - second.float()) * ((1 - beta2) * keep)
    steps = step.clamp(min=1)
    change = mean / (1 - beta1**steps) / ((square / (1 - beta2**steps)).sqrt() + epsilon)
    weight = parameter.float() * (1 - keep * rate * decay) - change * (keep * rate)
    one, other = (chance(key, step.int() * 2 + draw, rows, columns) for draw in (0, 1))
    for tensor, value, bits in (
        (parameter, weight, one),
        (first, mean, other),
        (second, square, one >> 16),
    ):
        tensor.copy_(rounded(value, bits))


def rounded(value: Tensor, chance: Tensor) -> Tensor:
    """Rounds fp32 to bf16: its upper half, plus one if its lower half and that of `chance` add up
    to more than 16 bits.
    """
    return (
        ((value.view(torch.int32) + (chance & CUT)) & ~CUT).view(torch.float32).to(torch.bfloat16)
    )


def chance(key: Tensor, draw: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Returns 32 random bits, int32 [R, C], for each place in a matrix, from the `draw`-th draw for
    it.
    """
    return mixed(mixed(rows ^ mixed(key ^ mixed(draw))) + columns * WEYL)


def mixed(x: Tensor) -> Tensor:
    """Maps int32 to int32 so that every bit depends on all others: MurmurHash3's finalizer, a
    bijection.
    """
    x = (x ^ x >> 16 & 0xFFFF) * MURMUR[0]
    x = (x ^ x >> 13 & 0x7FFFF) * MURMUR[1]
    return x ^ x >> 16 & 0xFFFF


def extent_of(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows [R, 1] and columns [1, C] of the entire parameter that this rank has; a
    vector is one column.
    """
    size, start = part_of(parameter)
    (height, width), (row, column) = (*size, 1)[:2], (*start, 0)[:2]
    rows = torch.arange(row, row + height, dtype=torch.int32, device=parameter.device)
    columns = torch.arange(column, column + width, dtype=torch.int32, device=parameter.device)
    return rows[:, None], columns[None]
