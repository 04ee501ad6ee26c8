"""The native path of Trn2 and Trn3: the very trainer, layouts and checkpoints, on devices/neuron.py with two names changed.

What that proves: every call that the engine makes of the device is one that TorchNeuron has by that name, nothing of the engine
takes the device for another, and layouts, resume and losses are those of the CPU. What it does not: that TorchNeuron computes what
torch does, compiles it, or communicates; nothing here has run on a Trainium chip.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
from ranks import Bench

PROGRAM = str(Path(__file__).parent / "neuron_ranks.py")
LAYOUTS = {
    "alone": (1, {}),
    "ddp2": (2, {}),
    "fsdp2": (2, {"fsdp": 2}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
}
COMMON = {
    "fleet.platform": "neuron",
    "train.precision": "fp32",
    "train.micro_batch_size": 2,
    "train.epsilon": 1e-3,
}


def prepare(bench: Bench, name: str, layout: str, **values: object) -> tuple[Path, int]:
    size, degrees = LAYOUTS[layout]
    keys = {f"train.parallelism.{key}": value for key, value in degrees.items()}
    return bench.prepare(name, size, **COMMON | keys | values), size


def test_every_layout_trains_as_the_cpu_does(bench: Bench) -> None:
    runs = {name: prepare(bench, name, name) for name in LAYOUTS}
    cpu = bench.train("cpu", 1, train__micro_batch_size=2, train__epsilon=1e-3)
    bench.train_all(list(runs.values()), PROGRAM)
    told = ranks.metrics(cpu)
    for name, (run, _) in runs.items():
        for ours, theirs in zip(ranks.metrics(run), told, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5), name
        assert ranks.results(run)["device"] == "neuron"


def test_a_killed_run_goes_on_exactly(bench: Bench) -> None:
    run, size = prepare(bench, "whole", "fsdp2", **{"train.compile": "true"})
    again, _ = prepare(bench, "killed", "fsdp2", **{"train.compile": "true"})
    ranks.go_on_after_a_kill(bench, run, again, size, PROGRAM)
