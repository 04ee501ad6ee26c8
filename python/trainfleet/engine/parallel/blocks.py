"""What is done to a model block by block: recomputation, compilation and sharding."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ...models.network import Network
from ...runs import COMPILED

# What a matrix product or attention made is kept with selective recomputation: all else is cheap to compute again.
COSTLY = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def recompute(blocks: Iterable[nn.Module], how: str | float) -> None:
    """Has blocks keep less for backward: only their input (`full`), or that and what is costly to make (`selective`).

    A budget, which is a number, is for `compile` to keep.
    """
    if how not in ("full", "selective"):
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, keep_costly)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, **options)


def keep_costly(context: object, operation: object, *arguments: object, **named: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE


def compile(model: Network, blocks: Iterable[nn.Module], how: str | float, loss: bool = True) -> None:
    """Compiles blocks, each by itself: as they are alike, the first one's code serves them all. Then the loss, if wished.

    Where `how` to recompute is a number, blocks keep no more than that part of what the compiler would have them keep for speed;
    the loss, whose backward pass comes at once, keeps all. What is made is kept in a folder of the project, so that the next run
    need not compile anew.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(COMPILED.absolute()))
    for block in blocks:
        block.compile(dynamic=False)  # validation's last batch may be smaller: it gets code of its own
        if not isinstance(how, str):
            within = functorch.patch(activation_memory_budget=float(how))  # read while a block's first batch goes through it
            block._compiled_call_impl = within(block._compiled_call_impl)
    if loss:
        model.loss = torch.compile(model.loss, dynamic=False)  # type: ignore[method-assign]


def shard(root: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, zero: int, precision: torch.dtype) -> None:
    """Divides the weights among the ranks of a mesh, and has gradients come out as means over them (Zhao et al. 2023, FSDP).

    ZeRO 3 gathers a block's weights when it runs and lets go of them after; ZeRO 1 keeps them gathered from the first forward of
    a step to its last backward, so that only the optimizer's state, and the weights that it works on, are divided.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # only now: it takes a while, and DDP needs none of it

    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy)
    fully_shard(root, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
