"""What a rank's step allocates, as torch's profiler saw it; as a program, in a world of real ranks.

`python allocations.py N PORT CONFIG SETTINGS ...` forks N ranks from one import for each of the settings, and prints a line of JSON
for each rank: [settings, rank, bytes held, bytes at the fullest moment].
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trainfleet.config import Config, Settings, load
from trainfleet.devices.cpu import Cpu
from trainfleet.engine.batches import MicroBatch, split
from trainfleet.engine.parallel import arrange
from trainfleet.engine.timing import Stopwatch
from trainfleet.engine.world import World, join

CONFIG = """
name: memory
data: {name: text, sources: [stdlib], vocab_size: 384}
model: {preset: null, family: llama, layers: 6, hidden_size: 256, heads: 8, kv_heads: 8, intermediate_size: 688,
        vocab_size: 1024, max_position_embeddings: 256, dropout: 0}
fleet: {nodes: 8, ranks_per_node: 1}
train: {steps: 20, global_batch_size: 64, sequence_length: 128, micro_batch_size: 4, precision: fp32, compile: false, activation_checkpointing: none,
        parallelism: {fsdp: 1, zero_stage: 3}}
"""


def measure(config: Config, world: World) -> tuple[int, int]:
    """Bytes of weights and optimizer state, and at the fullest moment of a step after the first."""

    def step() -> None:
        parts.train(batches(config, parts.micro_batches), watch)
        parts.clip(1.0)
        update.step()
        update.zero_grad(set_to_none=True)

    gc.collect()  # of what was there before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as beginning:
        parts: Any = arrange(config, world)
        update, watch = parts.optimizer, Stopwatch(time.time())
        step()
        gc.collect()
    states = [tensor for state in update.state.values() for tensor in state.values() if tensor.ndim]
    held = sum(
        getattr(tensor, "_local_tensor", tensor).nbytes
        for tensor in [*parts.model.parameters(), *states]
    )
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        step()
    return held, sum(changes(beginning)) + max(accumulate(changes(told)))


def changes(told: profile) -> list[int]:
    """Bytes that were allocated, or freed and then negative, in the order of time."""
    events = [
        event for event in told.profiler.kineto_results.events() if event.name() == "[memory]"
    ]  # type: ignore[union-attr]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def batches(config: Config, count: int) -> Iterator[tuple[int, MicroBatch]]:
    size = config.train.micro_batch_size, config.train.sequence_length + 1
    for left in reversed(range(count)):
        yield left, split(torch.randint(0, 1000, size))


def fork(rank: int, ranks: int, port: str, config: Path, settings: str) -> int:
    """The process id of a new rank."""
    if pid := os.fork():
        return pid
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "GROUP_RANK": str(rank),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    torch.set_num_threads(1)
    with join(Cpu()) as world:
        found = measure(load(Settings(config, settings))[0], world)
        os.write(
            1, f"{json.dumps([settings, rank, *found])}\n".encode()
        )  # in one piece, as other ranks write too
        world.as_first_says(0)  # so that none leaves before the others
    os._exit(0)


if __name__ == "__main__":
    count, port, config = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    for number, settings in enumerate(sys.argv[4:]):
        children = [
            fork(rank, count, str(port + number), config, settings) for rank in range(count)
        ]
        if any(os.waitpid(child, 0)[1] for child in children):
            sys.exit(f"{settings}: a rank failed")
