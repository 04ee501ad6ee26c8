"""make profile and make scaling with real ranks: runs of their own that leave figures, a trace and a plot, and no checkpoint."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from trainfleet.plan.measurement import TIMED
from trainfleet.run.run_folder import read_lines
from verbs import enter

CONFIG = """
name: small
data: {name: text, sources: [text.txt], vocab_size: 300, validation_fraction: 0.2}
model: {layers: 2, hidden_size: 32, heads: 2, kv_heads: 1, intermediate_size: 64}
fleet: {nodes: 2}
train: {steps: 1000, precision: fp32, global_batch_size: 8, sequence_length: 32}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measuring")
    (folder / "config.yaml").write_text(CONFIG)
    text = "\n".join(f"Line {number} says {number**3 % 997}." for number in range(4000))
    (folder / "text.txt").write_text(text)
    return folder


def test_a_profile_leaves_its_trace_and_says_where_the_time_went(folder: Path) -> None:
    said = enter(folder, "profile", "SET=train.profile_steps=3-4")
    trace, following = said.splitlines()[-2:]
    assert (
        "steps 3 to 4 of rank 0" in said
        and "aten::" in said
        and trace.startswith("trace  runs/small-profile-")
    )
    assert following.startswith("next   make train")
    (run,) = folder.glob("runs/small-profile-*")
    found = json.loads((run / "profile/summary.json").read_text())
    assert list(found["parts"]) == ["data", "forward", "backward", "optimizer"]
    assert (
        0 < sum(found["parts"].values()) <= found["seconds"]
        and 0 < found["communication"]["seconds"] < found["seconds"]
    )
    assert b'"backward"' in gzip.decompress((run / "profile/trace.json.gz").read_bytes())
    lines = list(read_lines(run / "metrics.jsonl"))
    assert len(lines) == 4 + TIMED and all(
        0 < line["forward_seconds"] < line["seconds"] * 1.5 for line in lines[1:]
    )
    assert all(line["communication_seconds"] > 0 for line in lines)
    assert "MFU = tokens/s x FLOPs per token" in (run / "logs/node-0.log").read_text()
    assert not (run / "checkpoints").exists() and not (folder / "runs/small").exists()


def test_scaling_leaves_a_table_and_a_plot(folder: Path) -> None:
    assert "'two' is not a list" in enter(folder, "scaling", "NODES=two", code=2)
    said = enter(folder, "scaling", "NODES=1 2", "STEPS=3")
    (summary,) = (
        path for path in folder.glob("runs/small-scaling-*") if (path / "scaling.json").exists()
    )
    sizes = json.loads((summary / "scaling.json").read_text())["sizes"]
    assert (
        [size["nodes"] for size in sizes] == [1, 2]
        and sizes[0]["efficiency"] == 1
        and sizes[1]["efficiency"] > 0
    )
    assert (
        f"plot   {summary.relative_to(folder)}/plots/scaling.png" in said
        and (summary / "plots/scaling.png").exists()
    )
    assert said.splitlines()[-1].startswith("next   make train NODES=")
    runs = [summary.with_name(f"{summary.name}-{nodes}") for nodes in (1, 2)]
    losses = [[line["loss"] for line in read_lines(run / "metrics.jsonl")] for run in runs]
    assert (
        losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 6
    )  # strong scaling: the same batches
    assert not any((run / "checkpoints").exists() for run in runs)
