"""Joins the ranks of a job into a process group, and reduces small values over them.

`Tree` sums values over all ranks on the host network, concurrently with training, in logarithmic
time. Ranks of a node form groups of at most FAN ranks. The first ranks of these groups form the
next level, and so on up to a single group. Values are added on the way up and broadcast on the way
down. A ring, such as gloo's all-reduce, sends 2 (n - 1) messages in sequence; the tree sends about
2 log n. tests/bench/LOG.md compares both, and the store.
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
PATIENCE = timedelta(minutes=30)  # same as torch's; the watchdog detects hanging ranks


@dataclass(frozen=True)
class World:
    """This process and its process group. `node` is the index of the machine. A world of one rank
    needs no launcher.
    """

    rank: int
    size: int
    node: int
    device: Device
    native_bf16: bool = False  # whether every rank's device has bf16 instructions
    # process group of all ranks for host tensors; None if the default group supports them
    hosts: dist.ProcessGroup | None = None
    native_fp16: bool = False  # the same for fp16

    @property
    def first(self) -> bool:
        """Returns whether this rank writes files on behalf of all ranks."""
        return self.rank == 0

    def precision(self, asked: str) -> torch.dtype:
        """Returns the number format of forward and backward passes for `train.precision`. It is the
        same on all ranks.
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
        """Returns rank 0's number on all ranks."""
        said = torch.tensor(number)
        dist.broadcast(said, src=0, group=self.hosts)
        return int(said)

    def tree(self, name: str) -> Tree:
        """Creates a tree of all ranks, which they use for votes. All ranks must call it together
        with an unused `name`.
        """
        return Tree(
            self.rank, self.size, PrefixStore(name, dist.distributed_c10d._get_default_store())
        )


@contextmanager
def join(device: Device) -> Iterator[World]:
    """Joins the process group that torchrun's environment describes, and leaves it after the `with`
    block.

    Host tensors always use gloo, so that ranks can agree on small values without waiting for an
    accelerator.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device.start()
    store = HashStore() if size == 1 else None  # None: use torchrun's store
    dist.init_process_group(device.backend, store=store, rank=rank, world_size=size)
    device.joined(rank, size)
    hosts = None if device.backend == "gloo" else dist.new_group(backend="gloo")
    native = torch.tensor((device.native_bf16, device.native_fp16), dtype=torch.uint8)
    # Use the minimum, because hosts of a fleet may have different CPU generations.
    dist.all_reduce(native, dist.ReduceOp.MIN, group=hosts)
    bf16, fp16 = (bool(each) for each in native)
    yield World(rank, size, int(os.environ.get("GROUP_RANK", "0")), device, bf16, hosts, fp16)
    # Skipped after an error, because other ranks may be waiting in a collective.
    dist.destroy_process_group()


def first_to_say(key: str) -> bool:
    """Returns whether this rank is the first to call it with this key. Used to print an error of
    all ranks only once.
    """
    if not dist.is_initialized():
        # Print it once per node, because other nodes may not have this error.
        return os.environ.get("LOCAL_RANK", "0") == "0"
    store = dist.distributed_c10d._get_default_store()
    try:
        return bool(store.add(f"said/{key}", 1) == 1)
    except dist.DistError:  # rank 0, which hosts the store, has already reported it and exited
        return False


def levels(size: int, local: int) -> list[list[list[int]]]:
    """Returns the groups of each tree level, from the leaves to the root. `local` consecutive ranks
    share a node.
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
    """A group of ranks that send to its first rank, and this rank's position in it."""

    size: int
    position: int
    link: Any  # ProcessGroupGloo, but torch's stubs lack its methods

    @classmethod
    def join(cls, ranks: list[int], rank: int, store: Store) -> Group:
        """Joins a group of ranks. dist.new_group is unsuitable, because all ranks of the world
        would have to call it together.
        """
        position, own = ranks.index(rank), PrefixStore(f"{ranks[0]}-{ranks[-1]}", store)
        return cls(len(ranks), position, dist.ProcessGroupGloo(own, position, len(ranks), PATIENCE))

    def gather(self, numbers: Tensor) -> Tensor:
        """Returns the sum of all ranks' tensors on the first rank, and an uninitialized tensor
        elsewhere.
        """
        parts = [torch.empty_like(numbers) for _ in range(self.size)] if self.position == 0 else []
        self.link.gather([parts] if parts else [], [numbers]).wait()
        return torch.stack(parts).sum(0) if parts else torch.empty_like(numbers)


class Tree:
    """This rank's groups in the tree. All ranks must create it together and request the same sums
    in the same order.
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
        """Starts to replace `numbers` by their sum over all ranks, and returns immediately."""
        if not self.flat:
            self.asked.put(numbers)
        elif self.groups:
            self.under_way = self.groups[0].link.allreduce([numbers])

    def end(self) -> None:
        """Waits for the pending sum.

        Raises:
            Exception: torch's error, if a rank has exited.
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
            except Exception as error:  # the training loop raises it
                self.answered.put(error)

    def _sum(self, numbers: Tensor) -> Tensor:
        for group in self.groups:
            numbers = group.gather(numbers)
        for group in reversed(self.groups):
            group.link.broadcast([numbers]).wait()
        return numbers
