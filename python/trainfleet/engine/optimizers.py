"""AdamW, LAMB and Muon for sharded and tensor-parallel parameters, with support for skipped steps.

A step is skipped if the device tensor `found_inf` is 1, as in torch's fused optimizers. The host
therefore never blocks to find out whether a step is valid.

RoundedAdamW keeps weights and moments in bf16 with stochastic rounding, which halves the memory of
fp32. bf16 has 8 significant bits, so round-to-nearest discards updates below 1/512 of a weight,
which most updates are. With a beta2 of 0.999, second moments would never decrease. Stochastic
rounding rounds up with a probability equal to the truncated fraction, so it is unbiased (Gupta et
al. 2015, arXiv:1502.02551; for bf16, Zamirai et al. 2020, arXiv:2010.06192).

The random bits depend only on the seed, the step, the parameter's name and the position in the full
matrix. A resumed run therefore rounds exactly as an uninterrupted one would, in any layout, and
replicas of a weight stay identical.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Group = dict[str, Any]
# Newton-Schulz coefficients: the quintic with the steepest slope at 0 (Jordan 2024, "Muon").
QUINTIC = (3.4445, -4.7750, 2.0315)
ROUNDS = 5
AT_ONCE = 1 << 24  # maximum number of elements orthogonalized at once: 64 MiB in fp32
# Typical RMS of AdamW updates, to which Muon's are scaled so that the same learning rate suits both
# (arXiv:2502.16982).
MATCH = 0.2
CUT = 0xFFFF  # number of fp32 mantissa bits that bf16 lacks
# 2^32 divided by the golden ratio, as int32. Its multiples are well distributed (Knuth, volume 3,
# 6.4).
WEYL = 0x9E3779B9 - (1 << 32)
# MurmurHash3's multipliers (Appleby 2011), as int32
MURMUR = (0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32))
# maximum number of elements converted to fp32 at once without compilation: 256 MiB
ROUNDED_AT_ONCE = 1 << 26
Step = Callable[..., None]
# A parameter's hash key [], and the row indices [R, 1] and column indices [1, C] of this rank's
# part.
Extent = tuple[Tensor, Tensor, Tensor]


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017).

    For devices that don't support torch's fused AdamW.
    """

    found_inf: Tensor | None = None

    def __init__(
        self, groups: Iterable[Group], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(
            list(groups),
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "matrix": False},
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        keep = 1.0 if self.found_inf is None else 1 - self.found_inf
        for group in self.param_groups:
            for parameters in self.together(group):
                self._update(parameters, group, keep)

    def _update(self, parameters: list[Tensor], group: Group, keep: Any) -> None:
        for parameter, change in zip(
            parameters, self.changes(parameters, group, keep), strict=True
        ):
            parameter.mul_(
                1 - keep * group["lr"] * group["weight_decay"] * (not self.decays_in_change)
            )
            parameter.sub_(change * (keep * group["lr"]))

    def together(self, group: Group) -> Iterable[list[Tensor]]:
        """Yields lists of parameters that have gradients. Each list is updated as one batch."""
        return ([parameter] for parameter in group["params"] if parameter.grad is not None)

    def changes(self, parameters: list[Tensor], group: Group, keep: Any) -> Iterable[Tensor]:
        """Returns the update of each parameter, as computed by `change`."""
        return (
            self.change(parameter, self.gradient(parameter), group, keep)
            for parameter in parameters
        )

    def gradient(self, parameter: Tensor) -> Tensor:
        """Returns the parameter's gradient.

        If steps can be skipped, replaces non-finite values with 0.
        """
        gradient = (
            parameter.grad
            if self.found_inf is None
            else torch.nan_to_num(parameter.grad, 0.0, 0.0, 0.0)  # type: ignore[arg-type]
        )
        assert gradient is not None
        return gradient

    decays_in_change = False

    def change(self, parameter: Tensor, gradient: Tensor, group: Group, keep: Any) -> Tensor:
        """Returns the parameter's update, before it is multiplied by the learning rate.

        This is Adam's update with bias correction (Kingma and Ba 2014, arXiv:1412.6980). Updates
        the moments if `keep` is 1, and leaves them unchanged if it is 0.
        """
        step, mean, square = self.moments(parameter)
        beta1, beta2 = group["betas"]
        step += keep
        mean.add_((gradient - mean) * ((1 - beta1) * keep))
        square.add_((gradient.square() - square) * ((1 - beta2) * keep))
        return unbiased(mean, square, step, beta1, beta2, group["eps"])

    def moments(self, parameter: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the parameter's step count, and the first and second moments."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state["step"], state["exp_avg"], state["exp_avg_sq"]


def unbiased(
    mean: Tensor, square: Tensor, step: Tensor, beta1: Any, beta2: Any, epsilon: Any
) -> Tensor:
    """Returns Adam's update from the moments, with bias correction."""
    steps = step.clamp(min=1)
    change: Tensor = mean / (1 - beta1**steps) / ((square / (1 - beta2**steps)).sqrt() + epsilon)
    return change


class Lamb(AdamW):
    """LAMB: Adam with each matrix's update scaled to the norm of the matrix.

    This is algorithm 2 of You et al. 2019, arXiv:1904.00962.
    """

    decays_in_change = True

    def change(self, parameter: Tensor, gradient: Tensor, group: Group, keep: Any) -> Tensor:
        change = super().change(parameter, gradient, group, keep)
        if not group["matrix"]:
            return change
        change = change + group["weight_decay"] * parameter
        size, length = whole(parameter.norm()), whole(change.norm())
        ratio = torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size))
        scaled: Tensor = change * ratio
        return scaled


