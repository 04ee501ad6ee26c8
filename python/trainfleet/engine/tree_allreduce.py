"""Sums over all ranks in a time that grows with the logarithm of their number, on the hosts' own
network, next to training.

Ranks of a node are a group, in parts of FAN at most; so are the first ranks of these groups, and so
on up to one group for all. Numbers go up, and the first rank of each group adds them; the sum goes
down. A ring over the world, like gloo's all-reduce, sends 2 (n - 1) messages one after the other;
this sends some 2 log n (tests/bench/LOG.md, with the store's).
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

FAN = 16
PATIENCE = timedelta(minutes=30)  # like torch's: the watchdog finds ranks that hang


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
