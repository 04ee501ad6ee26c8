"""make sweep where jobs wait in a queue: all points at once, whatever ends the command itself; on a real Slurm, and on the pretended
AWS Batch and SageMaker."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import test_slurm
import yaml
from test_rehearsal_queue import ATTACH
from test_slurm import write

import verbs
from aws import elsewhere
from aws.schedulers import Site, site
from fleet.slurmlab import Slurm
from trainfleet.run.run_folder import Run
from trainfleet.storage import s3

nodes, slurm, desk = test_slurm.nodes, test_slurm.slurm, test_slurm.desk  # fixtures
GRID = "GRID=train.learning_rate=1e-4,1e-3,3e-3"
CONFIG = """
name: line
data: {name: text, sources: ["s3://bucket/text"], tokenized_path: "s3://bucket/sets", vocab_size: 340, validation_fraction: 0.1}
model: {layers: 1, hidden_size: 32, heads: 2, kv_heads: 1, intermediate_size: 64}
train: {steps: 4, precision: fp32, compile: false, global_batch_size: 8, sequence_length: 32, log_every: 1, validation_sequences: 8}
checkpoint: {every: 4, path: "s3://bucket/checkpoints"}
"""


def points(desk: Path) -> list[Run]:
    return [Run(path) for path in sorted(desk.glob("runs/*-sweep-*"))]


def launches(desk: Path) -> int:
    return sum(event["event"] == "launched" for run in points(desk) for event in run.read_events())


def until(holds: Callable[[], Any], seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.timeout(500)
def test_on_slurm_points_wait_in_the_queue_and_after_kill_9_the_command_follows_them_again(
    desk: Path, slurm: Slurm
) -> None:
    def jobs() -> list[str]:
        return slurm.run("squeue", "-h", "--me", "-t", "R,PD", "-o", "%j").stdout.split()

    train = {"steps": 8, "validate_every": 4}
    write(desk, "line", fleet={"nodes": 2}, train=train, checkpoint={"every": 4})
    assert "partition shut does not accept jobs now" in verbs.enter(
        desk, "sweep", GRID, "SET=fleet.slurm.partition=shut", code=1
    )
    assert not points(desk)
    sweep = verbs.begin(desk, "sweep", GRID, "STOP=half", start_new_session=True)
    until(lambda: len(jobs()) == 3)  # of which two have nodes
    os.killpg(sweep.pid, signal.SIGKILL)
    sweep.communicate()
    said = verbs.enter(desk, "sweep", GRID, "STOP=half")
    found = points(desk)
    results = [run.read_results() for run in found]
    assert [result["status"] for result in results] == ["finished"] * 3, said
    assert sorted(result["steps"] for result in results) == [2, 4, 8], said
    assert launches(desk) == 3 + 2 + 1, "no job was submitted twice"
    longest = max(found, key=lambda run: run.read_results()["steps"])
    rates = {line["step"]: line["lr"] for line in longest.read_metrics()}
    verbs.enter(desk, "train", "SET=name=alone train.learning_rate=" + best(said))
    alone = Run(desk / "runs/alone")
    assert {line["step"]: line["lr"] for line in alone.read_metrics()} == rates
    assert verbs.losses(alone.folder) == verbs.losses(longest.folder)


def best(said: str) -> str:
    return said.split("\nbest  train.learning_rate=")[1].splitlines()[0]


@pytest.mark.timeout(300)
def test_on_slurm_a_point_that_fails_ends_no_other(desk: Path, slurm: Slurm) -> None:
    write(desk, "odd", fleet={"nodes": 1}, train={"steps": 4}, checkpoint={"every": 4})
    (desk / "broken_model.py").write_text("raise RuntimeError('no model here')\n")
    said = verbs.enter(desk, "sweep", "GRID=model.module=broken_model.py,null", code=1)
    assert "no model here" in said
    found = {run.name: run.read_results()["status"] for run in points(desk) if "odd-" in run.name}
    assert sorted(found.values()) == ["failed", "finished"]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("backend", ["batch", "sagemaker"])
def test_on_a_service_all_points_are_submitted_and_ctrl_c_ends_none(
    backend: str, tmp_path: Path
) -> None:
    with site(tmp_path / "engine") as account:
        for path in verbs.write_text(tmp_path / "text").iterdir():
            s3.write(f"s3://bucket/text/{path.name}", path.read_bytes())
        where = account.environment[elsewhere.VARIABLE]
        (tmp_path / "site").mkdir()
        attach = ATTACH.format(
            tests=str(verbs.ROOT / "tests"), variable=elsewhere.VARIABLE, where=where
        )
        soon = "from trainfleet.backends import sagemaker\nsagemaker.TRY_EVERY = 1.0\n"
        (tmp_path / "site" / "sitecustomize.py").write_text(attach + soon)
        fleet = {"fleet": {"nodes": 2} | account.fleet(backend)}
        (tmp_path / "config.yaml").write_text(CONFIG + yaml.safe_dump(fleet))
        path = {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{verbs.PACKAGES}"}
        try:
            sweep_of(account, backend, tmp_path, path)
        finally:
            end_all(tmp_path)


def end_all(folder: Path) -> None:
    """Ends what goes on behind a test that has failed."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (entry / "cwd").readlink() == folder:
                os.kill(int(entry.name), signal.SIGKILL)


def sweep_of(account: Site, backend: str, desk: Path, variables: dict[str, str]) -> None:
    def jobs() -> int:
        service = account.batch if backend == "batch" else account.sagemaker
        return len(service.jobs)

    said = verbs.enter(desk, "sweep", GRID, "SET=fleet.instance_type=p5.48xlarge budget.max_usd=1 train.steps=100000000 train.global_batch_size=16",
                       variables=variables, code=2)  # fmt: skip
    assert "3 points are estimated at" in said and not jobs(), said
    grid = "GRID=train.learning_rate=1e-4,1e-3"
    sweep = verbs.begin(desk, "sweep", grid, variables=variables, start_new_session=True)
    until(lambda: len([*desk.glob("runs/*-sweep-*/handle.json")]) == 2)
    os.killpg(sweep.pid, signal.SIGINT)
    said = verbs.finish(sweep, 130)
    assert "these runs continue without this terminal: " in said, said
    assert all(run.name in said for run in points(desk)), said
    said = verbs.enter(desk, "sweep", grid, variables=variables)
    assert [run.read_results()["status"] for run in points(desk)] == ["finished"] * 2, said
    assert jobs() == 1 + 2 and launches(desk) == 2, said
    if backend == "sagemaker":
        queued = [
            event
            for run in points(desk)
            for event in run.read_events()
            if "other jobs use the quota" in str(event.get("reason"))
        ]
        assert queued, "one at a time has the quota"
    assert len(json.loads(verbs.enter(desk, "runs", "JSON=1", variables=variables))["runs"]) >= 2
