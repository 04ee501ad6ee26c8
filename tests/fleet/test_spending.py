"""budget.max_usd on a real sshd node: the run saves a step and ends when it has cost that, and is not begun again."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fleet.lab import Lab
from trainfleet.run.run_folder import Run
from verbs import enter, write_text


@pytest.mark.timeout(280)
def test_a_run_ends_when_it_has_cost_its_budget(pair: Lab, tmp_path: Path) -> None:
    write_text(pair.shared / "text")
    config = {
        "name": "dear",
        "fleet": pair.fleet(
            nodes=1, hosts=pair.hosts()[:1], instance_type="c7i.8xlarge"
        ),  # $1.43 an hour
        "data": {
            "name": "text",
            "sources": ["/fsx/text"],
            "vocab_size": 340,
            "validation_fraction": 0.1,
        },
        "model": {
            "layers": 2,
            "hidden_size": 32,
            "heads": 2,
            "kv_heads": 1,
            "intermediate_size": 64,
        },
        "train": {
            "steps": 10**6,
            "precision": "fp32",
            "global_batch_size": 8,
            "sequence_length": 32,
            "validate_every": 0,
        },
        "checkpoint": {"every": 10**6},
        "budget": {"max_usd": 0.004},  # ten seconds
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    enter(tmp_path, "setup")
    assert "its budget.max_usd" in enter(tmp_path, "train", code=130)
    run = Run(tmp_path / "runs/dear")
    results = run.read_results()
    assert results["status"] == "stopped" and 0.004 <= results["usd"] < 0.04
    assert results["last_checkpoint"].endswith(f"step-{results['steps']:08d}"), (
        "it saved the step at which it ended"
    )
    assert "dear has cost $0.0" in enter(tmp_path, "train", code=2)
