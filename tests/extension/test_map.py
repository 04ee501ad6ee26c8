"""One more of each thing, each a row in its one place, goes through plan, memory, cost, launch, report and verdict."""

from __future__ import annotations

import codecs
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from things import PAGE, parts, table

import verbs
from trainfleet.config import cross_checks

DUMMIES = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "dummies"), verbs.PACKAGES])}
CONFIG: dict[str, Any] = {
    "name": "dummy",
    "data": {"name": "turned", "sources": ["text"], "vocab_size": 300},
    "model": {"preset": "calf"},
    "train": {
        "steps": 4,
        "global_batch_size": 4,
        "sequence_length": 32,
        "optimizer": "lion",
        "log_every": 1,
        "compile": False,
    },
    "checkpoint": {"every": 2},
    "fleet": {"backend": "local", "nodes": 1},
}
FLEET = (
    "fleet.nodes=2 model.preset=llama-3-8b model.family=null train.micro_batch_size=1"
    " train.parallelism.fsdp=16 train.parallelism.tensor=1 train.parallelism.pipeline=1 train.parallelism.context=1 train.global_batch_size=64"
    " fleet.instance_type=x9.48xlarge"
)
SLURM = " fleet.backend=slurm fleet.shared_folder=/fsx"
HOSTED = (
    " fleet.backend=sagemaker fleet.sagemaker.role=arn:aws:iam::123456789012:role/x fleet.shared_folder=s3://bkt/runs"
    " data.tokenized_path=s3://bkt/sets data.sources=[s3://bkt/text] fleet.aws.region=us-east-1 checkpoint.path=s3://bkt/checkpoints"
    " fleet.container=123456789012.dkr.ecr.us-east-1.amazonaws.com/x:y"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path in verbs.write_text(tmp_path / "text").iterdir():
        path.with_suffix(".rot").write_text(codecs.encode(path.read_text(), "rot13"))
        path.unlink()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path


def planned(folder: Path, words: str) -> dict[str, Any]:
    verbs.enter(folder, "plan", f"SET={words}", "OUT=out", variables=DUMMIES)
    return json.loads((folder / "out" / "plan.json").read_text())  # type: ignore[no-any-return]


def test_a_type_s_price_and_an_optimizer_s_memory_are_in_the_plan(folder: Path) -> None:
    lion, adamw = (
        planned(folder, f"{FLEET}{SLURM}"),
        planned(folder, f"{FLEET}{SLURM} train.optimizer=adamw"),
    )
    moments = [plan["estimate"]["memory"]["moments"] for plan in (lion, adamw)]
    assert moments[0] == pytest.approx(2.5 * moments[1])
    assert lion["estimate"]["bill"]["node"] == 77 and lion["estimate"]["usd"] > 0


def test_sagemaker_s_price_of_a_type_is_in_its_row(folder: Path) -> None:
    said = verbs.enter(
        folder,
        "plan",
        f"SET={FLEET}{HOSTED}",
        variables=DUMMIES | {"AWS_EC2_METADATA_DISABLED": "true"},
        code=1,
    )
    assert "198.00  2 x ml.x9.48xlarge" in said and "no AWS credentials were found" in said


@pytest.mark.thorough
def test_a_run_of_all_dummies_is_launched_and_reported(folder: Path) -> None:
    verbs.enter(folder, "train", variables=DUMMIES)
    assert sorted(verbs.losses(folder / "runs" / "dummy")) == [1, 2, 3, 4]
    assert "word" in (folder / "data" / "turned" / "tokenizer.json").read_text(), (
        "texts were turned back"
    )
    results = json.loads((folder / "runs" / "dummy" / "results.json").read_text())
    assert (results["status"], results["model"]["family"]) == ("finished", "giraffe")
    verbs.enter(folder, "report", variables=DUMMIES)
    assert "giraffe" in (folder / "runs" / "dummy" / "report.html").read_text()
    assert "finished" in verbs.enter(folder, "status", variables=DUMMIES)


@pytest.mark.thorough
def test_a_backend_of_another_package_is_planned_on_launches_and_reports(folder: Path) -> None:
    words = "SET=fleet.backend=meadow"
    assert planned(folder, "fleet.backend=meadow")["estimate"]["memory"]
    verbs.enter(folder, "train", words, variables=DUMMIES)
    results = json.loads((folder / "runs" / "dummy" / "results.json").read_text())
    assert (results["status"], results["backend"]) == ("finished", "meadow")
    verbs.enter(folder, "report", words, variables=DUMMIES)
    assert "meadow" in (folder / "runs" / "dummy" / "report.html").read_text()
    assert "is not one of" in verbs.enter(folder, "plan", words, code=2), "without that package"


@pytest.mark.thorough
def test_a_backend_of_another_package_passes_the_cases_of_all_backends() -> None:
    words = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-m",
        "",
        "tests/conformance/test_backends.py",
        "-k",
        "meadow",
    ]
    said = subprocess.run(
        [sys.executable, *words],
        cwd=verbs.ROOT,
        env=os.environ | DUMMIES,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0 and " passed" in said.stdout, said.stdout


@pytest.mark.thorough
def test_a_failure_is_named_by_a_cause_of_the_dummies(folder: Path) -> None:
    said = verbs.enter(folder, "train", variables=DUMMIES | {"DUMMY_WOUND": "1"}, code=1)
    assert "moths have been here" in said and "make camphor" in said


@pytest.mark.thorough
def test_a_fault_of_the_dummies_is_played_judged_and_reported(folder: Path) -> None:
    """Its row is the only place that knows it; its verdict is the cause of the dummies."""
    said = verbs.enter(folder, "rehearse", "FAULTS=moths-released", variables=DUMMIES)
    assert re.search(r"(?m)^moths-released .* moths, right .* kept$", said), said
    (run,) = (folder / "runs").iterdir()
    assert "moths are released on rank 1" in (run / "report.html").read_text()
    unknown = verbs.enter(folder, "rehearse", "FAULTS=moths-released", code=2)
    assert "moths-released is not a fault" in unknown, "without the dummies"


def test_no_rule_of_the_config_is_missing_from_the_table() -> None:
    made = {
        rule
        for rule in vars(cross_checks).values()
        if getattr(rule, "__annotations__", {}) == {"config": "Config", "return": "Refusals"}
    }
    assert made - {cross_checks.check_shape} == {*cross_checks.RULES} & made


def test_contributing_s_table_is_the_map_s() -> None:
    assert parts()[1] == table(), (
        f"python {Path(__file__).with_name('things.py')} writes it into {PAGE}"
    )
