"""The memory model against what torch allocates: a real step of the engine in each layout, as one rank of a fake world of 8.

Collectives of a fake process group move nothing, but every rank's tensors have their true sizes; the profiler tells each allocation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather
from torch.testing._internal.distributed.fake_pg import FakeStore

from allocations import CONFIG, batches, measure
from trainfleet.config import Settings, load
from trainfleet.config.limits import is_half
from trainfleet.config.memory import memory_of
from trainfleet.devices.cpu import Cpu
from trainfleet.engine.parallel import arrange
from trainfleet.engine.timing import Stopwatch
from trainfleet.engine.world import World

ALONE = "fleet.nodes=1 train.global_batch_size=8"
GPT2 = "model.family=gpt2 model.intermediate_size=1024 train.precision=bf16"  # its norms keep bf16 on CPUs too, Llama's fp32
HALF = f"{GPT2} train.param_dtype=bf16"


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())  # type: ignore[no-untyped-call]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    dist.destroy_process_group()


SOME = ("train.parallelism.fsdp=8 train.activation_checkpointing=full",)
OTHERS = (
    "train.parallelism.tensor=4",
    ALONE,
    HALF,
    f"{ALONE} train.activation_checkpointing=selective",
    f"{ALONE} train.optimizer=muon",
    f"{ALONE} {GPT2}",
    f"{ALONE} train.precision=bf16 train.activation_checkpointing=full",
    "train.parallelism.fsdp=8 model.family=gpt2 model.dropout=0.1 train.activation_checkpointing=full",
    "train.parallelism.fsdp=8",
    "train.parallelism.fsdp=8 train.parallelism.zero_stage=1",
    "train.parallelism.context=4 train.parallelism.fsdp=2",
    "train.parallelism.context=4 train.activation_checkpointing=full",  # FSDP keeps what it sums over replicas to a pass's end
    f"{ALONE} {HALF}",
    f"train.parallelism.fsdp=8 {HALF}",
    f"train.parallelism.fsdp=8 train.parallelism.zero_stage=1 {HALF}",
)


@pytest.mark.parametrize(
    "layout", [*SOME, *(pytest.param(layout, marks=[pytest.mark.thorough]) for layout in OTHERS)]
)
def test_what_is_reckoned_is_what_a_step_allocates(layout: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    config, _ = load(Settings(tmp_path / "config.yaml", layout))
    reckoned = memory_of(config, is_half(config))
    state, peak = measure(config, World(0, config.world_size, 0, Cpu()))
    assert reckoned.weights + reckoned.moments == pytest.approx(state, rel=0.01)
    assert 0.95 * peak < reckoned.total < 1.06 * peak, (
        f"{reckoned} for {peak}"
    )  # it may err, and rather on the side that fits


PIECES = [  # bf16 takes minutes on CPUs without products in it
    ALONE, *(pytest.param(layout, marks=pytest.mark.thorough) for layout in (f"{ALONE} train.precision=bf16", f"{ALONE} {HALF}", HALF))
]  # fmt: skip


@pytest.mark.parametrize("layout", PIECES)
def test_a_loss_in_pieces_takes_what_is_reckoned(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With logits so large that the moment of the loss is the fullest, and as pieces of an eighth of them."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    wide = f"{layout} model.vocab_size=30000 model.layers=1"
    config, _ = load(Settings(tmp_path / "config.yaml", wide))
    train = config.train
    limit = 4 * train.micro_batch_size * train.sequence_length * config.model.vocab_size // 8
    for module in ("config.memory", "models.loss"):
        monkeypatch.setattr(f"trainfleet.{module}.LOGITS_BYTES", limit)
    reckoned = memory_of(config, is_half(config))
    _, peak = measure(config, World(0, config.world_size, 0, Cpu()))
    assert 0.95 * peak < reckoned.total < 1.06 * peak, f"{reckoned} for {peak}, pieces of {limit}"


def test_replicas_add_up_their_gradients_once_per_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    layout = "train.parallelism.fsdp=4 train.micro_batch_size=2"
    config, _ = load(Settings(tmp_path / "config.yaml", layout))
    parts: Any = arrange(config, World(0, 8, 0, Cpu()))
    monkeypatch.setattr("torch.distributed.all_reduce", added := Mock(wraps=dist.all_reduce))
    parts.train(batches(config, parts.micro_batches), Stopwatch(time.time()))
    assert parts.micro_batches >= 4 and added.call_count == 6 + 1  # six blocks and the rest


@pytest.mark.parametrize(
    ("layout", "passes", "gathers"),
    [
        (
            "train.parallelism.fsdp=8",
            1,
            7 + 5,
        ),  # all that is not a block, six blocks, and all but the last of these again
        ("train.parallelism.fsdp=8 train.parallelism.zero_stage=1", 2, 7),
        (
            "train.parallelism.pipeline=2 train.parallelism.fsdp=4",
            2,
            4,
        ),  # a stage of three blocks, ahead of any backward pass
    ],
)
def test_weights_are_gathered_no_more_often_than_they_are_freed(
    layout: str, passes: int, gathers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    config, _ = load(Settings(tmp_path / "config.yaml", layout))
    parts: Any = arrange(config, World(0, 8, 0, Cpu()))
    gather = Mock(wraps=foreach_all_gather)
    monkeypatch.setattr(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.foreach_all_gather", gather
    )
    tokens = torch.zeros((4, 128), dtype=torch.int64)
    for _ in range(passes):
        root = parts.stages[0]
        out = root(tokens) if parts.pipeline else root(tokens, targets=tokens)
    if passes == 1:
        out.backward()
    assert gather.call_count == gathers
