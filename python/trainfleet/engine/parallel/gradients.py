"""Device mesh, and loss scaling, norm and clipping for gradients that are sharded across ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ...config import Config
from ...devices import Device

# Mesh dimensions, from the slowest links to the fastest. Ranks along `tensor` share a node, and
# ranks along `pipeline` are on different nodes.
DIMENSIONS = ("pipeline", "replicate", "shard", "tensor")


def scaled(loss: Tensor, scale: Tensor | None) -> Tensor:
    """Returns the loss for the backward pass, multiplied by the loss scale if one is set."""
    return loss if scale is None else loss * scale


@torch.no_grad()
def unscale(parameters: Iterable[Tensor], scale: Tensor) -> None:
    """Divides all gradients by the loss scale.

    The division is exact if the scale is a power of two.
    """
    torch._foreach_mul_(
        [local(parameter) for parameter in parameters if parameter.grad is not None], 1 / scale
    )


@torch.no_grad()
def clip(
    parameters: Iterable[Tensor], limit: float, mesh: Mesh, copies: frozenset[int] = frozenset()
) -> Tensor:
    """Clips gradients to the global norm `limit` and returns the original norm as a device tensor.

    Never makes the host wait for the device. A limit of 0 disables clipping.

    Each element counts exactly once in the norm: partial norms are summed across the ranks that
    shard a parameter. Parameters with ids in `copies` are excluded, because another rank counts
    them.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    total = norm(parameters, mesh, copies)
    if limit:
        scale = (limit / (total + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local(parameter) for parameter in parameters], scale)
    return total


def norm(parameters: list[Tensor], mesh: Mesh, copies: frozenset[int]) -> Tensor:
    """Returns the global L2 norm of the gradients."""
    parts: dict[tuple[str, ...], list[Tensor]] = {}
    for parameter in parameters:
        if id(parameter) not in copies:
            parts.setdefault(divided(parameter), []).append(local(parameter))
    device = local(parameters[0]).device
    total = torch.zeros((), device=device)
    for dimensions, gradients in sorted(parts.items()):
        square = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).square().sum()
        for dimension in dimensions:
            dist.all_reduce(square, group=mesh.group(dimension))
        total += square
    if mesh.layout.pipeline > 1:
        dist.all_reduce(total, group=mesh.group("pipeline"))
    return total.sqrt()


def divided(parameter: Tensor) -> tuple[str, ...]:
    """Returns the mesh dimensions along which a parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return ()
    names = parameter.device_mesh.mesh_dim_names or ()
    return tuple(
        name
        for name, placement in zip(names, parameter.placements, strict=True)
        if not placement.is_replicate()
    )


def local(parameter: Tensor) -> Tensor:
    """Returns this rank's part of a parameter's gradient, without a copy."""
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    # With sequence parallelism, a norm layer's gradient is a partial sum, so it must still be
    # reduced.
    if gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


class Mesh:
    """Grid of ranks (pipeline x replicate x shard x tensor), and this rank's position in it.

    Must be created on all ranks. Context-parallel ranks are adjacent along `shard`. They hold the
    same weights but different tokens, so FSDP treats them as data-parallel ranks.
    """

    def __init__(self, config: Config, device: Device) -> None:
        layout = config.train.parallelism
        self.layout = layout
        self.ways = config.data_parallel
        together = layout.fsdp * layout.context
        replicas = config.data_parallel // layout.fsdp
        self.grid = init_device_mesh(
            device.torch_device.type,
            (layout.pipeline, replicas, together, layout.tensor),
            mesh_dim_names=DIMENSIONS,
        )
        self.stage, replica, shared, _ = (int(index) for index in self.grid.get_coordinate() or ())
        self.context = shared % layout.context
        # this rank's data-parallel index, in range(ways)
        self.data = replica * layout.fsdp + shared // layout.context
        self.context_group = self._context_group()

    def group(self, dimension: str) -> dist.ProcessGroup:
        """Returns this rank's process group along the given mesh dimension."""
        return self.grid.get_group(dimension)

    def sharing(self) -> DeviceMesh:
        """Returns the mesh of ranks that hold the same part of the model.

        It has one dimension, or two if shards are replicated.
        """
        if self.grid["replicate"].size() == 1:
            return self.grid["shard"]
        return self.grid["replicate", "shard"]

    def _context_group(self) -> dist.ProcessGroup | None:
        if self.layout.context == 1:
            return None
        ranks = self.grid.mesh.movedim(2, -1).reshape(-1, self.layout.context)
        made: tuple[dist.ProcessGroup, object] = dist.new_subgroups_by_enumeration(ranks.tolist())  # type: ignore[no-untyped-call]
        return made[0]
