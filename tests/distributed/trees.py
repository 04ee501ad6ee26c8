"""A program of N ranks that vote: `python trees.py N LOCAL PORT FAN`; each prints what came of it."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from trainfleet.engine import world


def main(rank: int, size: int, local: int, port: int) -> None:
    os.environ |= {"LOCAL_WORLD_SIZE": str(local), "GLOO_SOCKET_IFNAME": "lo"}
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    votes = world.Tree(rank, size, PrefixStore("votes", store))
    sums = []
    for turn in range(5):
        numbers = torch.tensor([float(rank), float(rank == turn), 1.0])
        votes.begin(numbers)
        votes.end()
        sums.append(numbers.tolist())
    print(sums, flush=True)
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < size:
        pass


if __name__ == "__main__":
    assert dist.is_available()
    torch.set_num_threads(1)
    size, local, port, world.FAN = map(int, sys.argv[1:5])
    children = []
    for rank in range(size):
        if (child := os.fork()) == 0:
            main(rank, size, local, port)
            os._exit(0)
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
