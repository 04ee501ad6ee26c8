"""Training in fp16 on real ranks, in every layout: near fp32, and a step whose gradients overflow on one rank is left out by all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from ranks import Bench

PROGRAM = str(Path(__file__).with_name("overflowing.py"))
STEPS, BAD = 6, 3
COMMON = {
    "train.precision": "fp16",
    "train.steps": STEPS,
    "train.schedule_steps": STEPS,
    "train.warmup_steps": 1,
    "train.validate_every": 3,
    "train.micro_batch_size": 2,
    "train.epsilon": 1e-3,  # with less, Adam's first steps are of the size of the learning rate whatever the gradients are
    "checkpoint.every": 1,
    "checkpoint.keep": 9,
}
BERT = {
    "model.family": "bert",
    "model.kv_heads": 4,
    "model.tie_word_embeddings": "true",
    "model.dropout": 0.0,
}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "alone": (1, {}),
    "replicas": (2, {}),
    "sharded": (2, {"train.parallelism.fsdp": 2}),
    "zero1": (2, {"train.parallelism.fsdp": 2, "train.parallelism.zero_stage": 1}),
    "tensor": (2, {"train.parallelism.tensor": 2}),
    "pipeline": (2, {"train.parallelism.pipeline": 2}),
    "interleaved": (
        2,
        {"train.parallelism.pipeline": 2, "train.parallelism.virtual_stages": 2, "model.layers": 4},
    ),
    "context": (2, {"train.parallelism.context": 2}),
    "sharded-tensor": (4, {"train.parallelism.fsdp": 2, "train.parallelism.tensor": 2}),
    "untied-stages": (2, {"train.parallelism.pipeline": 2, "model.tie_word_embeddings": "false"}),
    "muon": (2, {"train.optimizer": "muon", "train.parallelism.fsdp": 2}),
    "lamb": (2, {"train.optimizer": "lamb", "train.parallelism.tensor": 2}),
    "bert": (2, BERT),
    "recomputed": (2, {"train.parallelism.fsdp": 2, "train.activation_checkpointing": "full"}),
}
SHAPES = (
    "model.",
    "train.optimizer",
)  # keys by which a run is another one, with an fp32 run of its own to be judged by


@pytest.fixture(scope="module")
def runs(bench: Bench) -> Iterator[dict[str, Path]]:
    """Runs in fp16, whose third step overflows on the last rank, and one in fp32 on one rank for each model and optimizer."""
    made, plain = {}, {}
    for name, (size, values) in LAYOUTS.items():
        made[name] = bench.prepare(name, size, **COMMON | values), size
        if (judge := judge_of(name)) not in plain:
            plain[judge] = (
                bench.prepare(judge, 1, **COMMON | shape_of(name) | {"train.precision": "fp32"}),
                1,
            )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OVERFLOWS", str(BAD))
        bench.train_all([*made.values(), *plain.values()], PROGRAM)
        yield {name: run for name, (run, _) in (made | plain).items()}


def shape_of(name: str) -> dict[str, object]:
    return {key: value for key, value in LAYOUTS[name][1].items() if key.startswith(SHAPES)}


def judge_of(name: str) -> str:
    """The name of the fp32 run that a run is judged by: that of the first one with its model and optimizer."""
    return f"{next(other for other in LAYOUTS if shape_of(other) == shape_of(name))}-fp32"


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    state = ranks.state_of(run / "checkpoints" / f"step-{step:08d}")
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not name.startswith("random.")
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_that_overflows_on_one_rank_is_left_out_by_all(
    runs: dict[str, Path], name: str
) -> None:
    found = lines(runs[name])
    assert [line["loss_scale"] for line in found] == [65536.0] * 2 + [32768.0] * 4
    assert [line["overflowed"] for line in found] == [0, 0, 1, 1, 1, 1]
    assert [line["skipped"] for line in found] == [0] * STEPS, (
        "the guard takes no overflow for a bad step"
    )
    assert [event["step"] for event in ranks.events(runs[name], "overflowed")] == [BAD]
    for step in range(2, STEPS + 1):
        before, after = weights(runs[name], step - 1), weights(runs[name], step)
        same = [key for key in before if torch.equal(before[key], after[key])]
        assert len(same) == len(before) if step == BAD else len(same) < len(before) / 10, step
    assert all(
        value.dtype == torch.float32 and value.isfinite().all()
        for value in weights(runs[name], STEPS).values()
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_nearly_as_fp32_does(runs: dict[str, Path], name: str) -> None:
    """The judge leaves its third step out too: there it is a bad one."""
    for ours, theirs in zip(lines(runs[name]), lines(runs[judge_of(name)]), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-3)
        assert ours.get("valid_loss", 0) == pytest.approx(theirs.get("valid_loss", 0), rel=2e-3)
        if ours["step"] != BAD:
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-2)


def test_one_rank_and_two_train_alike(runs: dict[str, Path]) -> None:
    for ours, theirs in zip(
        ranks.metrics(runs["replicas"]), ranks.metrics(runs["alone"]), strict=True
    ):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_a_resumed_run_goes_on_with_its_scale_to_the_last_bit(
    bench: Bench, runs: dict[str, Path]
) -> None:
    for name, whole in (("again", "replicas"), ("again-sharded", "sharded")):
        size, values = LAYOUTS[whole]
        for steps in (4, STEPS):
            bench.train_all(
                [
                    (
                        run := bench.prepare(
                            name, size, **COMMON | values | {"train.steps": steps}
                        ),
                        size,
                    )
                ],
                PROGRAM,
            )
        assert not ranks.different(weights(run, STEPS), weights(runs[whole], STEPS))
        keys = ("step", "loss", "grad_norm", "loss_scale", "overflowed", "skipped")
        ours, theirs = (
            [{key: line[key] for key in keys} for line in lines(each)]
            for each in (run, runs[whole])
        )
        assert ours == theirs
        marker = (run / "checkpoints" / f"step-{STEPS:08d}" / "committed.json").read_text()
        assert json.loads(marker)["commit"]["scale"] == [32768.0, STEPS - BAD, 1, BAD]


def test_a_run_in_fp32_goes_on_in_fp16_and_back(bench: Bench) -> None:
    for steps, precision in ((2, "fp32"), (4, "fp16"), (6, "fp32")):
        run = bench.train(
            "to-and-fro",
            1,
            **{"train.schedule_steps": 6, "train.steps": steps, "train.precision": precision},
        )
    assert [line.get("loss_scale") for line in lines(run)] == [
        None,
        None,
        65536.0,
        65536.0,
        None,
        None,
    ]


def test_a_scale_with_nothing_left_stops_the_run_and_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERFLOWS", "2,3,4,5,6")
    monkeypatch.setenv("LOSS_SCALE", "4")
    code, output = bench.attempt(bench.prepare("collapsed", 2, **COMMON), 2, PROGRAM)
    assert (
        code == 1
        and output.count("the gradients were not finite at step 4: they overflow fp16") == 1
    ), output
    assert "3 steps overflowed and were skipped" in output and "the weights are finite" in output, (
        output
    )
    assert (
        "train.precision=fp32" in output
        and "1 steps skipped: gradients overflowed fp16; the loss scale is now 2" in output
    )
