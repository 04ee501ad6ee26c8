"""What AWS Batch and SageMaker are asked to run: valid to their own models, for every type, key and mode; what can't be is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml

from aws.validation import problems_of
from trainfleet.backends import BACKENDS, terms_of
from trainfleet.backends.node_script import FORMS, bodies
from trainfleet.backends.sagemaker_request import input_of
from trainfleet.config import Config, Settings, load
from trainfleet.hardware import node_types
from trainfleet.hosts.install_steps import lock_name
from trainfleet.hosts.platform import load_platform
from trainfleet.node.entrypoint import LOCK
from trainfleet.plan.job import Request, tokenize_job, train_job
from trainfleet.trust.errors import BackendError, ConfigError

TYPES = [name for name, row in node_types.INSTANCE_TYPES.items() if row.memory_gib > 32]
TRAINED_ON = set(
    botocore.session.get_session()
    .get_service_model("sagemaker")
    .shape_for("TrainingInstanceType")
    .enum
)
ROLE = "arn:aws:iam::123456789012:role/train"
QUEUE = "arn:aws:batch:us-east-1:123456789012:job-queue/mine"
OWN = {
    "batch": {"queue": "mine", "job_role": ROLE, "execution_role": ROLE},
    "sagemaker": {"role": ROLE},
}


def config_of(
    folder: Path, backend: str, instance_type: str = "p4d.24xlarge", nodes: int = 4, **fleet: Any
) -> Config:
    own = OWN[backend] | fleet.pop(backend, {})
    said = {
        "name": "a-run.1", "data": {"sources": ["s3://bkt/text"], "tokenized_path": "s3://bkt/sets", "vocab_size": 340},
        "model": {"layers": 2, "hidden_size": 128, "heads": 64, "intermediate_size": 128}, "checkpoint": {"path": "s3://bkt/c"},
        "train": {"global_batch_size": 1024, "sequence_length": 128, "spike_sigmas": 0, "precision": "auto", "compile": False},
        "fleet": {"backend": backend, "nodes": nodes, "instance_type": instance_type, "container": "123456789012.dkr.ecr.us-east-1.amazonaws.com/x:y",
                  "shared_folder": "s3://bkt/runs", "aws": {"region": "us-east-1"}, backend: own} | fleet,
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(said))
    return load(Settings(path, ""), terms_of)[0]


def requests(config: Config) -> Iterator[Request]:
    for job in (tokenize_job(config), train_job(config)):
        yield BACKENDS[config.fleet.backend](config).plan(job, {})


def sound(request: Request) -> dict[str, Any]:
    """The last body of a request, all of which its service's model takes once it has a name."""
    for artifact, body in zip(request.artifacts, bodies(request), strict=True):
        _, service, operation = artifact.name.removesuffix(".json").split("-")
        name = {"SubmitJob": {"jobName": "x"}, "CreateTrainingJob": {"TrainingJobName": "x"}}.get(
            operation, {}
        )
        assert problems_of(service, operation, body | name) == [], artifact.name
    return bodies(request)[-1]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainfleet.backends.sagemaker.size_of", lambda config: 10**9)


@pytest.mark.parametrize("instance_type", TYPES)
@pytest.mark.parametrize("backend", ["batch", "sagemaker"])
def test_every_request_is_valid_for_every_type(
    backend: str, instance_type: str, tmp_path: Path
) -> None:
    if backend == "sagemaker" and f"ml.{instance_type}" not in TRAINED_ON:
        with pytest.raises(
            ConfigError,
            match=f"{instance_type}: SageMaker does not offer this type; use trn2.48xlarge",
        ):
            config_of(tmp_path, backend, instance_type)
        return
    config = config_of(tmp_path, backend, instance_type)
    for request in requests(config):
        sound(request)
    row = node_types.INSTANCE_TYPES[instance_type]
    if backend == "batch":
        container = bodies(request)[0]["nodeProperties"]["nodeRangeProperties"][0]["container"]
        devices = [device["hostPath"] for device in container["linuxParameters"].get("devices", ())]
        assert sum(device.startswith("/dev/infiniband/uverbs") for device in devices) == row.efa
        neuron = row.accelerator is not None and row.accelerator.kind == "neuron"
        assert any(device.startswith("/dev/neuron") for device in devices) == neuron
        needs = {entry["type"]: int(entry["value"]) for entry in container["resourceRequirements"]}
        assert needs["VCPU"] == row.vcpus and needs["MEMORY"] < row.memory_gib * 1024
        assert needs.get("GPU", 0) == (
            row.accelerators if row.accelerator and row.accelerator.kind == "cuda" else 0
        )


