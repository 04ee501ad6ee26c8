"""What a run on hosts has made is had from the machine where its user sits: its checkpoints, its samples, its model."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from fleet.lab import Lab
from verbs import begin, enter, write_text

GREETING = 'echo Welcome to this node; echo "Have a nice day" >&2\n'


@pytest.mark.timeout(280)
def test_what_a_run_on_hosts_has_made_is_had_from_here(pair: Lab, tmp_path: Path) -> None:
    write_text(pair.shared / "text")
    for node in range(2):
        (pair.root(node) / "root/.bashrc").write_text(
            GREETING
        )  # bash reads it for every command over SSH
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({
        "name": "made",
        "fleet": pair.fleet(nodes=2),
        "data": {"name": "text", "sources": ["/fsx/text"], "vocab_size": 340, "validation_fraction": 0.1},
        "model": {"layers": 2, "hidden_size": 32, "heads": 2, "kv_heads": 1, "intermediate_size": 64},
        "train": {"steps": 12, "precision": "fp32", "global_batch_size": 8, "sequence_length": 32, "log_every": 1,
                  "validate_every": 0, "validation_sequences": 8},
        "checkpoint": {"every": 6},
    }))  # fmt: skip
    assert "was never started" in enter(tmp_path, "sample", code=1)
    enter(tmp_path, "setup")
    enter(tmp_path, "train")

    table = enter(tmp_path, "checkpoints")
    assert table.startswith("step")  # and no greeting
    assert [line.split()[0] for line in table.splitlines()[1:3]] == ["6", "12"] and "good" in table
    assert "every byte is intact" in enter(tmp_path, "verify", "STEP=6")
    assert "checkpoints exist at 6, 12" in enter(tmp_path, "verify", "STEP=7", code=2)
    sampled = enter(tmp_path, "sample", "PROMPT=Document $(touch /fsx/x) 7")
    assert sampled.startswith("Document $(touch /fsx/x) 7") and not (pair.shared / "x").exists()
    assert "perplexity" in enter(tmp_path, "eval")
    assert "sample" in enter(tmp_path, "inspect", "SAMPLE=3", "SET=train.seed=5")

    exported = enter(tmp_path, "export", "OUT=model")
    assert "from node0" in exported and "from_pretrained('model')" in exported
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {
        path.name for path in (tmp_path / "model").iterdir()
    }
    assert not list((pair.shared / "trainfleet/runs/made/huggingface").glob(".*"))
    assert "already exists" in enter(tmp_path, "export", "OUT=model", code=1)

    looker = begin(tmp_path, "sample")
    deadline = time.monotonic() + 30
    while not pair.processes(0, "engine.generate") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert pair.processes(0, "engine.generate")
    looker.kill()  # and what it has asked for ends there too
    looker.communicate()
    while pair.processes(0, "trainfleet") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not pair.processes(0, "trainfleet")
