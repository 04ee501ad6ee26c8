"""The cluster files that we make, judged by AWS ParallelCluster itself, in an environment of its own; and what it lets through."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from requirement import missing
from trainfleet.backends import terms_of
from trainfleet.backends.slurm import cluster_file
from trainfleet.config import Config, Settings, load
from trainfleet.recipes import all_recipes
from trainfleet.trust.errors import ConfigError

ROOT = Path(__file__).parents[2]
CONFIGS = int(os.environ.get("PCLUSTER_CONFIGS", "200"))
SUBNET, BUCKET = "subnet-0123456789abcdef0", "our-bucket"
BASE = {"backend": "slurm", "nodes": 4, "instance_type": "c7i.8xlarge", "shared_folder": "/fsx/work",
        "aws": {"region": "us-west-2", "subnets": [SUBNET], "bucket": BUCKET}, "slurm": {"create": "parallelcluster"}}  # fmt: skip
TYPES = (
    "trn1.32xlarge",
    "trn1n.32xlarge",
    "p4d.24xlarge",
    "p5.48xlarge",
    "p5en.48xlarge",
    "g5.48xlarge",
    "c7i.8xlarge",
)


def python() -> str:
    """An interpreter that has aws-parallelcluster."""
    found = Path(os.environ.get("PCLUSTER_PYTHON", ROOT / ".venv-pcluster/bin/python"))
    if not found.exists():
        make = "python3 -m venv .venv-pcluster && .venv-pcluster/bin/pip install 'setuptools<81' aws-parallelcluster==3.16.1"
        missing(
            f"no environment has aws-parallelcluster (PCLUSTER_PYTHON names one); make it: {make}"
        )
    return str(found)


def judged(folder: Path) -> dict[str, Any]:
    done = subprocess.run([python(), str(Path(__file__).with_name("pcluster_judge.py")), str(folder)], capture_output=True, text=True,
                          check=True, timeout=280)  # fmt: skip
    return dict(json.loads(done.stdout.splitlines()[-1]))


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return base | {
        k: merged(base[k], v) if isinstance(v, dict) and isinstance(base.get(k), dict) else v
        for k, v in changes.items()
    }


def config_of(folder: Path, changes: dict[str, Any], name: str = "ours") -> Config:
    fleet = merged(BASE, changes)
    (folder / "config.yaml").write_text(
        yaml.safe_dump(
            {"name": name, "fleet": fleet, "train": {"global_batch_size": 8192, "spike_sigmas": 0}}
        )
    )
    return load(Settings(folder / "config.yaml"), terms_of)[0]


@pytest.mark.timeout(280)
def test_the_cluster_file_of_every_recipe_is_sound(tmp_path: Path) -> None:
    made = 0
    for recipe in all_recipes():
        if "create: parallelcluster" in recipe.text:
            (tmp_path / "config.yaml").write_text(recipe.text)
            config, _ = load(Settings(tmp_path / "config.yaml"), terms_of)
            folder = tmp_path / "files"
            folder.mkdir(exist_ok=True)
            (folder / f"{recipe.name}.yaml").write_text(cluster_file.artifacts(config)[0].text)
            made += 1
    assert made
    told = judged(tmp_path / "files")
    assert told.pop("")["ran"] > 20 * made and not any(told.values()), told


def queues() -> st.SearchStrategy[list[dict[str, Any]]]:
    name = st.from_regex(r"[a-z][a-z0-9-]{0,20}[a-z0-9]", fullmatch=True).filter(
        lambda name: name != "default"
    )
    some = st.fixed_dictionaries({
        "name": name, "instance_type": st.sampled_from(TYPES), "min": st.integers(0, 4), "max": st.integers(4, 64),
        "capacity": st.sampled_from(["on-demand", "spot", "reservation"]), "reservation": st.just("cr-0123456789abcdef0"),
    })  # fmt: skip
    return st.lists(some, max_size=4, unique_by=lambda queue: queue["name"])


def fsx() -> st.SearchStrategy[dict[str, Any]]:
    persistent = st.fixed_dictionaries(
        {"type": st.just("persistent"), "throughput": st.sampled_from([125, 250, 500, 1000])}
    )
    made = st.fixed_dictionaries({
        "mount_point": st.sampled_from(["/fsx", "/data/lustre"]), "size_gib": st.sampled_from([1200, 2400, 4800, 24000]),
        "s3_import": st.sampled_from([None, "s3://corpora/some"]), "s3_export": st.booleans(),
    })  # fmt: skip
    there = st.just(
        {"dns_name": "fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com", "mount_name": "abcdefgh"}
    )
    kind = st.one_of(st.just({"type": "scratch"}), persistent)
    return st.one_of(st.builds(lambda one, other: one | other, made, kind), there)


def fleets() -> st.SearchStrategy[dict[str, Any]]:
    database = {"database_uri": "slurm.example.com:3306", "database_user": "admin",
                "database_secret": "arn:aws:secretsmanager:us-west-2:123456789012:secret:slurm-AbCdEf"}  # fmt: skip
    cluster = st.fixed_dictionaries({
        "os": st.sampled_from(["ubuntu2204", "ubuntu2404", "alinux2023", "rhel9", "rocky9"]),
        "head_subnet": st.sampled_from([None, "subnet-0fedcba9876543210"]), "queues": queues(),
        "buckets": st.lists(st.sampled_from(["one-bucket", "two-bucket"]), unique=True),
    })  # fmt: skip
    aws = st.fixed_dictionaries({
        "ami": st.sampled_from([None, "ami-0123456789abcdef0"]), "key_pair": st.sampled_from([None, "a key"]),
        "allow_ssh_from": st.sampled_from([[], ["203.0.113.7/32"]]), "volume_gib": st.integers(100, 2000),
    })  # fmt: skip
    return st.builds(
        lambda wanted, data, place, store, idle: {
            "aws": place | ({"ami": "ami-0123456789abcdef0"} if wanted["os"] == "rocky9" else {}), "fsx": store, "shared_folder": f"{store.get('mount_point', '/fsx')}/work", "idle_minutes": idle,
            "slurm": {"parallelcluster": wanted | (database if data else {})},
        },
        cluster, st.booleans(), aws, fsx(), st.sampled_from([None, 10, 120]),
    )  # fmt: skip


@pytest.mark.timeout(600)
def test_two_hundred_configs_make_sound_cluster_files(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    python()

    @settings(
        max_examples=CONFIGS,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(fleets())
    def make(changes: dict[str, Any]) -> None:
        config = config_of(tmp_path, changes)
        number = len(list(folder.iterdir()))
        (folder / f"{number:04}.yaml").write_text(cluster_file.artifacts(config)[0].text)

    make()
    told = judged(folder)
    assert told.pop("")["ran"] > 20 * CONFIGS and len(told) >= CONFIGS
    wrong = {name: what for name, what in told.items() if what}
    assert not wrong, (
        f"{sorted({str(what)[:160] for what in wrong.values()})[:5]} {next(iter(wrong))}\n{(folder / next(iter(wrong))).read_text()}"
    )


def test_queues_in_several_zones_are_sound_where_the_file_system_is_not_the_cluster_s(
    tmp_path: Path,
) -> None:
    """ParallelCluster itself refuses a file system that it would create for several subnets."""
    fleet = {"instance_type": "trn1.32xlarge", "aws": {"subnets": [], "zones": ["us-west-2a", "us-west-2b"]}}  # fmt: skip
    sound = yaml.safe_load(cluster_file.artifacts(config_of(tmp_path, fleet))[0].text)
    wrong = yaml.safe_load(yaml.safe_dump(sound))
    wrong["SharedStorage"][0]["FsxLustreSettings"] = {"StorageCapacity": 1200, "DeploymentType": "SCRATCH_2"}  # fmt: skip
    files = tmp_path / "files"
    files.mkdir()
    for name, found in (("sound", sound), ("wrong", wrong)):
        (files / f"{name}.yaml").write_text(yaml.safe_dump(found))
    told = judged(files)
    assert told["sound.yaml"] == [] and len(sound["Scheduling"]["SlurmQueues"]) == 2
    assert any(said.startswith("ManagedFsxMultiAzValidator") for said in told["wrong.yaml"]), told


def test_the_judge_sees_what_is_wrong(tmp_path: Path) -> None:
    sound = yaml.safe_load(cluster_file.artifacts(config_of(tmp_path, {}))[0].text)
    files = tmp_path / "files"
    files.mkdir()
    for name, change in (("name", None), ("fsx", None), ("unknown", {"Foo": 1})):
        broken = yaml.safe_load(yaml.safe_dump(sound))
        queue = broken["Scheduling"]["SlurmQueues"][0]
        if name == "name":
            queue["Name"] = "Q_1"
        elif name == "fsx":
            broken["SharedStorage"][0]["FsxLustreSettings"]["StorageCapacity"] = 1234
        else:
            queue["ComputeResources"][0] |= change or {}
        (files / f"{name}.yaml").write_text(yaml.safe_dump(broken))
    told = judged(files)
    assert all(told[f"{name}.yaml"] for name in ("name", "fsx", "unknown")), told


def refusals() -> Iterator[tuple[dict[str, Any], str]]:
    queue = lambda **more: {"slurm": {"parallelcluster": {"queues": [{"name": "one"} | more]}}}  # noqa: E731
    yield queue(min=5, max=4), r"fleet.slurm.parallelcluster.queues: one: min 5 is more than max 4"
    yield (
        queue(instance_type="trn1.2xlarge"),
        "trn1.2xlarge has no EFA, so its nodes can't train together",
    )
    yield queue(instance_type="trn9.big"), "trn9.big is not a known instance type"
    yield queue(name="default"), "default: Slurm reserves this name"
    yield (
        queue(name="One_queue"),
        'queues[0].name: "One_queue" is not valid; write it like "queue-0"',
    )
    yield queue(capacity="block"), "capacity block needs a reservation"
    yield (
        queue(capacity="block", reservation="cr-0123456789abcdef0"),
        "a capacity block keeps all of its nodes running; set min 4",
    )
    yield queue(max=2), "fleet.nodes: 4: the largest queue has at most 2 nodes; set NODES=2"
    yield (
        {"fsx": {"size_gib": 1234}},
        "fleet.fsx.size_gib: 1234: it must be 1200 or a multiple of 2400",
    )
    yield {"fsx": {"throughput": 33}}, "fleet.fsx.throughput: 33 is not one of 125, 250, 500, 1000"
    yield (
        {"fsx": {"mount_point": "/home"}, "shared_folder": "/home/work"},
        "fleet.fsx.mount_point: /home is reserved; use for example /fsx",
    )
    yield (
        {"fsx": {"dns_name": "lustre.example.com", "mount_name": "x"}},
        "it must begin with the file system's id",
    )
    yield (
        {"aws": {"subnets": []}, "slurm": {"parallelcluster": {"head_subnet": SUBNET}}},
        "without fleet.aws.subnets, setup creates the head's subnet",
    )
    yield {"aws": {"zones": ["us-west-2a"]}}, "fleet.aws.subnets already sets the nodes' zone"
    yield {"aws": {"region": None}}, "fleet.aws.region: null"
    yield (
        {"aws": {"bucket": None}, "instance_type": "trn1.32xlarge"},
        "the nodes download the Neuron SDK installer from the bucket",
    )
    yield (
        {"slurm": {"parallelcluster": {"os": "rocky9"}}},
        "parallelcluster.os: rocky9: ParallelCluster has no image for it",
    )
    yield (
        {"slurm": {"partition": "gpu"}},
        "fleet.slurm.partition: gpu is not one of the queues: compute1",
    )
    yield (
        {"slurm": {"parallelcluster": {"database_uri": "x:3306"}}},
        "set all of database_uri, database_user and database_secret, or none",
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    list(refusals()),
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_plan_refuses_what_the_service_would(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, changes)
    assert expected in str(caught.value)
