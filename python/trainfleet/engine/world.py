"""Joins the ranks of a job: how they meet and agree. parallel/ decides which part of the model each
has.

A `Tree` sums over all ranks in a time that grows with the logarithm of their number, on the hosts'
own network, next to training. Ranks of a node are a group, in parts of FAN at most; so are the
first ranks of these groups, and so on up to one group for all. Numbers go up, and the first rank of
each group adds them; the sum goes down. A ring over the world, like gloo's all-reduce, sends 2 (n -
1) messages one after the other; this sends some 2 log n (tests/bench/LOG.md, with the store's).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from ..devices import Device

PRECISIONS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}

FAN = 16
PATIENCE = timedelta(minutes=30)  # like torch's: the watchdog finds ranks that hang


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


def levels(size: int, local: int) -> list[list[list[int]]]:
    """Returns the groups of each level, from the ranks of a node up; `local` ranks in a row are a
    node. Pure.
    """
    found, members = [], list(range(size))
    while len(members) > 1:
        together = len(members) <= FAN or len({rank // local for rank in members}) == len(members)
        groups: list[list[int]] = []
        for rank in members:
            if (
                groups
                and len(groups[-1]) < FAN
                and (together or groups[-1][0] // local == rank // local)
            ):
                groups[-1].append(rank)
            else:
                groups.append([rank])
        found.append(groups)
        members = [group[0] for group in groups]
    return found


class Group(NamedTuple):
    """Ranks that send to the first of them, and this rank's place among them."""

    size: int
    position: int
    link: Any  # a ProcessGroupGloo; torch's stubs lack its methods

    @classmethod
    def join(cls, ranks: list[int], rank: int, store: Store) -> Group:
        """Joins a group of ranks. It does not use dist.new_group, which all ranks of the world must
        call together.
        """
        position, own = ranks.index(rank), PrefixStore(f"{ranks[0]}-{ranks[-1]}", store)
        return cls(len(ranks), position, dist.ProcessGroupGloo(own, position, len(ranks), PATIENCE))

    def gather(self, numbers: Tensor) -> Tensor:
        """Returns the sum of these numbers of all ranks, on the first one."""
        parts = [torch.empty_like(numbers) for _ in range(self.size)] if self.position == 0 else []
        self.link.gather([parts] if parts else [], [numbers]).wait()
        return torch.stack(parts).sum(0) if parts else torch.empty_like(numbers)


class Tree:
    """This rank's place in the tree. All ranks make it together, and request the same number of
    sums, one after the other.
    """

    def __init__(self, rank: int, size: int, store: Store) -> None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        mine = [
            group
            for level in levels(size, local)
            for group in level
            if rank in group and len(group) > 1
        ]
        self.groups = [Group.join(group, rank, store) for group in mine]
        self.flat = size <= FAN
        self.under_way: Any = None
        self.asked, self.answered = SimpleQueue[Tensor](), SimpleQueue[Exception | None]()
        if not self.flat:
            threading.Thread(target=self._run, name="votes", daemon=True).start()

    def begin(self, numbers: Tensor) -> None:
        """Begins to replace the numbers by their sum over all ranks; returns at once."""
        if not self.flat:
            self.asked.put(numbers)
        elif self.groups:
            self.under_way = self.groups[0].link.allreduce([numbers])

    def end(self) -> None:
        """Waits for the sum that was begun.

        Raises:
            Exception: torch's error when a rank is gone.
        """
        if not self.flat:
            if error := self.answered.get():
                raise error
        elif self.groups:
            self.under_way.wait()

    def _run(self) -> None:
        while True:
            numbers = self.asked.get()
            try:
                numbers.copy_(self._sum(numbers))
                self.answered.put(None)
            except Exception as error:  # for the training loop to raise
                self.answered.put(error)

    def _sum(self, numbers: Tensor) -> Tensor:
        for group in self.groups:
            numbers = group.gather(numbers)
        for group in reversed(self.groups):
            group.link.broadcast([numbers]).wait()
        return numbers