class Muon(AdamW):
    """Orthogonalized momentum for matrices in the blocks (Jordan 2024), and AdamW for the rest.

    Orthogonalization requires full matrices, so sharded ones are gathered first. Matrices of the
    same shape are batched, because a small model's matrices are too small to keep a device busy
    individually.
    """

    def __init__(
        self, groups: Iterable[Group], format_: torch.dtype = torch.float32, **settings: Any
    ) -> None:
        """Creates the optimizer.

        `format_` is the dtype of the orthogonalization matmuls.
        """
        super().__init__(groups, **settings)
        self.format = format_

    def together(self, group: Group) -> Iterable[list[Tensor]]:
        if not group["matrix"]:
            yield from super().together(group)
            return
        alike: dict[tuple[int, ...], list[Tensor]] = {}
        for [parameter] in super().together(group):
            alike.setdefault(tuple(sorted(parameter.shape)), []).append(parameter)
        for shape, parameters in alike.items():
            most = max(1, AT_ONCE // math.prod(shape))
            yield from (
                parameters[start : start + most] for start in range(0, len(parameters), most)
            )

    def changes(self, parameters: list[Tensor], group: Group, keep: Any) -> Iterable[Tensor]:
        if not group["matrix"]:
            return super().changes(parameters, group, keep)
        straight = orthogonal(
            torch.stack([flat(whole(self._look_ahead(each, group, keep))) for each in parameters]),
            self.format,
        )
        straight *= MATCH * max(parameters[0].shape) ** 0.5
        whole_again = (
            matrix if is_flat(each) else matrix.T
            for matrix, each in zip(straight, parameters, strict=True)
        )
        return [placed(matrix, each) for matrix, each in zip(whole_again, parameters, strict=True)]

    def _look_ahead(self, parameter: Tensor, group: Group, keep: Any) -> Tensor:
        """Updates the momentum and returns Nesterov's look-ahead: a blend of gradient and new
        momentum.
        """
        state = self.state[parameter]
        beta = group["betas"][1]
        gradient = self.gradient(parameter)
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].add_((gradient - state["momentum"]) * ((1 - beta) * keep))
        ahead = gradient.lerp(state["momentum"], beta)
        # If both FSDP and tensor parallelism shard a parameter, lerp in torch 2.9 returns
        # placements that differ from those of its arguments.
        return joined(ahead.to_local(), parameter) if isinstance(ahead, DTensor) else ahead


def is_flat(matrix: Tensor) -> bool:
    return matrix.shape[0] <= matrix.shape[1]


def flat(matrix: Tensor) -> Tensor:
    """Returns the matrix, transposed if it has more rows than columns."""
    return matrix if is_flat(matrix) else matrix.T


