"""What make plan wrote is what ran on the hosts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from fleet.lab import Lab, address_of
from trainfleet.backends.base import load_job
from trainfleet.health import fence
from trainfleet.health.tcp_stats import read_links
from trainfleet.run.run_folder import Run
from verbs import begin, enter, write_text

STEPS = 400


def config(fleet: dict[str, object]) -> str:
    return yaml.safe_dump({
        "name": "contract",
        "fleet": {"nodes": 2} | fleet,
        "data": {"name": "text", "sources": ["/fsx/text"], "vocab_size": 340, "validation_fraction": 0.1},
        "model": {"layers": 2, "hidden_size": 32, "heads": 2, "kv_heads": 1, "intermediate_size": 64},
        "train": {"steps": STEPS, "precision": "fp32", "global_batch_size": 8, "sequence_length": 32, "log_every": 1,
                  "validate_every": 0, "validation_sequences": 8},
        "checkpoint": {"every": 50},
    })  # fmt: skip


def steps_done(run: Run) -> int:
    return max((line["step"] for line in run.read_metrics()), default=0)


@pytest.mark.timeout(280)
def test_the_files_of_a_plan_are_what_ran_byte_for_byte(pair: Lab, tmp_path: Path) -> None:
    write_text(pair.shared / "text")
    (tmp_path / "config.yaml").write_text(config(pair.fleet()))
    enter(tmp_path, "setup")
    enter(tmp_path, "plan", "OUT=planned")
    first = begin(tmp_path, "train")
    run = Run(pair.shared / "trainfleet/runs/contract")
    deadline = time.monotonic() + 120
    while steps_done(run) < 20 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert steps_done(run) >= 20, first.communicate(timeout=1)

    for kind in ("tokenize", "train"):
        for node in range(2):
            ran = pair.root(node) / f"root/.trainfleet/jobs/node{node}/contract-{kind}.sh"
            assert ran.read_text() == (tmp_path / f"planned/{kind}-node-{node}.sh").read_text()
    job = load_job(run)
    assert job is not None and [artifact.text for artifact in job[1].artifacts] == [
        (tmp_path / f"planned/train-node-{node}.sh").read_text() for node in range(2)
    ]

    while (
        len(read_links(run.folder, fence.current(run.folder).number)) < 2
        and time.monotonic() < deadline
    ):
        time.sleep(0.2)
    links = read_links(
        run.folder, fence.current(run.folder).number
    )  # as each node's kernel knows them
    assert links[0].addresses == (address_of(0),) and links[1].peers[address_of(0)].sent > 20, links

    first.kill()  # and the lab ends the rest
    first.communicate()
