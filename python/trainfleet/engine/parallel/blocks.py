"""Transforms a model block by block: recomputation, compilation and sharding."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Container, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ...devices import Device
from ...models.network import Network
from ...run.run_folder import COMPILED

CACHE = "TORCHINDUCTOR_CACHE_DIR"


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
