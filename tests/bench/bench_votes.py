"""How long ranks take to agree on three numbers: `PYTHONPATH=python python tests/bench/bench_votes.py`, on this machine alone.

A ring (gloo's all-reduce over the world), the tree in groups of 2, 4 and 16, and the store (each rank adds to a key and waits for the
last one's word). Medians of microseconds from when all have begun; with more ranks than cores it is mostly the kernel's scheduler.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing import SimpleQueue, get_context

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from trainfleet.engine import world

TURNS, UNTIMED = 200, 20


def median(act: Callable[[], object]) -> float:
    taken = []
    for turn in range(TURNS + UNTIMED):
        dist.barrier()
        began = time.perf_counter()
        act()
        if turn >= UNTIMED:
            taken.append(time.perf_counter() - began)
    return 1e6 * statistics.median(taken)


def main(rank: int, size: int, port: int, results: SimpleQueue[dict[str, float]]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": "1"}
    store = TCPStore("127.0.0.1", port, size, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    numbers, found = torch.zeros(3), dict[str, float]()
    found["ring"] = median(lambda: dist.all_reduce(numbers))
    for world.FAN in (2, 4, 16):
        votes = world.Tree(rank, size, PrefixStore(f"votes-{world.FAN}", store))
        found[f"tree of {world.FAN}"] = median(
            lambda votes=votes: (votes.begin(numbers), votes.end())
        )  # type: ignore[misc]
    turn = 0

    def ask_the_store() -> None:
        nonlocal turn
        turn += 1
        if store.add(f"vote-{turn}", 1) == size:
            store.set(f"told-{turn}", "1")
        store.wait([f"told-{turn}"])

    found["store"] = median(ask_the_store)
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    context = get_context("fork")
    for size in (2, 4, 8):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        results: SimpleQueue[dict[str, float]] = context.SimpleQueue()
        ranks = [
            context.Process(target=main, args=(rank, size, port, results)) for rank in range(size)
        ]
        for process in ranks:
            process.start()
        print(
            f"{size} ranks: "
            + ", ".join(f"{name} {micros:,.0f} us" for name, micros in results.get().items()),
            flush=True,
        )
        for process in ranks:
            process.join()
