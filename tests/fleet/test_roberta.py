"""The recipe roberta-large-p3dn-ssh, small: its own lines with a few sizes changed, on two real sshd nodes, as this machine trains it."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.lab import Lab
from trainfleet.recipes import recipe_named
from trainfleet.runs import Run, read_lines

ROOT = Path(__file__).parents[2]
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
SHORT = {"steps": 20, "schedule_steps": 20, "warmup_steps": 4, "global_batch": 8, "micro_batch": 2, "sequence_length": 32, "log_every": 1,
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


def command(folder: Path, verb: str) -> str:
    done = subprocess.run([sys.executable, "-m", "trainfleet", verb], cwd=folder, text=True, check=False, timeout=200,
                          env=os.environ | {"PYTHONPATH": str(ROOT / "python"), "NO_COLOR": "1"}, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.timeout(400)
def test_the_twin_of_the_recipe_trains_on_hosts(pair: Lab, tmp_path: Path) -> None:
    text = pair.shared / "text"
    text.mkdir()
    for number in range(40):
        words = " ".join(f"word{(number * step) % 97} is {step}." for step in range(60))
        (text / f"{number}.txt").write_text(f"Document {number}. {words}\n")
    hosts = {
        "backend": "ssh",
        "hosts": pair.hosts(),
        "ssh": pair.ssh(),
        "shared_folder": "/fsx/trainfleet",
        "python": sys.executable,
    }
    there, here = tmp_path / "there", tmp_path / "here"
    for folder, fleet, source in ((there, hosts, "/fsx/text"), (here, {"backend": "local"}, str(text))):
        folder.mkdir()
        (folder / "config.yaml").write_text(twin(fleet, source))

    command(there, "setup")
    planned = command(there, "plan")
    assert "roberta" in planned and "node 1 on node1" in planned and "2 data-parallel" in planned
    command(there, "train")
    command(here, "train")

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

    profiled = command(there, "profile")
    assert "steps 4 to 6 of rank 0" in profiled and "communication" in profiled and "backward" in profiled
    (trace,) = there.glob(f"runs/{NAME}-profile-*/profile/trace.json.gz")
    assert b"traceEvents" in gzip.decompress(trace.read_bytes()) and not (trace.parents[1] / "checkpoints").exists()
