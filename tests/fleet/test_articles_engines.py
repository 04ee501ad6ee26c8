"""The other three articles, small: AWS Batch and SageMaker run them in real containers, ParallelCluster's on a real Slurm.

Each is one config, planned, set up, trained and cleaned in a pretended account, from an empty one and back to it. What a run asked
AWS for is in the policy that its plan wrote.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from aws import elsewhere
from aws.account import Account
from aws.schedulers import KIND, Site, site
from aws.world import strangers
from fleet.lab import Lab, address_of, lab
from fleet.slurmlab import Slurm, cluster
from fleet.test_articles import SHORT, TINY, twin
from fleet.test_cloud import SPEED, account_on
from oracles.test_iam import ACTIONS, NOT_NEEDED
from trainfleet.data.dataset import REMOTE_WINDOW
from trainfleet.recipes import recipe_named
from trainfleet.run.run_folder import Run, read_lines
from trainfleet.storage import s3
from verbs import PACKAGES, ROOT, enter, finish, write_text

ENGINES = {"batch": "llama-2-7b-trn1-batch", "sagemaker": "llama-2-7b-p4d-sagemaker"}
CLUSTER = "bert-large-trn1-parallelcluster"


def typed(folder: Path, environment: dict[str, str], verb: str, *words: str) -> str:
    """What a verb says, typed where AWS is the pretended account."""
    there = os.environ | {
        "PYTHONPATH": f"{PACKAGES}{os.pathsep}{ROOT / 'tests'}",
        "NO_COLOR": "1",
        elsewhere.SPEED: str(SPEED),
    }
    process = subprocess.Popen([sys.executable, "-m", "aws.elsewhere", verb, *words], cwd=folder, env=there | environment, text=True,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    return finish(process)


def unallowed(account: Account, since: int, plan: Path) -> set[str]:
    """What was asked of the account and is not in the policy of a plan."""
    files = list(plan.glob("policy*.json"))
    allowed = {
        name
        for file in files
        for one in json.loads(file.read_text())["Statement"]
        for name in one["Action"]
    }
    asked = {f"{service}:{operation}" for service, operation, _ in account.calls[since:]}
    assert files and len(asked) > 20
    return {name for one in asked - NOT_NEEDED for name in ACTIONS.get(one, [one])} - allowed


def compared(run: Path, here: Path, local: dict[str, Any]) -> None:
    """The losses are those of the same config on this machine."""
    here.mkdir()
    (here / "config.yaml").write_text(yaml.safe_dump(local))
    enter(here, "train")
    lines, same = (
        list(read_lines(Run(folder).metrics)) for folder in (run, here / "runs" / local["name"])
    )
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert [line["loss"] for line in lines] == pytest.approx(
        [line["loss"] for line in same], rel=1e-4
    )


def on_engine(name: str) -> dict[str, Any]:
    """The recipe with fewer and smaller everything, its machines without accelerators; queue and roles are the stack's."""
    config: dict[str, Any] = yaml.safe_load(recipe_named(ENGINES[name]).text)
    config["fleet"] |= {
        "nodes": 2,
        "instance_type": KIND,
        "container": "registry.example/trainfleet:cpu",
        "shared_folder": "s3://bucket/some",
    }
    config["fleet"]["aws"] |= {"region": "us-east-1"}
    config["data"] |= {"name": "text", "sources": ["s3://bucket/text"], "tokenized_path": "s3://bucket/sets", "vocab_size": 340,
                       "validation_fraction": 0.1}  # fmt: skip
    config["model"] |= TINY
    config["train"] |= SHORT | {"parallelism": "auto", "compile": False}
    config["checkpoint"] |= {"every": 10, "path": "s3://bucket/checkpoints"}
    return config


def at_home(name: str, text: Path) -> dict[str, Any]:
    """The same config on this machine, without S3, in the order in which a dataset in S3 is read."""
    config = on_engine(name)
    config["fleet"] = {"backend": "local"}
    config["data"] |= {
        "sources": [str(text)],
        "tokenized_path": None,
        "shuffle_window_mib": REMOTE_WINDOW,
    }
    del config["checkpoint"]["path"]
    return config