@pytest.mark.parametrize("instance_type", [name for name in TYPES if f"ml.{name}" in TRAINED_ON])
def test_sagemaker_gets_a_key_of_the_volume_only_where_the_type_has_no_disks_of_its_own(
    instance_type: str, tmp_path: Path
) -> None:
    """botocore: "You can't request a VolumeKmsKeyId when using an instance type with local storage"."""
    config = config_of(tmp_path, "sagemaker", instance_type, sagemaker={"kms_key": "alias/x"})
    asked = any(
        "VolumeKmsKeyId" in body.get("ResourceConfig", {})
        for request in requests(config)
        for body in bodies(request)
    )
    assert asked == (node_types.INSTANCE_TYPES[instance_type].nvme_gb == 0)


@pytest.mark.parametrize("backend", ["batch", "sagemaker"])
def test_every_node_is_told_for_which_versions_the_job_was_planned(
    backend: str, tmp_path: Path
) -> None:
    """Its image compares them with its own (node/entrypoint.py): also one that no launcher could look at."""
    config = config_of(tmp_path, backend)
    for request in requests(config):
        body = sound(request)
        nodes = body.get("nodeOverrides", {}).get("nodePropertyOverrides", [])
        told = (
            {pair["name"]: pair["value"] for pair in nodes[0]["containerOverrides"]["environment"]}
            if nodes
            else body["Environment"]
        )
        assert told[LOCK] == lock_name(load_platform(config.fleet.platform))


@pytest.mark.parametrize(
    "keys",
    [
        {"attempts": 10}, {"timeout_hours": 0.02}, {"shared_memory_gib": 128}, {"share": "research", "priority": 7},
        {"consumable_resources": ["licence=2", "token=1"]},
    ],
    ids=str,
)  # fmt: skip
def test_every_key_of_batch_is_in_a_valid_request(keys: dict[str, Any], tmp_path: Path) -> None:
    plain = list(requests(config_of(tmp_path, "batch")))[1]
    with_keys = list(requests(config_of(tmp_path, "batch", batch=keys)))[1]
    sound(with_keys)
    assert bodies(plain) != bodies(with_keys)


PLAN = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/spring"
VPC = {"subnets": ["subnet-0123456789abcdef0"], "security_groups": ["sg-0123456789abcdef0"]}
FSX = {"input_mode": "fsx", "file_system": "fs-0123456789abcdef0:/fsx/sets", **VPC}


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ({"input_mode": "file"}, ("InputDataConfig", 0, "InputMode", "File")),
        ({"input_mode": "fastfile"}, ("AlgorithmSpecification", "TrainingInputMode", "FastFile")),
        (
            FSX,
            (
                "InputDataConfig",
                0,
                "DataSource",
                "FileSystemDataSource",
                "DirectoryPath",
                "/fsx/sets/stdlib",
            ),
        ),
        ({"warm_pool_minutes": 30}, ("ResourceConfig", "KeepAlivePeriodInSeconds", 1800)),
        ({"max_hours": 672}, ("StoppingCondition", "MaxRuntimeInSeconds", 2419200)),
        ({"retries": 30}, ("RetryStrategy", "MaximumRetryAttempts", 30)),
        (VPC, ("VpcConfig", "Subnets", ["subnet-0123456789abcdef0"])),
        ({"kms_key": "alias/x"}, ("OutputDataConfig", "KmsKeyId", "alias/x")),
        ({"training_plan": PLAN}, ("ResourceConfig", "TrainingPlanArn", PLAN)),
        ({"volume_gib": 500}, ("ResourceConfig", "VolumeSizeInGB", 500)),
    ],
    ids=lambda value: str(value)[:40],
)
def test_every_key_of_sagemaker_is_in_a_valid_request(
    keys: dict[str, Any], where: tuple[Any, ...], tmp_path: Path
) -> None:
    body: Any = sound(list(requests(config_of(tmp_path, "sagemaker", sagemaker=keys)))[1])
    for step in where[:-1]:
        body = body[step]
    assert body == where[-1]


def test_managed_spot_waits_for_machines_and_saves_to_s3_itself(tmp_path: Path) -> None:
    body = sound(list(requests(config_of(tmp_path, "sagemaker", spot=True)))[1])
    assert (
        body["EnableManagedSpotTraining"]
        and body["StoppingCondition"]["MaxWaitTimeInSeconds"] == 864000
    )
    assert "CheckpointConfig" not in body, (
        "which would bring every checkpoint to every machine at a restart"
    )


