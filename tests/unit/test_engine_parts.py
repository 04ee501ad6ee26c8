"""The parts of the training loop, each by itself."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from trainfleet import devices, models
from trainfleet.config import schema
from trainfleet.config.schedule import learning_rate
from trainfleet.config.types import Train
from trainfleet.devices.cpu import Cpu
from trainfleet.engine import batches, optimizer
from trainfleet.engine.__main__ import leave_alone
from trainfleet.engine.batches import Batches
from trainfleet.engine.checkpoint import resuming
from trainfleet.engine.timing import Stopwatch
from trainfleet.engine.vote import Vote
from trainfleet.engine.world import World
from trainfleet.run.run_folder import Run
from trainfleet.trust.validation import fit

CHOSEN = {
    "steps": 100, "global_batch_size": 8, "micro_batch_size": 2, "sequence_length": 6, "learning_rate": 0.01, "warmup_steps": 10, "seed": 3, "spike_sigmas": 6.0,
    "validate_every": 0, "validation_sequences": 7, "schedule_steps": 100, "decay_steps": 20, "activation_checkpointing": "none",
    "compile": False, "parallelism": {"fsdp": 1, "tensor": 1, "pipeline": 1, "context": 1, "zero_stage": 3, "virtual_stages": 1},
}  # fmt: skip
TRAIN = fit(Train, schema.fill({"name": "parts"}, schema.load_schema())["train"] | CHOSEN)
SEQUENCES = 10  # in the validation split below


class Numbered:
    """A dataset of which sample g is g everywhere, so that a batch tells what it was asked for."""

    end_of_document = 3
    validation_parts = ("validation/a", "validation/b")

    def samples(self, split: str, sequence_length: int) -> int:
        return SEQUENCES

    def learned(self, *words: object) -> None:
        return None

    def batch(
        self, split: str, first: int, count: int, sequence_length: int, seed: int
    ) -> np.ndarray:
        assert split.startswith("validation") or seed == TRAIN.seed
        return np.repeat(np.arange(first, first + count)[:, None], sequence_length + 1, axis=1)


class Part:
    """As much of a config as the batches look at."""

    def __init__(self, train: Train) -> None:
        self.train = train


def taken(step: int, ranks: int, micro_batch: int) -> list[int]:
    """The samples of one step over all ranks and micro-batches."""
    train = replace(TRAIN, micro_batch_size=micro_batch)
    parts = [Batches(Numbered(), Part(train), rank, ranks, Cpu()) for rank in range(ranks)]  # type: ignore[arg-type]
    found = [int(row[0]) for part in parts for _, batch in part.of(step) for row in batch.inputs]
    for part in parts:
        part.reader.shutdown(cancel_futures=True)
    return found


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (8, 1)])
def test_a_step_takes_the_same_samples_however_it_is_shared_out(
    ranks: int, micro_batch: int
) -> None:
    assert taken(1, ranks, micro_batch) == list(range(8)) and taken(5, ranks, micro_batch) == list(
        range(32, 40)
    )


def test_what_was_read_ahead_is_used_only_for_its_step() -> None:
    part = Batches(Numbered(), Part(TRAIN), 0, 1, Cpu())  # type: ignore[arg-type]
    steps = [
        [int(row[0]) // 8 + 1 for _, batch in part.of(step) for row in batch.inputs]
        for step in (1, 2, 7, 3)
    ]
    part.reader.shutdown(cancel_futures=True)
    assert [set(rows) for rows in steps] == [{1}, {2}, {7}, {3}]


def test_targets_are_the_inputs_one_later() -> None:
    inputs, targets, documents, _ = batches.split(torch.arange(14).view(2, 7))
    assert (
        torch.equal(inputs[:, 1:], targets[:, :-1]) and targets[1, -1] == 13 and documents is None
    )


class Packed(Numbered):
    """A dataset whose every token is 3, the end of a document, where its sample's number and place add up to an even number."""

    def batch(
        self, split: str, first: int, count: int, sequence_length: int, seed: int
    ) -> np.ndarray:
        places = np.arange(first, first + count)[:, None] + np.arange(sequence_length + 1)[None, :]
        return np.where(places % 2, 7, 3)


@pytest.mark.parametrize("separate", [True, False])
def test_batches_say_where_documents_end_when_that_is_asked_for(separate: bool) -> None:
    config = Part(replace(TRAIN, document_mask=separate))
    part = Batches(Packed(), config, 0, 1, Cpu())  # type: ignore[arg-type]
    trained = [batch for _, batch in part.of(1)]
    validated = list(batches.validation(Packed(), config, 0, 1, Cpu()))  # type: ignore[arg-type]
    part.reader.shutdown(cancel_futures=True)
    for batch in (*trained, validated[0]):
        if separate:  # an end is the last token of its document
            assert batch.documents is not None and batch.documents.dtype == torch.int32
            assert batch.documents.tolist() == [[0, 1, 1, 2, 2, 3], [0, 0, 1, 1, 2, 2]]
        else:
            assert batch.documents is None


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 9])
def test_validation_is_the_same_sequences_at_any_world_size(ranks: int) -> None:
    parts = [
        batches.validation(Numbered(), Part(TRAIN), rank, ranks, Cpu()) for rank in range(ranks)
    ]  # type: ignore[arg-type]
    assert [int(row[0]) for part in parts for batch in part for row in batch.inputs] == list(
        range(7)
    )


def test_the_parts_of_the_validation_share_its_sequences_in_batches_of_one_shape() -> None:
    found = batches.validation(Numbered(), Part(TRAIN), 0, 1, Cpu(), "validation/b")  # type: ignore[arg-type]
    assert [[int(row[0]) for row in batch.inputs] for batch in found] == [[0, 1], [2, 0]]
    few = Part(replace(TRAIN, validation_sequences=1))
    assert batches.validation_count(Numbered(), few, "validation/b") == 0  # type: ignore[arg-type]


