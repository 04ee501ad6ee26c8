"""Measures the bandwidth between ranks, as a separate job.

Usage: `torchrun ... -m trainfleet.devices.bandwidth DEVICE LARGEST LEAST`. Rank 0 prints MARK,
followed by a JSON object: bandwidth (all-reduce bus bandwidth in GB/s), bytes (message size),
nodes, and pairs ([node, node, GB/s] each). Pairs are measured only if the all-reduce stays below
LEAST GB/s.

Bus bandwidth is defined as in nccl-tests: bytes x 2 (n - 1) / n, divided by the slowest rank's
time. It can be compared to the link speed for any number of ranks (github.com/NVIDIA/nccl-tests,
doc/PERFORMANCE.md).
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist

from . import Device, planned
from .meeting import listen

MARK = "== bandwidth "
SMALLEST = 1 << 16  # initial message size in bytes
ENOUGH_SECONDS = 0.1  # minimum transfer time for an accurate measurement
TRIES = 3
ROUNDS = 4  # number of partners that each node is measured against
TIMEOUT = datetime.timedelta(seconds=60)


def main(kind: str, largest: int, least: float) -> None:
    device = planned(kind)
    device.start()
    # Without torchrun, rank 0 hosts the store.
    lone = os.environ["RANK"] == "0" and "TORCHELASTIC_RUN_ID" not in os.environ
    store = (
        listen(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), nodes()) if lone else None
    )
    dist.init_process_group(device.backend, timeout=TIMEOUT)
    size, bandwidth = all_reduce_bandwidth(device, largest)
    pairs = (
        pair_bandwidths(device, int(bandwidth * 1e9 * ENOUGH_SECONDS)) if bandwidth < least else []
    )
    if dist.get_rank() == 0:
        told = {"bandwidth": bandwidth, "bytes": size, "nodes": nodes(), "pairs": pairs}
        print(f"\n{MARK}{json.dumps(told)}", flush=True)
    dist.destroy_process_group()
    del store


def nodes() -> int:
    return int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])


def all_reduce_bandwidth(device: Device, largest: int) -> tuple[int, float]:
    """Returns the message size and its all-reduce bus bandwidth in GB/s, identical on every rank.

    Increases the size until a transfer takes long enough for an accurate measurement.
    """
    share = 2 * (dist.get_world_size() - 1) / dist.get_world_size()
    size = SMALLEST
    while True:
        data = torch.ones(size // 4, device=device.torch_device)
        dist.all_reduce(data)  # warm-up, which opens connections and allocates buffers
        seconds = min(
            _slowest(device, _seconds(device, lambda data=data: dist.all_reduce(data)))  # type: ignore[misc]
            for _ in range(TRIES)
        )
        if seconds > ENOUGH_SECONDS or size >= largest:
            return size, share * size / seconds / 1e9
        size = min(4 * size, largest)


def pair_bandwidths(device: Device, size: int) -> list[tuple[int, int, float]]:
    """Measures several node pairs and returns each pair's bandwidth per direction, in GB/s.

    Each node has at most one partner at a time. All ranks return the same result.
    """
    size = min(max(size, 4 * SMALLEST), 1 << 28) // 4
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    mine, local = divmod(dist.get_rank(), local_size)
    out = torch.ones(size, device=device.torch_device)
    back = torch.empty_like(out)
    found: list[tuple[int, int, float]] = []
    for partners in islice(tournament(nodes()), ROUNDS):
        rate = out.new_zeros(nodes())
        dist.barrier()
        if (other := partners.get(mine)) is not None:
            exchange = partial(_exchange, out, back, other * local_size + local)
            seconds = min(_seconds(device, exchange) for _ in range(TRIES))
            # Averages the two nodes' measurements and sums over their local ranks.
            rate[min(mine, other)] = 4 * size / seconds / 1e9 / 2
        dist.all_reduce(rate)
        found += [
            (node, other, float(rate[node])) for node, other in partners.items() if node < other
        ]
    return found


def tournament(count: int) -> Iterator[dict[int, int]]:
    """Yields round-robin rounds: each node has a different partner in every round, and each pair
    meets once.

    Uses the circle method. With an odd number of nodes, one node sits out each round.
    """
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(places) - 1):
        matches = [(places[i], places[-1 - i]) for i in range(len(places) // 2)]
        partners = {a: b for a, b in matches if a is not None and b is not None}
        yield partners | {b: a for a, b in partners.items()}
        places = [places[0], places[-1], *places[1:-1]]


def _exchange(out: torch.Tensor, back: torch.Tensor, peer: int) -> None:
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, back, peer)]
    ):
        work.wait()


def _seconds(device: Device, act: Callable[[], object]) -> float:
    device.synchronize()
    began = time.perf_counter()
    act()
    device.synchronize()
    return time.perf_counter() - began


def _slowest(device: Device, seconds: float) -> float:
    worst = torch.tensor([seconds], device=device.torch_device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
