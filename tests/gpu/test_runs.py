"""Whole runs on the device: as on the CPU, in every number format, compiled, killed and resumed, and of several ranks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ranks
import torch
from ranks import Bench
from test_resume_exactly import Witness, sequences

from requirement import need
from trainfleet.devices import Device

LEARNT = {"model.kv_heads": 4, "model.tie_word_embeddings": "true"}
STILL = {"model.dropout": 0.0}
HALF = {"train.precision": "bf16", "train.param_dtype": "bf16"}
KINDS: dict[str, dict[str, object]] = {
    "llama": {},
    "documents": {"train.document_mask": "true"},
    "gpt2": {"model.family": "gpt2", **LEARNT, **STILL},
    "bert": {"model.family": "bert", **LEARNT, **STILL},
    "roberta": {"model.family": "roberta", **LEARNT, **STILL},
    "muon": {"train.optimizer": "muon"},
    "lamb": {"train.optimizer": "lamb"},
}
# How far losses may be from those of fp32 on the CPU.
FORMATS: dict[str, tuple[dict[str, object], float]] = {
    "tf32": ({}, 2e-3),
    "bf16": ({"train.precision": "bf16"}, 5e-3),
    "bf16-compiled": ({"train.precision": "bf16", "train.compile": "true"}, 5e-3),
    "bf16-selective": (
        {"train.precision": "bf16", "train.activation_checkpointing": "selective"},
        5e-3,
    ),
    "bf16-budget": (
        {
            "train.precision": "bf16",
            "train.compile": "true",
            "train.activation_checkpointing": "selective",
            "train.activation_memory_budget": 0.5,
        },
        5e-3,
    ),
    "fp16": ({"train.precision": "fp16"}, 5e-3),
    "fp16-compiled": ({"train.precision": "fp16", "train.compile": "true"}, 5e-3),
    "bf16-weights": (HALF, 1e-2),
    "bf16-weights-compiled": (HALF | {"train.compile": "true"}, 1e-2),
    "fp8": ({"train.precision": "bf16", "train.compile": "true"}, 1e-2),
    "fp8-bf16-weights": (HALF | {"train.compile": "true"}, 2e-2),
}
RESUMED: dict[str, dict[str, object]] = {
    "fp32": {},
    "bf16": {"train.precision": "bf16"},
    "bf16-compiled": {"train.precision": "bf16", "train.compile": "true"},
    "bf16-selective": {"train.precision": "bf16", "train.activation_checkpointing": "selective"},
    "fp16": {"train.precision": "fp16"},
    "bf16-weights": HALF,
    "bf16-weights-compiled": HALF | {"train.compile": "true"},
    "dropout": {"model.family": "gpt2", **LEARNT, "model.dropout": 0.1, "train.precision": "bf16"},
    "muon": {"train.optimizer": "muon", "train.precision": "bf16"},
    "lamb": {"train.optimizer": "lamb"},
    "long": {
        "train.precision": "bf16",
        "train.sequence_length": 1024,
        "model.max_position_embeddings": 1024,
    },
}
STEPS = 16
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "ddp2": (2, {}),
    "fsdp2": (2, {"train.parallelism.fsdp": 2}),
    "fsdp2-bf16": (2, {"train.parallelism.fsdp": 2, "train.precision": "bf16"}),
    "zero1": (2, {"train.parallelism.fsdp": 2, "train.parallelism.zero_stage": 1}),
    "tp2": (2, {"train.parallelism.tensor": 2}),
    "pp2": (2, {"train.parallelism.pipeline": 2}),
    "cp2": (2, {"train.parallelism.context": 2}),
    "fsdp2-tp2": (4, {"train.parallelism.fsdp": 2, "train.parallelism.tensor": 2}),
}


@contextmanager
def environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= values
    yield
    os.environ.clear()
    os.environ |= before


def on_the_cpu(bench: Bench, runs: list[Path]) -> None:
    """Trains them there: a plan for the CPU opens nothing else."""
    for run in runs:
        config = run / "config.yaml"
        config.write_text(re.sub("platform: [a-z-]+", "platform: cpu", config.read_text()))
    bench.train_all([(run, 1) for run in runs])


def assert_near(run: Path, other: Path, near: float, norm: float) -> None:
    """Losses, and gradient norms, which the order of sums tells in first."""
    for ours, theirs in zip(ranks.metrics(run), ranks.metrics(other), strict=True):
        assert ours.pop("grad_norm") == pytest.approx(theirs.pop("grad_norm"), rel=norm)
        assert ours == pytest.approx(theirs, rel=near)


@pytest.fixture(scope="module")
def pairs(bench: Bench) -> dict[str, tuple[Path, Path]]:
    """Of each kind a run of 8 steps on the CPU, and one that went on on the device after step 4, with fp32 products as such."""
    begun = [
        bench.prepare(name, 1, **{"train.steps": 4} | values) for name, values in KINDS.items()
    ]
    on_the_cpu(bench, begun)
    moved = [run.with_name(f"{run.name}-moved") for run in begun]
    for run, copy in zip(begun, moved, strict=True):
        shutil.copytree(run, copy)
    for run in begun:
        bench.prepare(run.name, 1, **KINDS[run.name])
    for run in moved:
        bench.prepare(run.name, 1, **KINDS[run.name.removesuffix("-moved")])
    on_the_cpu(bench, begun)
    with environment(NVIDIA_TF32_OVERRIDE="0"):
        bench.train_all([(run, 1) for run in moved])
    return {run.name: (copy, run) for run, copy in zip(begun, moved, strict=True)}


@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_of_the_cpu_goes_on_on_the_device(
    pairs: dict[str, tuple[Path, Path]], device: Device, name: str
) -> None:
    moved, stayed = pairs[name]
    assert (
        ranks.results(moved)["device"] == device.kind and ranks.results(stayed)["device"] == "cpu"
    )
    assert [event["step"] for event in ranks.events(moved, "resumed")] == [4] and len(
        ranks.metrics(moved)
    ) == 8
    assert_near(moved, stayed, 1e-4, 2e-3)


def test_a_checkpoint_of_the_device_goes_on_on_the_cpu(
    bench: Bench, pairs: dict[str, tuple[Path, Path]]
) -> None:
    run = pairs["llama"][0]
    shutil.copytree(run, back := run.with_name("back"))
    bench.prepare(back.name, 1, **{"train.steps": 10})
    on_the_cpu(bench, [back])
    assert ranks.results(back)["status"] == "finished" and ranks.results(back)["device"] == "cpu"
    assert (
        len(ranks.metrics(back)) == 10
        and ranks.metrics(back)[-1]["loss"] < ranks.metrics(back)[0]["loss"]
    )


@pytest.fixture(scope="module")
def formats(bench: Bench) -> dict[str, Path]:
    """One run on the CPU; and one in each format, with its weights: both begin with the CPU's, which other devices don't draw."""
    common = {"train.steps": 10, "checkpoint.every": 2}
    begun = bench.prepare("begun", 1, **common | {"train.steps": 2})
    on_the_cpu(bench, [begun])
    made = {}
    for name, (values, _) in FORMATS.items():
        shutil.copytree(begun, begun.with_name(f"format-{name}"))
        made[name] = run = bench.prepare(f"format-{name}", 1, **common | values)
        if "fp8" in name:
            resolved = (run / "config.yaml").read_text()  # a plan asks it of a known GPU alone
            (run / "config.yaml").write_text(resolved.replace("precision: bf16", "precision: fp8"))
    shutil.copytree(begun, begun.with_name("plain"))
    on_the_cpu(bench, [plain := bench.prepare("plain", 1, **common)])
    return {"plain": plain, **made}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_trains_nearly_as_fp32_does(
    bench: Bench, formats: dict[str, Path], device: Device, name: str
) -> None:
    if "fp8" in name:
        need("torchao", "pip install torchao==0.18.0")
        if not device.native_fp8:
            pytest.skip(f"{device.name} has no fp8 instructions")
    bench.train_all([(formats[name], 1)])
    told, near = ranks.results(formats[name]), FORMATS[name][1]
    assert told["status"] == "finished" and told["device"] == device.kind and told["sample"]["text"]
    assert_near(formats[name], formats["plain"], near, 0.1 if "fp8" in name else 5e-2)


@pytest.fixture(scope="module")
def resumed(bench: Bench, request: pytest.FixtureRequest) -> Iterator[Witness]:
    """Two runs of each case that is judged: one whole, one killed at a random moment and trained again."""
    chosen = {
        item.callspec.params.get("case")
        for item in request.session.items
        if hasattr(item, "callspec")
    }
    common = {"train.steps": STEPS, "checkpoint.every": 2, "train.micro_batch_size": 2}
    plan = [
        (1, bench.prepare(f"{case}.{kind}", 1, **common | values), kind, "")
        for case, values in RESUMED.items()
        if case in chosen
        for kind in ("whole", "killed")
    ]
    yield (witness := Witness(bench, plan))
    witness.close()


@pytest.mark.parametrize("case", RESUMED)
def test_killed_it_goes_on_bit_for_bit(bench: Bench, resumed: Witness, case: str) -> None:
    whole, killed = (bench.folder / "runs" / f"{case}.{kind}" for kind in ("whole", "killed"))
    resumed.of(whole)
    told = resumed.of(killed)
    assert ranks.results(killed)["status"] == "finished"
    assert ranks.metrics(killed) == ranks.metrics(whole), told
    assert sequences(killed) == sequences(whole)
    ours, theirs = (
        ranks.state_of(run / "checkpoints" / f"step-{STEPS:08d}") for run in (killed, whole)
    )
    assert any("random" in key for key in ours) and ranks.different(ours, theirs) == [], told


def test_a_profile_tells_the_devices_kernels_apart(bench: Bench, device: Device) -> None:
    run = bench.train("profiled", 1, train__profile_steps="3-4", train__precision="bf16")
    told = ranks.json.loads((run / "profile" / "summary.json").read_text())
    assert (
        told["parts"].keys() >= {"forward", "backward", "optimizer"}
        and told["top"]
        and 0 < told["seconds"] < 60
    )
    line = ranks.json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    parts = {
        key: line[key] for key in line if key.endswith("_seconds") and key != "tokens_per_second"
    }
    assert (
        parts.keys() >= {"forward_seconds", "backward_seconds", "optimizer_seconds"}
        and min(parts.values()) >= 0
    )
    assert line["memory_bytes"] > 2**20


def test_a_finished_run_is_sampled_and_judged_on_the_device(
    bench: Bench, pairs: dict[str, tuple[Path, Path]]
) -> None:
    run = str(pairs["llama"][0])
    for program in (("generate", run, "def ", "--tokens", "20", "--seed", "1"), ("evaluate", run)):
        command = [sys.executable, "-m", f"trainfleet.engine.{program[0]}", *program[1:]]
        done = subprocess.run(
            command,
            cwd=bench.folder,
            env=ranks.environment(),
            text=True,
            capture_output=True,
            timeout=300,
        )
        assert done.returncode == 0 and done.stdout, done.stderr


@pytest.fixture(scope="module")
def alone(bench: Bench) -> Path:
    with environment(NVIDIA_TF32_OVERRIDE="0"):
        return bench.train(
            "alone", 1, model__layers=4, train__epsilon=1e-3, train__micro_batch_size=2
        )


@pytest.mark.parametrize("name", LAYOUTS)
def test_several_ranks_train_as_one_does(
    bench: Bench, alone: Path, device: Device, name: str
) -> None:
    count, values = LAYOUTS[name]
    if device.kind == "cuda" and torch.cuda.device_count() < count:
        pytest.skip(
            f"takes {count} GPUs, here {'is' if torch.cuda.device_count() == 1 else 'are'} {torch.cuda.device_count()}"
        )
    common = {"model.layers": 4, "train.epsilon": 1e-3, "train.micro_batch_size": 2}
    run = bench.prepare(f"layout-{name}", count, **common | values)
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}", "--master-addr=127.0.0.1",
                f"--master-port={ranks.free_port()}", "-m", "trainfleet.engine", str(run)]  # fmt: skip
    with environment(NVIDIA_TF32_OVERRIDE="0"):
        done = subprocess.run(
            torchrun,
            cwd=bench.folder,
            env=ranks.environment(),
            text=True,
            capture_output=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    half = "bf16" in name
    assert_near(run, alone, 5e-3 if half else 1e-4, 5e-2 if half else 2e-3)
