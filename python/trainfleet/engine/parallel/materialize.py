"""Draws a rank's own weights, in place of parameters on the meta device."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ...devices import Device
from ...models.network import Network


@torch.no_grad()
def draw(model: Network, seed: int, device: Device, format_: torch.dtype) -> None:
    """Allocates every parameter of the model on the device and fills it with its first values, in a
    number format.

    The values are the same as in one process: for a slice of a matrix, a rank draws the entire
    matrix and keeps the slice. So no rank ever holds more than its own part and one entire matrix.
    """
    made: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                values = model.draw(f"{prefix}.{name}", parameter.shape, seed, device.generator).to(
                    device.torch_device
                )
                made[id(parameter)] = nn.Parameter(slice_of(values, parameter).to(format_))
            module._parameters[name] = made[id(parameter)]


def slice_of(values: Tensor, parameter: Tensor) -> Tensor:
    """Returns this rank's slice of an entire tensor, laid out like the parameter."""
    if not isinstance(parameter, DTensor):
        return values
    mesh, placements = parameter.device_mesh, parameter.placements
    part = distribute_tensor(values, mesh, placements, src_data_rank=None).to_local().clone()
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
