"""Transforms a model block by block: its first values, fp8, recomputation, compilation, sharding.

fp8 runs the matrix products of blocks, forward and backward, by torchao. Inputs and weights are
rounded to e4m3 and gradients to e5m2 (Micikevicius et al. 2022, arXiv:2209.05433), each tensor
scaled by its largest number at this step. The optimizer's parameters stay the same, and a
checkpoint does not depend on fp8. The embedding and the output layer, which suffer most from it,
are outside the blocks and stay in bf16, like attention and norms.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Container, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ...devices import Device
from ...models.network import Network
from ...process.install_paths import installing
from ...run.run_folder import COMPILED
from ...trust.errors import RunError

CACHE = "TORCHINDUCTOR_CACHE_DIR"

MULTIPLE = 16  # divisor of both sides of a matrix, required by the instructions (torch._scaled_mm)


def recompute(blocks: Iterable[nn.Module], how: str | float, device: Device) -> None:
    """Makes blocks keep less for their backward pass: only their input (`full`), or also results
    that are costly to compute (`selective`).

    A number is a budget, which `compile_blocks` applies.
    """
    if how not in ("full", "selective"):
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = partial(
            create_selective_checkpoint_contexts, partial(keep, device.costly)
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, **options)


def keep(
    costly: Container[object],
    context: object,
    operation: object,
    *arguments: object,
    **named: object,
) -> CheckpointPolicy:
    """Decides whether torch's selective recomputation keeps an operation's result: it keeps the
    products and attention.
    """
    return CheckpointPolicy.MUST_SAVE if operation in costly else CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(
    model: Network, blocks: Iterable[nn.Module], how: str | float, device: Device, loss: bool = True
) -> None:
    """Compiles each block separately, so that blocks of one shape share one piece of code; then the
    loss, if `loss`.

    If `how` to recompute is a number, a block keeps at most that fraction of the results that the
    compiler would keep for speed. The loss keeps all, as its backward pass follows at once. The
    code is cached in the project's folder, for the next run.
    """
    # default of torch's compiler, only on this machine
    own = f"{tempfile.gettempdir()}/torchinductor_"
    if os.environ.get(CACHE, own).startswith(own):
        os.environ[CACHE] = str(COMPILED.absolute())
    for block in blocks:
        # a smaller batch, like validation's last one, gets separate code
        compiled = device.compiled(block._call_impl)
        if not isinstance(how, str):
            # read when the first batch arrives
            compiled = functorch.patch(activation_memory_budget=float(how))(compiled)
        block._compiled_call_impl = compiled
    if loss:
        model.loss = device.compiled(model.loss)  # type: ignore[method-assign]


def shard(
    root: nn.Module,
    blocks: list[nn.Module],
    mesh: DeviceMesh,
    frees: bool,
    precision: torch.dtype,
    device: Device,
) -> None:
    """Shards the weights over the ranks of a mesh; gradients are averaged over them (Zhao et al.
    2023, FSDP).

    ZeRO 3 `frees` a block's weights after it has run and gathers them again for its backward pass.
    The last block is an exception, as its backward pass comes next. ZeRO 1, and any pipeline, keep
    them gathered from the first forward pass of a step to its last backward pass: only the
    optimizer's state, and the weights that it updates, are sharded.
    """
    # only now: the import takes a while, and DDP does not need it
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=device.gradient_sums)
    for block in blocks:
        again = frees and block is not blocks[-1]  # gathered for the backward pass
        fully_shard(block, mesh=mesh, reshard_after_forward=again, mp_policy=policy)
    fully_shard(root, mesh=mesh, reshard_after_forward=False, mp_policy=policy)


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