def engine_account(place: Site) -> Account:
    """The site's account, at the pace of the test's clock and with others' things in it."""
    account = place.account
    account.speed = SPEED
    strangers(account)
    account.add("bucket", "bucket", {}, {})
    return account


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ENGINES)
def test_a_recipe_of_an_engine_is_set_up_trained_and_cleaned(name: str, tmp_path: Path) -> None:
    with site(tmp_path / "engine") as place:
        account, text = engine_account(place), write_text(tmp_path / "text")
        for file in text.iterdir():
            s3.write(f"s3://bucket/text/{file.name}", file.read_bytes())
        desk, before, since = tmp_path / "desk", dict(account.things), len(account.calls)
        desk.mkdir()
        (desk / "config.yaml").write_text(yaml.safe_dump(on_engine(name)))

        planned = typed(desk, place.environment, "plan", "OUT=plan")
        assert "+ a new stack of" in planned and "account: no obstacle found" in planned
        assert "ready; each job starts and stops its machines" in typed(
            desk, place.environment, "setup"
        )
        typed(desk, place.environment, "tokenize")
        typed(desk, place.environment, "train")
        run = Run(desk / "runs" / ENGINES[name])
        results = run.read_results()
        assert (results["status"], results["nodes"], results["backend"]) == ("finished", 2, name)
        lines = list(read_lines(run.metrics))
        assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
        compared(run.folder, tmp_path / "here", at_home(name, text))
        cleaned = typed(desk, place.environment, "clean", "PURGE=1", "YES=1")
        assert f"no resources of {ENGINES[name]} are left" in cleaned
        assert not [thing for thing in account.living() if thing.id not in before]
        assert before.keys() <= account.things.keys(), "what others have"
        assert not unallowed(account, since, desk / "plan")


# A pcluster whose clusters are stacks of the pretended account, and whose head is a node of the lab on which Slurm is.
PCLUSTER = """#!{python}
import json, os, sys
from pathlib import Path
import yaml
from aws import elsewhere
from trainfleet.cloud import calls
elsewhere.attach()
verb, words = sys.argv[1], sys.argv[2:]
name, region = words[words.index("--cluster-name") + 1], words[words.index("--region") + 1]

def send(operation, **more):
    return calls.send(region, "cloudformation", operation, more)

def stack():
    try:
        return send("DescribeStacks", StackName=name)["Stacks"][0]
    except Exception:
        return None

def end(code, **answer):
    print(json.dumps(answer))
    sys.exit(code)

if verb == "create-cluster":
    said = yaml.safe_load(Path(words[words.index("--cluster-configuration") + 1]).read_text())
    fsx, tags = said["SharedStorage"][0]["FsxLustreSettings"], said["Tags"]
    subnet = said["Scheduling"]["SlurmQueues"][0]["Networking"]["SubnetIds"]
    lustre = dict(FileSystemType="LUSTRE", StorageCapacity=fsx.get("StorageCapacity"), SubnetIds=subnet, Tags=tags)
    table = {{"Type": "AWS::Logs::LogGroup", "Properties": {{"LogGroupName": "/aws/parallelcluster/" + name, "Tags": tags}}}}
    made = {{"Log": table}}
    if "FileSystemId" not in fsx:
        made["FSX"] = {{"Type": "AWS::FSx::FileSystem", "DeletionPolicy": fsx["DeletionPolicy"], "Properties": lustre}}
    send("CreateStack", StackName=name, TemplateBody=json.dumps(dict(Resources=made)), Tags=tags)
    end(0, cluster=dict(clusterName=name))
found = stack()
if found is None or found["StackStatus"] == "DELETE_COMPLETE":
    end(1, message=f"Cluster '{{name}}' does not exist or belongs to an incompatible ParallelCluster major version.")
if verb == "delete-cluster":
    send("DeleteStack", StackName=found["StackId"])
    end(0)
if verb == "update-cluster":
    end(1, message="No changes found in your cluster configuration.")
if verb == "get-cluster-stack-events":
    end(0, events=[])
end(0, clusterName=name, clusterStatus=found["StackStatus"], headNode={{"publicIpAddress": {head!r}, "instanceId": "i-0"}},
    tags=[dict(key=tag["Key"], value=tag["Value"]) for tag in found["Tags"]])
"""


