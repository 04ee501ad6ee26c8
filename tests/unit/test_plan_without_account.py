"""make plan of each recipe for AWS without an account: every artifact is written, with placeholders and list prices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainfleet.config import Settings, load
from trainfleet.recipes import FOLDER
from trainfleet.trust import secrets

ROOT = Path(__file__).parents[2]
STACK = {"stack.yaml", "requests/01-cloudformation-CreateStack.json"}
BOTH = {f"{kind}-requests/01-" for kind in ("tokenize", "train")}
RECIPES = {
    "roberta-large-p3dn-ec2": STACK,
    "trn1-single-node": STACK,
    "llama-3-8b-p5-ec2": STACK,
    "nanochat-d20-p5-ec2": STACK,
    "llama-2-7b-trn1-ec2": STACK,
    "llama-2-7b-trn1-batch": STACK | BOTH,
    "llama-2-7b-p4d-sagemaker": STACK | BOTH,
    "bert-large-trn1-parallelcluster": {
        "network.yaml",
        "requests/01-cloudformation-CreateStack.json",
        "cluster.yaml",
        "node.sh",
        "train-job.sbatch",
    },
}


def plan(folder: Path, *words: str, **also: str) -> subprocess.CompletedProcess[str]:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    bare |= {
        "HOME": str(folder),
        "AWS_EC2_METADATA_DISABLED": "true",
        "PYTHONPATH": str(ROOT / "python"),
    }
    return subprocess.run([sys.executable, "-m", "trainfleet", "plan", *words], cwd=folder, env=bare | also, text=True, capture_output=True,
                          check=False)  # fmt: skip


@pytest.mark.parametrize("name", [*RECIPES, "bert-large-trn1-phase2"])
def test_a_recipe_that_makes_machines_has_a_budget(name: str) -> None:
    assert load(Settings(FOLDER / f"{name}.yaml"))[0].budget.max_usd


@pytest.mark.parametrize("name", RECIPES)
def test_every_artifact_is_written_and_the_whole_cost_shown(tmp_path: Path, name: str) -> None:
    said = plan(tmp_path, f"CONFIG={FOLDER}/{name}.yaml", "OUT=out", PYTHONPROFILEIMPORTTIME="1")
    assert said.returncode == 0, said.stdout + said.stderr
    assert "botocore" not in said.stderr and "yaml" in said.stderr  # botocore takes 0.4 CPU seconds
    written = [
        str(path.relative_to(tmp_path / "out"))
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    ]
    assert all(any(path.startswith(wanted) for path in written) for wanted in RECIPES[name]), (
        written
    )
    if "stack.yaml" in written:
        assert "account: not asked, because no AWS credentials were found" in said.stdout, (
            said.stdout
        )
        assert (
            "the account 000000000000, the zone" in said.stdout and "list price in" in said.stdout
        )
        body = json.loads(
            (tmp_path / "out/requests/01-cloudformation-CreateStack.json").read_text()
        )
        assert "000000000000" in json.dumps(body)
    assert "dollars an hour" in said.stdout and "dollars from set-up to teardown" in said.stdout, (
        said.stdout
    )
    assert "min, assumed" in said.stdout and "which budget.max_usd limits" in said.stdout
    assert ("  head  " in said.stdout) == ("parallelcluster" in name)


@pytest.mark.parametrize(
    ("environment", "kept", "maker", "keyless"),
    [
        ({}, "", "LENOVO", True),
        ({"AWS_REGION": "us-east-1"}, "", "", False),  # hardware of no known maker
        ({"AWS_EC2_METADATA_DISABLED": "true"}, "", "", True),
        ({}, "", "Amazon EC2", False),
        ({}, ".aws", "LENOVO", False),
        ({"AWS_PROFILE": "dev"}, "", "LENOVO", False),
        ({"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2"}, "", "LENOVO", False),
    ],
)
def test_credentials_are_looked_for_where_there_may_be_some(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    kept: str,
    maker: str,
    keyless: bool,
) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "BOTO_"))]:
        monkeypatch.delenv(name)
    for name, value in {"HOME": str(tmp_path), **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(secrets, "MACHINE", tmp_path)
    for file in ("sys_vendor", "bios_version") if maker else ():
        (tmp_path / file).write_text(maker)
    (tmp_path / kept).mkdir(exist_ok=True)
    assert secrets.is_keyless() is keyless
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)  # a user without an entry and a home
    assert secrets.is_keyless() is (keyless or kept != "")


@pytest.mark.parametrize(
    ("name", "file"),
    [("llama-2-7b-trn1-ec2", "stack.yaml"), ("bert-large-trn1-parallelcluster", "cluster.yaml")],
)
def test_the_partition_follows_the_region(tmp_path: Path, name: str, file: str) -> None:
    where = "fleet.aws.region=us-gov-west-1" + (
        " fleet.aws.zones=[us-gov-west-1b]" if file == "stack.yaml" else ""
    )
    said = plan(tmp_path, f"CONFIG={FOLDER}/{name}.yaml", f"SET={where}", "OUT=out")
    assert said.returncode == 0, said.stdout + said.stderr
    text = (tmp_path / "out" / file).read_text()
    assert "arn:aws-us-gov:" in text and "arn:aws:" not in text
    assert "the zone us-gov-west-1b" in said.stdout or file != "stack.yaml"


def test_a_cluster_can_be_planned_without_pcluster_and_without_slurm(tmp_path: Path) -> None:
    said = plan(
        tmp_path,
        f"CONFIG={FOLDER}/bert-large-trn1-parallelcluster.yaml",
        "OUT=out",
        PATH=str(tmp_path),
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert (
        "  head  " in said.stdout
        and "dollars from set-up to teardown" in said.stdout
        and "next: make setup" in said.stdout
    )
    assert (tmp_path / "out/cluster.yaml").exists() and (tmp_path / "out/node.sh").exists()


def test_machines_of_another_config_are_set_up_with_that_one(tmp_path: Path) -> None:
    words = [f"CONFIG={FOLDER}/llama-3-8b-p5-ec2.yaml", "SET=fleet.aws.share_fleet_of=other"]
    said = plan(tmp_path, *words)
    assert said.returncode == 0, said.stdout + said.stderr
    then = "next: set up the machines with the config other, then make train "
    assert then in said.stdout and "next: make setup" not in said.stdout


@pytest.mark.parametrize("name", ["llama-2-7b-trn1-batch", "llama-2-7b-p4d-sagemaker"])
def test_images_have_no_files_of_the_user(tmp_path: Path, name: str) -> None:
    words = "SET=model.module=my_model.py train.callback=my_callback.py"
    said = plan(tmp_path, f"CONFIG={FOLDER}/{name}.yaml", words)
    assert said.returncode == 2
    for key in ("model.module", "train.callback"):
        assert f"{key}: " in said.stderr, said.stderr


def test_a_folder_contains_only_the_last_plan(tmp_path: Path) -> None:
    for recipe in ("bert-large-trn1-parallelcluster",) * 2 + ("llama-2-7b-trn1-batch",):
        said = plan(tmp_path, f"CONFIG={FOLDER}/{recipe}.yaml", "OUT=out")
        assert said.returncode == 0, said.stdout + said.stderr
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        *("config.yaml", "plan.json", "stack.yaml", "policy.json"),
        *("requests", "tokenize-requests", "train-requests"),
    }


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("llama-2-7b-trn1-ec2", "fleet.max_lifetime_hours"),
        ("llama-2-7b-p4d-sagemaker", "fleet.sagemaker.max_hours"),
        ("llama-2-7b-trn1-batch", "fleet.batch.timeout_hours"),
    ],
)
def test_a_time_limit_below_the_predicted_time_is_a_warning(
    tmp_path: Path, name: str, setting: str
) -> None:
    said = plan(tmp_path, f"CONFIG={FOLDER}/{name}.yaml", f"SET={setting}=2")
    assert f"warning: {setting} 2 ends the run before the predicted time" in said.stdout, (
        said.stderr
    )
    assert "ends the run before" not in plan(tmp_path, f"CONFIG={FOLDER}/{name}.yaml").stdout
