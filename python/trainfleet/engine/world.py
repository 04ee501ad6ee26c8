"""Joins the ranks of a job: how they meet and agree. parallel/ decides which part of the model each
has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore

from ..devices import Device
from .tree_allreduce import Tree

PRECISIONS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class World:
    """This process among the ranks. `node` counts machines; a world of one needs no launcher."""

    rank: int
    size: int
    node: int
    device: Device
    native_bf16: bool = False  # every rank's device has instructions for it
    # group of all ranks, for tensors on the host; None: the default group takes them
    hosts: dist.ProcessGroup | None = None
    native_fp16: bool = False  # like native_bf16

    @property
    def first(self) -> bool:
        """Tells whether this is the rank that writes for all."""
        return self.rank == 0

    def precision(self, asked: str) -> torch.dtype:
        """Returns the number format of forward and backward for `train.precision`, the same on all
        ranks.
        """
        best = "bf16" if self.native_bf16 else "fp16" if self.native_fp16 else "fp32"
        return PRECISIONS[best if asked == "auto" else asked]

    def mean(self, value: Tensor) -> Tensor:
        """Returns the mean of a device tensor over all ranks."""
        return self.sum(value) / self.size

    def sum(self, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    def as_first_says(self, number: int) -> int:
        """Broadcasts rank 0's number."""
        said = torch.tensor(number)
        dist.broadcast(said, src=0, group=self.hosts)
        return int(said)

    def tree(self, name: str) -> Tree:
        """Makes a tree of all ranks, with which they vote next to training. All ranks call it
        together; `name` must be new.
        """
        return Tree(
            self.rank, self.size, PrefixStore(name, dist.distributed_c10d._get_default_store())
        )


@contextmanager
def join(device: Device) -> Iterator[World]:
    """Joins the world that torchrun's environment describes, within `with`.

    Tensors on the CPU always use gloo, so that ranks can agree on small values without waiting for
    an accelerator.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device.start()
    store = HashStore() if size == 1 else None  # otherwise torchrun's
    dist.init_process_group(device.backend, store=store, rank=rank, world_size=size)
    device.joined(rank, size)
    hosts = None if device.backend == "gloo" else dist.new_group(backend="gloo")
    native = torch.tensor((device.native_bf16, device.native_fp16), dtype=torch.uint8)
    # hosts of one fleet may have CPUs of several generations
    dist.all_reduce(native, dist.ReduceOp.MIN, group=hosts)
    bf16, fp16 = (bool(each) for each in native)
    yield World(rank, size, int(os.environ.get("GROUP_RANK", "0")), device, bf16, hosts, fp16)
    # not after an error: the other ranks may wait in a collective forever
    dist.destroy_process_group()


def first_to_say(key: str) -> bool:
    """Tells whether this rank is the first to call this with the key, so that an error of all ranks
    is printed once.
    """
    if not dist.is_initialized():
        # once per node: another one may have no error
        return os.environ.get("LOCAL_RANK", "0") == "0"
    store = dist.distributed_c10d._get_default_store()
    try:
        return bool(store.add(f"said/{key}", 1) == 1)
    except dist.DistError:  # rank 0, which keeps the store, has reported it and left
        return False
