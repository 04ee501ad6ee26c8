"""The recipe roberta-large-p3dn-ssh, small: its own lines with a few sizes changed, on two real sshd nodes, as this machine trains it."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.lab import Lab
from trainfleet.recipes import recipe_named
from trainfleet.runs import Run, read_lines
from verbs import enter, write_text

NAME = "roberta-large-p3dn-ssh"
TINY = {
    "layers": 2,
    "hidden_size": 32,
    "heads": 2,
    "kv_heads": 2,
    "intermediate_size": 64,
    "vocabulary_size": 384,
    "max_sequence_length": 32,
}
SHORT = {"steps": 20, "precision": "fp32", "schedule_steps": 20, "warmup_steps": 4, "global_batch": 8, "micro_batch": 2, "sequence_length": 32, "log_every": 1,
         "validation_sequences": 8, "learning_rate": 6e-3}  # fmt: skip


def twin(fleet: dict[str, object], source: str) -> str:
    """The recipe on another fleet: fewer and smaller everything, and nothing of what makes it RoBERTa as fairseq trains it."""
    config: dict[str, Any] = yaml.safe_load(recipe_named(NAME).text)
    config["fleet"] = {"nodes": 2} | fleet
    config["data"] |= {"name": "text", "sources": [source], "vocabulary_size": 340, "validation_fraction": 0.1}
    config["model"] |= TINY
    config["train"] |= SHORT
    config["checkpoint"]["every"] = 10
    return yaml.safe_dump(config)


@pytest.mark.timeout(400)
def test_the_twin_of_the_recipe_trains_on_hosts(pair: Lab, tmp_path: Path) -> None:
    text = write_text(pair.shared / "text")
    there, here = tmp_path / "there", tmp_path / "here"
    for folder, fleet, source in ((there, pair.fleet(), "/fsx/text"), (here, {"backend": "local"}, str(text))):
        folder.mkdir()
        (folder / "config.yaml").write_text(twin(fleet, source))

    enter(there, "setup")
    planned = enter(there, "plan")
    assert "roberta" in planned and "node 1 of 2 on node1" in planned and "2 data-parallel" in planned
    enter(there, "train")
    enter(here, "train")

    run, same = (Run(folder / "runs" / NAME) for folder in (there, here))
    lines, others = list(read_lines(run.metrics)), list(read_lines(same.metrics))
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in others], rel=1e-4)  # dropout and masks too
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    results = run.read_results()
    assert (results["status"], results["model"]["family"], results["nodes"], results["backend"]) == (
        "finished",
        "roberta",
        2,
        "ssh",
    )
    assert results["last_checkpoint"].endswith("step-00000020")

    profiled = enter(there, "profile")
    assert "steps 4 to 6 of rank 0" in profiled and "communication" in profiled and "backward" in profiled
    (trace,) = there.glob(f"runs/{NAME}-profile-*/profile/trace.json.gz")
    assert b"traceEvents" in gzip.decompress(trace.read_bytes()) and not (trace.parents[1] / "checkpoints").exists()
