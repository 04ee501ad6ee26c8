"""A step of each way of computing it, in turns in one process: `python tests/bench/bench_turns.py [TURNS]`.

One thread and CPU seconds, so that other work on the machine counts little. The model is bench_train.py's Llama of 16.9M
parameters, 8 x 256 tokens per step; a step is forward, backward, clipping and AdamW, of random tokens that are there already.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import bench_train
import peers_train as peers
import torch
from torch import Tensor

from trainfleet.config import Settings, load
from trainfleet.devices.cpu import Cpu
from trainfleet.engine.batches import MicroBatch
from trainfleet.engine.parallel import arrange
from trainfleet.engine.timing import Stopwatch
from trainfleet.engine.world import World, join

Step = Callable[[Tensor], None]
OURS = {
    "ours, fp32": "train.precision=fp32 train.compile=false",
    "ours, fp32, compiled": "train.precision=fp32 train.compile=true",
    "ours, bf16": "train.precision=bf16 train.compile=false",
    "ours, bf16, compiled": "train.precision=bf16 train.compile=true",
    "ours, bf16 weights, compiled": "train.precision=bf16 train.param_dtype=bf16 train.compile=true",
}
WARM_UP = 3  # turns


def ours(settings: str, world: World) -> Step:
    config, _ = load(
        Settings(
            Path("config.yaml"), f"train.steps=100 train.micro_batch_size={peers.BATCH} {settings}"
        )
    )
    parts, watch = arrange(config, world), Stopwatch(time.time())
    stays = torch.zeros(())

    def step(rows: Tensor) -> None:
        parts.train(iter([(0, MicroBatch(rows[:, :-1], rows[:, 1:], None))]), watch)
        parts.update(config.train.learning_rate, lambda norm: stays)

    return step


def main() -> None:
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    bench_train.prepare(Path(tempfile.mkdtemp()))
    with join(Cpu()) as world:
        steps: dict[str, Step] = {
            f"bare loop{', bf16' * half}{', compiled as a whole' * compiled}": peers.bare_step(
                half, compiled
            )
            for half in (False, True)
            for compiled in (False, True)
        }
        steps |= {name: ours(settings, world) for name, settings in OURS.items()}
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for rows in peers.rows((WARM_UP + turns) * peers.BATCH).split(peers.BATCH):
            for name, step in steps.items():
                began = time.process_time()
                step(rows)
                taken[name].append(time.process_time() - began)
    medians = {name: statistics.median(seconds[WARM_UP:]) for name, seconds in taken.items()}
    for name, median in medians.items():
        print(f"| {name} | {median:.3f} s | {medians['bare loop'] / median:.2f} |")


if __name__ == "__main__":
    main()