def test_validation_takes_no_more_than_there_is() -> None:
    assert (
        batches.validation_count(Numbered(), Part(replace(TRAIN, validation_sequences=99)))
        == SEQUENCES
    )  # type: ignore[arg-type]


def test_learning_rate_warms_up_and_ends_at_the_floor() -> None:
    rates = [learning_rate(TRAIN, step) for step in range(1, 101)]
    assert (
        rates[0] == pytest.approx(0.001)
        and rates[9] == pytest.approx(0.01)
        and rates[99] == pytest.approx(0.001)
    )
    assert rates[:10] == sorted(rates[:10]) and rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[54] == pytest.approx(
        0.01 * (0.1 + 0.9 * 0.5), rel=1e-6
    )  # half way down the cosine


def test_without_warm_up_the_first_step_has_nearly_the_peak() -> None:
    assert learning_rate(replace(TRAIN, warmup_steps=0), 1) == pytest.approx(0.01, rel=1e-3)


def test_only_matrices_decay() -> None:
    layer = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 3), nn.RMSNorm(3))
    groups = optimizer.build(layer, TRAIN, Cpu()).param_groups
    assert {tuple(p.shape) for p in groups[0]["params"]} == {(4, 3), (3, 3)} and groups[0][
        "weight_decay"
    ] == 0.1
    assert all(p.ndim == 1 for p in groups[1]["params"]) and groups[1]["weight_decay"] == 0


@pytest.mark.parametrize(("limit", "left"), [(1.0, 1.0), (0.0, 5.0), (10.0, 5.0)])
def test_clipping_scales_to_the_limit_and_tells_the_norm_before(limit: float, left: float) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert optimizer.clip([parameter], limit).item() == pytest.approx(5.0)
    assert parameter.grad.norm().item() == pytest.approx(left, rel=1e-4)


def test_every_second_is_in_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    watch = Stopwatch(started=90.0)
    watch.start_training(before=1000.0)
    now[0] += 5
    with watch.stage("validate"):
        now[0] += 2
    with watch.stage("checkpoint"):
        now[0] += 3
    now[0] += 1
    assert watch.stages() == {
        "startup": 10.0,
        "train": 6.0,
        "validate": 2.0,
        "checkpoint": 3.0,
        "total": 21.0,
    }
    assert watch.trained == 1006.0


def test_precision_is_what_all_devices_are_good_at() -> None:
    found = [
        [World(0, 1, 0, Cpu(), native).precision(asked) for asked in ("auto", "fp32", "bf16")]
        for native in (False, True)
    ]
    assert found == [
        [torch.float32, torch.float32, torch.bfloat16],
        [torch.bfloat16, torch.float32, torch.bfloat16],
    ]


def test_a_device_knows_itself() -> None:
    device = devices.nearest()
    assert device.name and 1e9 < device.peak_flops(torch.float32) < math.inf
    assert 0 < device.memory_used() < device.memory_bytes()
    assert device.upload(np.ones((2, 2))).device.type == device.kind


def test_random_numbers_of_another_kind_of_device_are_not_taken_up() -> None:
    """A run that moves from a CPU to a GPU begins them anew, where each has as many ranks."""

    class Other(Cpu):
        kind = "other"

        def generators(self) -> list[torch.Generator]:
            return [torch.default_generator, torch.Generator()]

    saved = resuming.read(Cpu())
    drawn = torch.rand(3)
    assert not resuming.restore(saved, Other()) and not torch.equal(torch.rand(3), drawn)
    assert resuming.restore(saved, Cpu()) and torch.equal(torch.rand(3), drawn)


def test_any_node_tells_that_no_launcher_is_left_once_and_goes_on_where_it_can_t(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first node to notice stops all the others, which then never notice: node 0 is not the one that must."""
    run = Run(tmp_path / "run", writer="node-1-0")
    for local in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        vote = Vote(None, Mock())
        leave_alone(run, vote, World(2 + local, 4, 1, Cpu()), 121.0)
        assert vote.heard
    assert [(event["event"], event["node"]) for event in run.read_events()] == [("orphaned", 1)]
    (tmp_path / "file").touch()
    leave_alone(Run(tmp_path / "file"), vote, World(0, 1, 0, Cpu()), 121.0)


class Philox(Cpu):
    """A device that draws other numbers than the host from the same seed, as CUDA's does."""

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed ^ 0x5A5A5A)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_first_weights_are_those_of_every_layout_on_every_device(
    tmp_path: Path, family: str
) -> None:
    """Replicas draw where the device draws, as a divided model does: else a layout chosen by `auto` would change a run."""
    from trainfleet.config import Settings, load
    from trainfleet.engine.parallel import Replicas
    from trainfleet.engine.parallel.parallelize import Division
    from trainfleet.engine.world import join

    (tmp_path / "config.yaml").write_text(
        "name: x\nmodel: {layers: 2, hidden_size: 32, heads: 4, kv_heads: 4, intermediate_size: 64, tie_word_embeddings: true,"
        f" family: {family}}}\nfleet: {{nodes: 1, ranks_per_node: 1}}\ntrain: {{micro_batch_size: 1, compile: false, precision: fp32}}\n"
    )
    config = load(Settings(tmp_path / "config.yaml"))[0]
    with join(Philox()) as world:
        ours, theirs = (
            Replicas(config, world).weights(),
            Division(config, world.device, torch.float32).weights(),
        )
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    hosts = models.build(config.model)
    hosts.initialize(config.train.seed)
    assert not torch.equal(ours["lm_head.weight"], hosts.state_dict()["lm_head.weight"]), (
        "the stand-in draws as the host does"
    )
