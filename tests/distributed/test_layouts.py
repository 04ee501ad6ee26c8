"""Every layout computes what one process computes: losses and gradient norms over 20 steps, on real ranks over gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks
from ranks import Bench

LAYOUTS = {
    "alone": (1, {}),
    "ddp4": (4, {}),
    "fsdp2": (2, {"shard": 2}),
    "zero1": (2, {"shard": 2, "zero": 1}),
    "hsdp": (4, {"shard": 2}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "interleaved": (2, {"pipeline": 2, "interleave": 2}),
    "cp2": (2, {"context": 2}),
    "fsdp2-tp2": (4, {"shard": 2, "tensor": 2}),
    "pp2-tp2": (4, {"pipeline": 2, "tensor": 2}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Every layout's run, with four blocks (enough for four stages) and two micro-batches or more accumulated."""
    here = Path.cwd()
    bench = Bench(tmp_path_factory.mktemp("layouts"))
    made = {}
    for name, (size, degrees) in LAYOUTS.items():
        layout = {f"train.layout.{key}": value for key, value in degrees.items()}
        made[name] = bench.prepare(name, size, **{"train.micro_batch": 2, "model.layers": 4, **layout})
    bench.train_all([(run, LAYOUTS[name][0]) for name, run in made.items()])
    yield made
    os.chdir(here)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "alone"])
def test_a_layout_trains_as_one_process_does(runs: dict[str, Path], name: str) -> None:
    """The norm may drift further than the loss: AdamW divides by roots of sums, in which an order of additions shows."""
    for ours, theirs in zip(ranks.metrics(runs[name]), ranks.metrics(runs["alone"]), strict=True):
        norm = 1e-5 if ours["step"] == 1 else 1e-3
        assert ours.pop("grad_norm") == pytest.approx(theirs.pop("grad_norm"), rel=norm)
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_every_layout_says_what_the_model_writes(runs: dict[str, Path]) -> None:
    assert all(ranks.results(run)["sample"]["text"] for run in runs.values())