@pytest.mark.parametrize(
    ("size", "mode"),
    [
        (None, "stream"),
        (10**9, "file"),
        (59 * 10**9, "file"),
        (61 * 10**9, "stream"),
        (10**13, "stream"),
    ],
)
def test_the_dataset_s_size_decides_how_nodes_get_it(
    size: int | None, mode: str, tmp_path: Path
) -> None:
    found = input_of(config_of(tmp_path, "sagemaker"), size)
    assert found.mode == mode and found.why and found.seconds <= 60


def test_a_logged_step_is_what_sagemaker_s_metrics_read() -> None:
    import re

    line = "rank 0  07:01:02.345 | step 1,234  loss 3.2101  98765 tokens/s  validation 3.4"
    rows = FORMS["training job"]["AlgorithmSpecification"]["MetricDefinitions"]
    assert {row["Name"]: re.search(row["Regex"], line)[1] for row in rows} == {  # type: ignore[index]
        "loss": "3.2101", "tokens_per_second": "98765", "validation_loss": "3.4",
    }  # fmt: skip


def test_a_queue_may_be_named_by_its_arn(tmp_path: Path) -> None:
    assert {
        sound(request)["jobQueue"]
        for request in requests(config_of(tmp_path, "batch", batch={"queue": QUEUE}))
    } == {QUEUE}


def test_secrets_are_referred_to_and_never_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-11")
    arn = "arn:aws:secretsmanager:us-east-1:123456789012:secret:wandb-AbCdEf"
    more = {"secrets": ["HF_TOKEN", "WANDB"], "secret_arns": [f"WANDB={arn}"]}
    for backend in OWN:
        request = list(requests(config_of(tmp_path, backend, **more)))[1]
        sound(request)
        text = json.dumps(request.record())
        assert arn in text and "/trainfleet/a-run.1/HF_TOKEN" in text and "canary-11" not in text


@pytest.mark.parametrize(
    ("backend", "fleet", "said"),
    [
        (
            "batch",
            {"spot": True},
            "fleet.spot: AWS Batch does not run multi-node parallel jobs on spot",
        ),
        ("batch", {"batch": {"priority": 3}}, "fleet.batch.priority: applies only within a share"),
        (
            "batch",
            {"aws": {"region": "us-east-1", "ami": "ami-0123456789abcdef0"}},
            "fleet.batch.queue mine has its own machines",
        ),
        (
            "batch",
            {"batch": {"queue": QUEUE.replace("east", "west")}},
            "is not in fleet.aws.region us-east-1",
        ),
        ("batch", {"container": "none"}, "fleet.container"),
        (
            "batch",
            {"instance_type": "p3dn.24xlarge", "batch": {"queue": None}},
            "fleet.instance_type: p3dn.24xlarge: AWS Batch no longer has a machine image for it",
        ),
        ("sagemaker", {"container": "none"}, "fleet.container"),
        (
            "sagemaker",
            {"sagemaker": {"input_mode": "fsx"}},
            "fleet.sagemaker.file_system: is missing",
        ),
        (
            "sagemaker",
            {"sagemaker": {"subnets": ["subnet-0123456789abcdef0"]}},
            "fleet.sagemaker.security_groups: are missing",
        ),
        (
            "sagemaker",
            {"sagemaker": {"wait_hours": 3}},
            "fleet.sagemaker.wait_hours: applies only to fleet.spot",
        ),
        (
            "sagemaker",
            {"spot": True, "sagemaker": {"wait_hours": 3}},
            "3 is less than max_hours (120)",
        ),
        (
            "sagemaker",
            {"spot": True, "sagemaker": {"training_plan": PLAN}},
            "fleet.sagemaker.training_plan: is reserved",
        ),
        (
            "sagemaker",
            {"sagemaker": {"training_plan": PLAN, "warm_pool_minutes": 3}},
            "fleet.sagemaker.warm_pool_minutes",
        ),
        (
            "sagemaker",
            {"sagemaker": {"encrypt_traffic": True}},
            "fleet.sagemaker.encrypt_traffic: true",
        ),
        (
            "sagemaker",
            {"shared_folder": "/fsx/x"},
            'fleet.shared_folder: "/fsx/x": sagemaker nodes have no shared disk',
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_can_t_be_is_refused_by_key(
    backend: str, fleet: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, backend, **fleet)
    assert said in str(caught.value)


def test_a_value_that_sagemaker_does_not_carry_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path, "sagemaker", shared_folder=f"s3://bkt/{'x' * 600}")
    with pytest.raises(
        BackendError, match="TRAINFLEET_BUCKET: SageMaker does not accept this value"
    ):
        list(requests(config))
