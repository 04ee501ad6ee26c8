"""Gradients that are not finite on one of two ranks: both leave the step out, and a run that has nothing else says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ranks
import torch
from ranks import Bench
from safetensors.torch import load_file, save_file

from trainfleet.engine import export
from trainfleet.run import run_folder

PLANTED = str(Path(__file__).with_name("planted.py"))


def train(bench: Bench, faults: str, name: str, **values: object) -> tuple[Path, int, str]:
    run = bench.prepare(
        name, 2, **{"train.steps": 6, "checkpoint.every": 1, "checkpoint.keep": 9, **values}
    )
    return run, *bench.attempt(run, 2, PLANTED, faults)


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    state = ranks.state_of(run / "checkpoints" / f"step-{step:08d}")
    return {name: tensor for name, tensor in state.items() if name.startswith("model.")}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_that_is_bad_on_one_rank_is_left_out_by_both(bench: Bench, optimizer: str) -> None:
    run, code, output = train(
        bench, "1:3,0:5", f"left-out-{optimizer}", **{"train.optimizer": optimizer}
    )
    assert code == 0 and "1 steps skipped" in output, output
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [0, 0, 1, 1, 2, 2] and lines[2][
        "grad_norm"
    ] is None
    assert [event["step"] for event in ranks.events(run, "skipped")] == [3, 5]
    for step, same in ((2, False), (3, True), (4, False), (5, True), (6, False)):
        before, after = weights(run, step - 1), weights(run, step)
        assert all(torch.equal(before[name], after[name]) for name in before) == same, step
    assert all(tensor.isfinite().all() for tensor in weights(run, 6).values())


def test_too_many_in_a_row_stop_the_run_and_say_where(bench: Bench) -> None:
    run, code, output = train(bench, "1:3,1:4,1:5", "stopped", **{"train.max_consecutive_skips": 3})
    assert code == 1 and output.count("were not finite in steps 3 to 5") == 1, output
    assert (
        "samples 16 to 39" in output
        and "train.max_consecutive_skips" in output
        and "make inspect SAMPLE=16" in output
    )
    assert (run / "checkpoints" / "step-00000003").is_dir() and not (
        run / "checkpoints" / "step-00000005"
    ).exists()


def test_weights_that_are_not_finite_are_named(bench: Bench) -> None:
    run = bench.train("first", 1, train__steps=1)
    export.export(run_folder.Run(run), out := bench.folder / "broken")
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    bench.train("poisoned", 2, code=1, train__init_from=str(out), train__steps=6)
    assert bench.output.count("weights are not finite: layers.1.mlp.up_proj.weight") == 1, (
        bench.output
    )
