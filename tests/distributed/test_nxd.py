"""trainfleet_nxd, executed: on a stand-in for NxD Core that has its signatures, layout of slices and ZeRO-1 shards.

NxD's real source is executed by tests/nxd/check.py, in an environment of its own; this runs the same code of ours wherever the tests run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
from ranks import Bench

PROGRAM = str(Path(__file__).parent / "nxd_ranks.py")
COMMON = {
    "train.precision": "fp32",
    "train.micro_batch_size": 2,
    "train.epsilon": 1e-3,
    "train.compile": "false",
    "train.spike_sigmas": 0,
}
XLA = COMMON | {"fleet.platform": "neuron-xla"}
LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "dp2-zero1": (2, {"fsdp": 2, "zero_stage": 1}),
    "tp4-copied-heads": (4, {"tensor": 4}),  # two key-value heads, each on two ranks
    "tp2-dp2-zero1-recompute": (4, {"tensor": 2, "fsdp": 2, "zero_stage": 1}),
    "pp2": (2, {"pipeline": 2}),
    "pp2-tp2": (4, {"pipeline": 2, "tensor": 2}),
}
RECOMPUTED = {"train.activation_checkpointing": "full"}


def prepare(bench: Bench, name: str, layout: str, **values: object) -> tuple[Path, int]:
    size, degrees = LAYOUTS[layout]
    keys = {f"train.parallelism.{key}": value for key, value in degrees.items()} | (
        RECOMPUTED if "recompute" in layout else {}
    )
    return bench.prepare(name, size, **XLA | keys | values), size


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_every_layout_trains_as_one_process_without_nxd(bench: Bench, family: str) -> None:
    values = ranks.BERT if family == "bert" else {}
    alone = bench.prepare(f"{family}-alone", 1, **COMMON | values)
    bench.train_all([(alone, 1)])
    runs = {name: prepare(bench, f"{family}-{name}", name, **values) for name in LAYOUTS}
    bench.train_all(list(runs.values()), PROGRAM)
    told = ranks.metrics(alone)
    for name, (run, _) in runs.items():
        for ours, theirs in zip(ranks.metrics(run), told, strict=True):
            for key in {"loss", "grad_norm", "valid_loss"} & theirs.keys():
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4), (name, ours["step"], key)


def test_documents_are_kept_apart_in_validation_too(bench: Bench) -> None:
    """Of 5 sequences a rank has 2 or 3, and fills up with padding, which must have documents as well."""
    values = {
        "train.document_mask": "true",
        "train.steps": 2,
        "train.validate_every": 1,
        "train.validation_sequences": 5,
    }
    alone = bench.prepare("documents-alone", 1, **COMMON | values)
    run, size = prepare(bench, "documents", "dp2-zero1", **values)
    bench.train_all([(alone, 1)])
    bench.train_all([(run, size)], PROGRAM)
    for ours, theirs in zip(ranks.metrics(run), ranks.metrics(alone), strict=True):
        assert ours["valid_loss"] == pytest.approx(theirs["valid_loss"], rel=1e-4)


def test_a_killed_run_goes_on_exactly(bench: Bench) -> None:
    """NxD's own loading would shard the weights before it has loaded them (since SDK 2.22): ours ends on the same bits."""
    whole, size = prepare(bench, "whole", "dp2-zero1")
    ranks.go_on_after_a_kill(bench, whole, prepare(bench, "killed", "dp2-zero1")[0], size, PROGRAM)


def test_a_checkpoint_of_tensor_ranks_goes_on_without_nxd(bench: Bench) -> None:
    whole, size = prepare(bench, "tp2", "tp2")
    bench.train_all([(whole, size)], PROGRAM)
    more = bench.prepare("on", 1, **COMMON | {"train.init_from": f"{whole}", "train.steps": 1, "train.learning_rate": 1e-12,
                                              "train.validate_every": 1})  # fmt: skip
    bench.train_all([(more, 1)])
    ours, theirs = ranks.metrics(more)[-1]["valid_loss"], ranks.metrics(whole)[-1]["valid_loss"]
    assert ours == pytest.approx(theirs, rel=1e-5)
