"""make sweep: a run per combination of values, killed in the middle and continued; the better half of them with STOP=half."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

import verbs

CONFIG = """
name: line
fleet: {nodes: 1, ranks_per_node: 1}
data: {name: text, sources: [text], vocab_size: 340, validation_fraction: 0.1}
model: {layers: 1, hidden_size: 32, heads: 2, kv_heads: 1, intermediate_size: 64}
train: {steps: 8, precision: fp32, global_batch_size: 8, sequence_length: 32, log_every: 1, validate_every: 4, validation_sequences: 8}
checkpoint: {every: 4}
"""
GRID = "GRID=train.learning_rate=1e-4,1e-3,3e-3 model.layers=1,2"


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    verbs.write_text(tmp_path / "text")
    return tmp_path


def states(desk: Path) -> dict[str, dict[str, object]]:
    return {run["name"]: run for run in json.loads(verbs.enter(desk, "runs", "JSON=1"))["runs"]}


def test_killed_in_the_middle_it_finishes_and_its_best_point_is_a_run_like_any_other(
    desk: Path,
) -> None:
    sweep = verbs.begin(desk, "sweep", GRID, start_new_session=True)
    until = time.monotonic() + 300
    while len([*desk.glob("runs/*/metrics.jsonl")]) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(sweep.pid, signal.SIGKILL)
    sweep.communicate()
    done = {path: path.stat().st_mtime_ns for path in desk.glob("runs/*/metrics.jsonl")}
    said = verbs.enter(desk, "sweep", GRID)
    runs = {name: run for name, run in states(desk).items() if "-sweep-" in name}
    assert len(runs) == 6 and {run["status"] for run in runs.values()} == {"finished"}
    kept = [path for path, when in done.items() if path.stat().st_mtime_ns == when]
    assert len(kept) >= 2  # what had finished is not trained again
    best = re.search(r"^best  (.*)$", said, re.MULTILINE)[1]
    name = min(runs, key=lambda run: runs[run]["valid_loss"])
    assert said.split("\nrun ")[1].splitlines()[1].startswith(name)
    verbs.enter(desk, "train", f"SET=name=alone {best}")
    alone = desk / "runs" / "alone"
    assert verbs.losses(alone) == verbs.losses(desk / "runs" / name)


def test_the_better_half_trains_for_twice_the_steps_until_one_is_left(desk: Path) -> None:
    verbs.enter(desk, "sweep", "GRID=train.learning_rate=1e-5,1e-4,1e-3,3e-3", "STOP=half")
    runs = states(desk).values()
    assert sorted(run["step"] for run in runs) == [2, 2, 4, 8]
    longest = max(runs, key=lambda run: run["step"])
    assert longest["valid_loss"] == min(run["valid_loss"] for run in runs)


def test_a_point_that_fails_ends_no_other(desk: Path) -> None:
    (desk / "broken_model.py").write_text("raise RuntimeError('no model here')\n")
    said = verbs.enter(desk, "sweep", "GRID=model.module=broken_model.py,null", code=1)
    assert "no model here" in said
    assert sorted(str(run["status"]) for run in states(desk).values()) == ["failed", "finished"]
