"""The memory model against what torch allocates: a real step of the engine in each layout, as one rank of a fake world of 8.

Collectives of a fake process group move nothing, but every rank's tensors have their true sizes; the profiler tells each allocation.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainfleet.config import Config, Settings, load
from trainfleet.config.layouts import is_half
from trainfleet.config.memory import memory_of
from trainfleet.devices.cpu import Cpu
from trainfleet.engine import optimizer
from trainfleet.engine.batches import Batch, split
from trainfleet.engine.meter import Stopwatch
from trainfleet.engine.parallel import arrange
from trainfleet.engine.world import World

CONFIG = """
name: memory
data: {name: text, sources: [stdlib], vocabulary_size: 384}
model: {preset: null, family: llama, layers: 6, hidden_size: 256, heads: 8, kv_heads: 8, intermediate_size: 688,
        vocabulary_size: 1024, max_sequence_length: 256, dropout: 0}
fleet: {nodes: 8, ranks_per_node: 1}
train: {steps: 20, global_batch: 64, sequence_length: 128, micro_batch: 4, compile: false, recompute: none, layout: {shard: 1, zero: 3}}
"""
ALONE = "fleet.nodes=1 train.global_batch=8"
GPT2 = "model.family=gpt2 model.intermediate_size=1024 train.precision=bf16"  # its norms keep bf16 on CPUs too, Llama's fp32
HALF = f"{GPT2} train.weights=bf16"


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())  # type: ignore[no-untyped-call]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "layout",
    [
        ALONE,
        f"{ALONE} train.recompute=selective",
        f"{ALONE} train.optimizer=muon",
        f"{ALONE} {GPT2}",
        "train.layout.shard=8",
        "train.layout.shard=8 train.layout.zero=1",
        "train.layout.shard=8 train.recompute=full",
        "train.layout.tensor=4",
        "train.layout.context=4 train.layout.shard=2",
        f"{ALONE} {HALF}",
        f"train.layout.shard=8 {HALF}",
        f"train.layout.shard=8 train.layout.zero=1 {HALF}",
        HALF,
    ],
)
def test_what_is_reckoned_is_what_a_step_allocates(layout: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    config, _ = load(Settings(tmp_path / "config.yaml", layout))
    reckoned = memory_of(config, is_half(config))
    state, peak = measure(config)
    assert reckoned.weights + reckoned.moments == pytest.approx(state, rel=0.01)
    assert 0.9 * peak < reckoned.total < 1.2 * peak  # it may err, and rather on the side that fits


def measure(config: Config) -> tuple[int, int]:
    """Bytes of weights and optimizer state, and at the fullest moment of a step after the first."""
    parts: Any = arrange(config, World(0, config.world_size, 0, Cpu()))
    update, watch = optimizer.build(parts.model, config.train), Stopwatch(time.time())

    def step() -> None:
        parts.train(batches(config, parts.micro_batches), watch)
        parts.clip(1.0)
        update.step()
        update.zero_grad(set_to_none=True)

    step()
    states = [tensor for state in update.state.values() for tensor in state.values() if tensor.ndim]
    held = sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in [*parts.model.parameters(), *states])
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        step()
    events = [event for event in told.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return held, held + peak


def batches(config: Config, count: int) -> Iterator[tuple[int, Batch]]:
    size = config.train.micro_batch, config.train.sequence_length + 1
    for left in reversed(range(count)):
        yield left, split(torch.randint(0, 1000, size))
