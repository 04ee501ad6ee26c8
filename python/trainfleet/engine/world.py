"""Process group setup, and reductions of small values over all ranks.

`Tree` sums values over the host network while training continues. It needs about 2 log n messages
in sequence, whereas a ring, such as gloo's all-reduce, needs 2 (n - 1). Ranks form groups of at
most FAN, starting within each node. The first ranks of all groups form the next level, and so on up
to a single group. Partial sums move up the tree, and the total is broadcast down.
tests/bench/LOG.md compares the tree with a ring and with the store.
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
PATIENCE = timedelta(minutes=30)  # torch's default timeout; the watchdog detects hung ranks


@dataclass(frozen=True)
class World:
    """A rank's view of the job: rank, node index, device and process group.

    A world of size 1 needs no launcher.
    """

    rank: int
    size: int
    node: int
    device: Device
    native_bf16: bool = False  # whether all ranks' devices have bf16 instructions
    # gloo group of all ranks for host tensors; None if the default group is gloo
    hosts: dist.ProcessGroup | None = None
    native_fp16: bool = False  # whether all ranks' devices have fp16 instructions

    @property
    def first(self) -> bool:
        """Returns whether this is rank 0, which writes files for all ranks."""
        return self.rank == 0

    def precision(self, asked: str) -> torch.dtype:
        """Resolves `train.precision` to the compute dtype of the forward and backward passes.

        `auto` picks the best dtype that every rank supports, so all ranks agree.
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
        """Broadcasts rank 0's number and returns it on every rank."""
        said = torch.tensor(number)
        dist.broadcast(said, src=0, group=self.hosts)
        return int(said)

    def tree(self, name: str) -> Tree:
        """Creates a tree for sums over all ranks, such as vote counts.

        Must be called on all ranks. `name` must be unused.
        """
        return Tree(
            self.rank, self.size, PrefixStore(name, dist.distributed_c10d._get_default_store())
        )


@contextmanager
def join(device: Device) -> Iterator[World]:
    """Joins the process group described by torchrun's environment variables.

    Leaves the group after the `with` block unless the block raises. Host tensors always use gloo,
    so that ranks can agree on small values without synchronizing with an accelerator.
    """
    rank = int(os.environ.get("RANK", "0"))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    device.start()
    store = HashStore() if size == 1 else None  # None selects torchrun's store
    dist.init_process_group(device.backend, store=store, rank=rank, world_size=size)
    device.joined(rank, size)
    hosts = None if device.backend == "gloo" else dist.new_group(backend="gloo")
    native = torch.tensor((device.native_bf16, device.native_fp16), dtype=torch.uint8)
    # minimum, because a fleet's hosts may have different CPU generations
    dist.all_reduce(native, dist.ReduceOp.MIN, group=hosts)
    bf16, fp16 = (bool(each) for each in native)
    yield World(rank, size, int(os.environ.get("GROUP_RANK", "0")), device, bf16, hosts, fp16)
    # Skipped on errors, because other ranks may be blocked in a collective.
    dist.destroy_process_group()


def first_of_node() -> bool:
    """Returns whether this is the rank that acts for its node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def first_to_say(key: str) -> bool:
    """Returns whether this rank is the first to report `key`.

    Prevents every rank from printing the same error.
    """
    if not dist.is_initialized():
        # without a process group, report once per node, because other nodes may not have this error
        return first_of_node()
    store = dist.distributed_c10d._get_default_store()
    try:
        return bool(store.add(f"said/{key}", 1) == 1)
    except dist.DistError:  # rank 0, which hosts the store, has already reported it and exited
        return False


def levels(size: int, local: int) -> list[list[list[int]]]:
    """Returns the groups of ranks at each tree level, from the leaves to the root.

    Each block of `local` consecutive ranks shares a node.
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
    """Group of ranks in a tree, and this rank's position in the group. The first rank gathers."""

    size: int
    position: int
    link: Any  # ProcessGroupGloo; torch's stubs lack its methods

    @classmethod
    def join(cls, ranks: list[int], rank: int, store: Store) -> Group:
        """Joins a group of ranks.

        Unlike dist.new_group, does not have to be called by ranks outside the group.
        """
        position = ranks.index(rank)
        own = PrefixStore(f"{ranks[0]}-{ranks[-1]}", store)
        return cls(len(ranks), position, dist.ProcessGroupGloo(own, position, len(ranks), PATIENCE))

    def gather(self, numbers: Tensor) -> Tensor:
        """Sums the group's tensors on its first rank.

        The result on other ranks is uninitialized.
        """
        parts = [torch.empty_like(numbers) for _ in range(self.size)] if self.position == 0 else []
        self.link.gather([parts] if parts else [], [numbers]).wait()
        return torch.stack(parts).sum(0) if parts else torch.empty_like(numbers)


class Tree:
    """Tree of ranks that sums small tensors in the background.

    Must be created on all ranks, and all ranks must start the same sums in the same order.
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
        self.asked = SimpleQueue[Tensor]()
        self.answered = SimpleQueue[Exception | None]()
        if not self.flat:
            threading.Thread(target=self._run, name="votes", daemon=True).start()

    def begin(self, numbers: Tensor) -> None:
        """Starts an in-place sum of `numbers` over all ranks and returns immediately."""
        if not self.flat:
            self.asked.put(numbers)
        elif self.groups:
            self.under_way = self.groups[0].link.allreduce([numbers])

    def end(self) -> None:
        """Waits for the sum in flight.

        Raises:
            Exception: torch's error if another rank has exited.
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
            except Exception as error:  # `end` raises it in the training loop
                self.answered.put(error)

    def _sum(self, numbers: Tensor) -> Tensor:
        for group in self.groups:
            numbers = group.gather(numbers)
        for group in reversed(self.groups):
            group.link.broadcast([numbers]).wait()
        return numbers