def orthogonal(matrices: Tensor, format_: torch.dtype = torch.float32) -> Tensor:
    """Returns approximately U V^T for each matrix U S V^T in [N, rows, columns].

    The resulting singular values are between 0.7 and 1.2. Uses only matmuls, computed in `format_`.
    Pass matrices with no more rows than columns, because tall ones cost more.
    """
    a, b, c = QUINTIC
    x = (matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(format_)
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    found: Tensor = x.float()
    return found


def placed(matrix: Tensor, like: Tensor) -> Tensor:
    """Shards a fully replicated tensor into the layout of `like`, without communication."""
    if not isinstance(like, DTensor):
        return matrix
    (rows, columns), (row, column) = part_of(like)
    return joined(matrix[row : row + rows, column : column + columns], like)


def joined(part: Tensor, like: Tensor) -> DTensor:
    """Wraps this rank's local part as a DTensor with the layout of `like`."""
    assert isinstance(like, DTensor)
    return DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def part_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of this rank's part of a tensor, and its offset in the full tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), (0,) * tensor.ndim
    size, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return size, start


def whole(tensor: Tensor) -> Tensor:
    """Returns the full tensor, gathered from all ranks if it is sharded."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class RoundedAdamW(AdamW):
    """AdamW with stochastic rounding for bf16 parameters."""

    def __init__(
        self,
        groups: Iterable[Group],
        names: Mapping[nn.Parameter, str],
        seed: int,
        step: Step,
        **settings: Any,
    ) -> None:
        """Creates the optimizer.

        `settings` contains lr, betas and eps. `step` is `renew`, optionally compiled so that it
        reads and writes each value only once.
        """
        super().__init__(groups, **settings)
        self.names = names
        self.seed = seed
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
                self._round(parameter, numbers)

    def _round(self, parameter: nn.Parameter, numbers: list[Tensor]) -> None:
        step, *moments = self.moments(parameter)
        keep = torch.ones_like(step) if self.found_inf is None else 1 - self.found_inf
        step += keep
        key, rows, columns = self._extent(parameter)
        parts = [local(tensor).view(len(rows), -1) for tensor in (parameter, *moments)]
        parts += [local(parameter.grad).reshape(len(rows), -1), rows]  # type: ignore[arg-type]
        for pieces in zip(
            *(torch.split(part, max(1, ROUNDED_AT_ONCE // columns.numel())) for part in parts),
            strict=True,
        ):
            self.renew(*pieces, columns, key, step, keep, *numbers)

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


def numbers_of(group: Group, device: torch.device) -> list[Tensor]:
    """Returns the learning rate, weight decay, betas and epsilon as 0-d tensors.

    They are filled on the device to avoid a blocking copy. Floats would be baked into the compiled
    code, and torch 2.13's compile cache would reuse code compiled for different values.
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
    """Runs an AdamW step in fp32 on a bf16 parameter [R, C] and its two moments.

    The update follows Loshchilov and Hutter 2017, arXiv:1711.05101. `keep` is 1, or 0 to skip the
    step. A skipped step changes nothing, because values that bf16 can represent round to
    themselves.
    """
    gradient = torch.where(keep > 0, gradient.float(), 0.0)
    mean = first.float() + (gradient - first.float()) * ((1 - beta1) * keep)
    square = second.float() + (gradient.square() - second.float()) * ((1 - beta2) * keep)
    change = unbiased(mean, square, step, beta1, beta2, epsilon)
    weight = parameter.float() * (1 - keep * rate * decay) - change * (keep * rate)
    one, other = (chance(key, step.int() * 2 + draw, rows, columns) for draw in (0, 1))
    parameter.copy_(rounded(weight, one))
    first.copy_(rounded(mean, other))
    second.copy_(rounded(square, one >> 16))


def rounded(value: Tensor, chance: Tensor) -> Tensor:
    """Rounds fp32 to bf16 stochastically.

    Adds the low 16 bits of `chance` to the value's bits, and clears the low 16 bits of the sum.
    """
    return (
        ((value.view(torch.int32) + (chance & CUT)) & ~CUT).view(torch.float32).to(torch.bfloat16)
    )


def chance(key: Tensor, draw: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Returns 32 random bits per matrix element, as int32 [R, C].

    Different values of `draw` give independent bits.
    """
    return mixed(mixed(rows ^ mixed(key ^ mixed(draw))) + columns * WEYL)


def mixed(x: Tensor) -> Tensor:
    """Hashes int32 values with MurmurHash3's finalizer.

    It is a bijection in which every input bit affects all output bits.
    """
    x = (x ^ x >> 16 & 0xFFFF) * MURMUR[0]
    x = (x ^ x >> 13 & 0x7FFFF) * MURMUR[1]
    return x ^ x >> 16 & 0xFFFF


def extent_of(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the row [R, 1] and column [1, C] indices of this rank's part within the full
    parameter.

    A vector counts as a single column.
    """
    size, start = part_of(parameter)
    (height, width), (row, column) = (*size, 1)[:2], (*start, 0)[:2]
    rows = torch.arange(row, row + height, dtype=torch.int32, device=parameter.device)
    columns = torch.arange(column, column + width, dtype=torch.int32, device=parameter.device)
    return rows[:, None], columns[None]