def on_cluster(nodes: Lab, zones: list[str]) -> dict[str, Any]:
    """The recipe on the lab's nodes: its file system and network are the account's, its Slurm is real."""
    aws = {
        "region": "us-east-1",
        "zones": zones,
        "bucket": None,
        "allow_ssh_from": ["10.77.0.0/16"],
    }
    machines = {"instance_type": KIND, "ssh": nodes.ssh(), "python": sys.executable, "aws": aws}
    config = twin(CLUSTER, "/fsx/text", machines)
    config["fleet"]["slurm"] |= {"partition": "main"}
    config["fleet"]["slurm"]["parallelcluster"] |= {"queues": [{"name": "main", "max": 2}]}
    return config


def two_zones(slurm: Slurm) -> None:
    """The partitions of a queue in two zones, of which the first lacks a node. It is drained, as this Slurm takes a node that is only down back.

    They share no node, as in ParallelCluster: Slurm keeps the nodes of a partition in which a job can't start from the job's next one.
    """
    slurm.run("scontrol", "update", "PartitionName=main", "Nodes=node0,node1")
    slurm.run("scontrol", "create", "PartitionName=main-2", "Nodes=node2,node3", "State=UP")
    why = "Reason=(Code:InsufficientInstanceCapacity)Error"
    slurm.run("scontrol", "update", "NodeName=node0", "State=DRAIN", why)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("zones", [[], ["us-east-1b", "us-east-1a"]], ids=["one", "two"])
def test_bert_on_a_cluster_that_is_made_trained_on_and_removed(
    tmp_path: Path, zones: list[str]
) -> None:
    """With two zones, the job is trained in the second, because the first has no capacity."""
    count = 4 if zones else 2
    with lab(count) as nodes, cluster(nodes) as slurm, account_on(nodes) as (account, _, address):
        if zones:
            two_zones(slurm)
        text, before, since = (
            write_text(nodes.shared / "text"),
            dict(account.things),
            len(account.calls),
        )
        for node in range(count):
            (nodes.root(node) / "etc/profile.d/slurm.sh").write_text(
                f"export SLURM_CONF={slurm.folder}/slurm.conf\n"
            )
        programs = tmp_path / "bin"  # of a laptop that has pcluster, and no Slurm
        programs.mkdir()
        for name in ("sh", "bash", "env", "ssh"):
            (programs / name).symlink_to(str(shutil.which(name)))
        (programs / "pcluster").write_text(
            PCLUSTER.format(python=sys.executable, head=address_of(1))
        )
        (programs / "pcluster").chmod(0o755)
        bare = {
            elsewhere.VARIABLE: address,
            "SLURM_CONF": "/nowhere/slurm.conf",
            "PATH": str(programs),
        }
        public = subprocess.run(
            ["ssh-keygen", "-y", "-f", nodes.key], capture_output=True, text=True, check=True
        ).stdout
        Path(f"{nodes.key}.pub").write_text(public)
        desk = tmp_path / "desk"
        desk.mkdir()
        (desk / "config.yaml").write_text(yaml.safe_dump(on_cluster(nodes, zones)))

        planned = typed(desk, bare, "plan", "OUT=plan")
        assert "account: no obstacle found" in planned and (desk / "plan/policy.json").exists()
        assert "its nodes start when a job needs them" in typed(desk, bare, "setup")
        typed(desk, bare, "tokenize")
        typed(desk, bare, "train")
        jobs = slurm.run("scontrol", "--oneliner", "show", "job").stdout.splitlines()
        used = f" Partition={'main-2' if zones else 'main'} "
        assert jobs and all(used in line for line in jobs if " NumNodes=2 " in line), jobs
        run = Run(nodes.shared / "trainfleet/runs" / CLUSTER)
        results = run.read_results()
        assert (results["status"], results["nodes"], results["backend"]) == ("finished", 2, "slurm")
        compared(run.folder, tmp_path / "here", twin(CLUSTER, str(text)))
        assert f"no resources of {CLUSTER} are left" in typed(
            desk, bare, "clean", "PURGE=1", "YES=1"
        )
        assert not [thing for thing in account.living() if thing.id not in before]
        assert not unallowed(account, since, desk / "plan")
