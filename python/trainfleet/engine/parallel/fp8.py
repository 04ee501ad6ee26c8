"""Runs the matrix products of blocks in fp8, forward and backward, by torchao.

Inputs and weights are rounded to e4m3 and gradients to e5m2 (Micikevicius et al. 2022,
arXiv:2209.05433), each tensor scaled by its largest number at this step. The optimizer's parameters
stay the same, and a checkpoint does not depend on fp8. The embedding and the output layer, which
suffer most from it, are outside the blocks and stay in bf16, like attention and norms.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ...devices import Device
from ...process.install_paths import installing
from ...trust.errors import RunError

MULTIPLE = 16  # divisor of both sides of a matrix, required by the instructions (torch._scaled_mm)


def convert(blocks: Iterable[nn.Module], device: Device) -> None:
    """Converts every matrix of the blocks that the instructions accept to fp8 products; the
    parameters stay the same objects.

    Raises:
        RunError: the device has no such instructions, or torchao is not installed.
    """
    if not device.native_fp8:
        raise RunError(
            "train.precision: this device does not support fp8",
            where=device.name,
            why="it has no fp8 instructions; GPUs since Ada and Hopper do",
            next="set train.precision=auto",
        )
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError as error:
        raise RunError(
            "train.precision: fp8 needs the package torchao",
            where=device.name,
            why=str(error),
            next=f"{installing('fp8')}, on every node",
        ) from error
    for block in blocks:
        convert_to_float8_training(block, module_filter_fn=is_taken)


def is_taken(module: nn.Module, name: str) -> bool:
    return (
        isinstance(module, nn.Linear)
        and module.in_features % MULTIPLE == 0
        and module.out_features % MULTIPLE == 0
    )
