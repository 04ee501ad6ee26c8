"""Per-block transformations: initial weights, fp8, recomputation, compilation, sharding.

With fp8, torchao computes the blocks' matmuls, both forward and backward. Inputs and weights are
cast to e4m3 and gradients to e5m2 (Micikevicius et al. 2022, arXiv:2209.05433), with each tensor
scaled by its current maximum. Parameters and checkpoints are the same as without fp8. Attention,
norms, the embedding and the output layer stay in bf16. The last two would lose the most accuracy in
fp8.
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

# Both dimensions of an fp8 matrix must be multiples of this (torch._scaled_mm).
MULTIPLE = 16


def recompute(blocks: Iterable[nn.Module], how: str | float, device: Device) -> None:
    """Reduces the activations that blocks keep for the backward pass.

    `full` keeps only each block's input. `selective` also keeps results that are expensive to
    recompute. A number is a memory budget, which `compile_blocks` applies.
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
    """Returns the selective recomputation policy for an operation.

    Keeps the results of expensive operations, such as matmuls and attention.
    """
    return CheckpointPolicy.MUST_SAVE if operation in costly else CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(
    model: Network, blocks: Iterable[nn.Module], how: str | float, device: Device, loss: bool = True
) -> None:
    """Compiles each block separately, so that blocks of the same shape share code.

    Also compiles the loss if `loss` is true. If `how` is a number, each block keeps at most that
    fraction of the activations that the compiler would save by default. The loss keeps all of them,
    because its backward pass follows immediately. Compiled code is cached in the project's folder
    for later runs.
    """
    # torch's default cache folder, local to this machine
    own = f"{tempfile.gettempdir()}/torchinductor_"
    if os.environ.get(CACHE, own).startswith(own):
        os.environ[CACHE] = str(COMPILED.absolute())
    for block in blocks:
        # Batches of another size, such as the last validation batch, are compiled separately.
        compiled = device.compiled(block._call_impl)
        if not isinstance(how, str):
            # The compiler reads the budget when the first batch arrives.
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
    """Shards the weights over a mesh and averages gradients across its ranks (Zhao et al. 2023,
    FSDP).

    With ZeRO 3 (`frees`), each block's weights are freed after its forward pass and regathered for
    its backward pass. The last block keeps its weights, because its backward pass comes next.

    With ZeRO 1, and in a pipeline, weights stay gathered from a step's first forward pass to its
    last backward pass. Only the optimizer state and the weights that it updates are sharded.
    """
    # Imported late, because the import is slow and DDP does not need it.
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=device.gradient_sums)
    for block in blocks:
        again = frees and block is not blocks[-1]  # regather weights for backward
        fully_shard(block, mesh=mesh, reshard_after_forward=again, mp_policy=policy)
    fully_shard(root, mesh=mesh, reshard_after_forward=False, mp_policy=policy)


def convert(blocks: Iterable[nn.Module], device: Device) -> None:
    """Converts the blocks' linear layers to fp8 matmuls if their sizes allow it.

    The parameter objects stay the same.

    Raises:
        RunError: the device does not support fp8, or torchao is not installed.
    """
    if not device.native_fp8:
        raise RunError(
            "train.precision: this device does not support fp8",
            where=device.name,
            why="it has no fp8 instructions; Ada, Hopper and later GPUs have them",
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
    """Allocates the model's parameters on the device and initializes them, independently of the
    layout.

    To initialize a slice, the rank draws the full matrix and keeps only the slice. Peak memory is
    therefore the rank's part plus one full matrix.
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
    """Returns this rank's slice of `values`, sharded in the same way as `parameter`."""
    if not isinstance(parameter, DTensor):
        return values
    mesh, placements = parameter.device_mesh, parameter.placements
    part = distribute_tensor(values, mesh, placements, src_data_rank=None).to_local().clone()
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
