"""data.tokenize_instance_type on AWS Batch: a queue, an environment and a launch template for the one machine that tokenizes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aws import batch, watchers  # noqa: F401  what they answer
from aws.account import Account
from aws.test_fleet import untouched
from aws.test_scheduler_machines import mine, scheduler_config, told
from trainfleet.backends import BACKENDS, batch_request
from trainfleet.backends.batch import Batch
from trainfleet.backends.node_script import bodies
from trainfleet.cloud import discovery, scheduler_template
from trainfleet.config import Config
from trainfleet.config.cross_checks import check
from trainfleet.plan.job import Job, on_its_machines, tokenize_job, train_job
from trainfleet.trust.errors import CloudError, ConfigError

CHEAP, QUEUE = "c7i.8xlarge", "trainfleet-cloudy_tokenize"


def config_of(
    folder: Path, kind: str = "trn1.32xlarge", cheap: str | None = CHEAP, **fleet: Any
) -> Config:
    """A config of two expensive nodes that tokenizes on a cheap one."""
    made = scheduler_config(folder, "batch", **fleet)
    stack = "neuron-xla" if kind.startswith("trn1") else made.fleet.platform
    own = replace(made.fleet, instance_type=kind, platform=stack)
    return replace(made, fleet=own, data=replace(made.data, tokenize_instance_type=cheap))


def sent(config: Config, job: Job) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The container, the submission and its environment of a job."""
    what, how = bodies(Batch(config).plan(job, {}))
    override = how["nodeOverrides"]["nodePropertyOverrides"][0]["containerOverrides"]
    assert what["nodeProperties"]["numNodes"] == how["nodeOverrides"]["numNodes"] == job.nodes
    environment = {pair["name"]: pair["value"] for pair in override["environment"]}
    return what["nodeProperties"]["nodeRangeProperties"][0]["container"], how, environment


def test_the_tokenize_job_asks_for_the_cheap_machine_and_the_training_for_its_own(
    tmp_path: Path,
) -> None:
    own = config_of(
        tmp_path, batch={"shared_memory_gib": 100, "consumable_resources": ["licence=1"]}
    )
    config = replace(
        own,
        fleet=replace(
            own.fleet,
            aws=replace(own.fleet.aws, capacity="block", reservation="cr-0123456789abcdef0"),
        ),
    )
    container, how, environment = sent(config, tokenize_job(config))
    asked = {one["type"]: one["value"] for one in container["resourceRequirements"]}
    assert (container["instanceType"], asked) == (
        CHEAP,
        {"VCPU": "32", "MEMORY": str(int(64 * 0.92 * 1024))},
    )
    assert (
        how["jobQueue"] == QUEUE
        and how["nodeOverrides"]["numNodes"] == 1
        and environment["WORKERS"] == "32"
    )
    assert (
        not container["linuxParameters"]["devices"]
        and container["linuxParameters"]["sharedMemorySize"] == 16 * 1024
    )
    assert "licence" not in json.dumps(bodies(Batch(config).plan(tokenize_job(config), {})))
    container, how, there = sent(config, train_job(config))
    assert (
        container["instanceType"] == "trn1.32xlarge"
        and len(container["linuxParameters"]["devices"]) == 8 + 16
    )
    assert how["jobQueue"] == "trainfleet-cloudy" and how["nodeOverrides"]["numNodes"] == 2
    assert environment.get("TRAINFLEET_LOCK") == there.get("TRAINFLEET_LOCK") is not None, (
        "both run in one image"
    )


def test_without_the_key_both_run_on_the_fleet_s_own(tmp_path: Path) -> None:
    config = config_of(tmp_path, cheap=None)
    container, how, _ = sent(config, tokenize_job(config))
    assert (container["instanceType"], how["jobQueue"]) == ("trn1.32xlarge", "trainfleet-cloudy")
    assert how["nodeOverrides"]["numNodes"] == 2


def test_the_stack_has_an_environment_for_it_of_no_machines_until_a_job_comes(
    tmp_path: Path,
) -> None:
    own = config_of(tmp_path)
    config = replace(
        own,
        fleet=replace(
            own.fleet,
            aws=replace(own.fleet.aws, capacity="block", reservation="cr-0123456789abcdef0"),
        ),
    )
    inputs = replace(
        discovery.placeholders(config, "us-east-1"),
        scheduler="batch",
        image="ami-neuron",
        tokenizing="ami-cpu",
    )
    made = scheduler_template.template(config, inputs, "batch")["Resources"]
    resources = made["TokenizingEnvironment"]["Properties"]["ComputeResources"]
    assert (resources["InstanceTypes"], resources["MinvCpus"], resources["MaxvCpus"]) == (
        [CHEAP],
        0,
        32,
    )
    assert resources["Ec2Configuration"] == [
        {"ImageType": "ECS_AL2023", "ImageIdOverride": "ami-cpu"}
    ]
    assert "PlacementGroup" not in resources and resources["LaunchTemplate"][
        "LaunchTemplateId"
    ] == {"Ref": "TokenizingTemplate"}
    data = made["TokenizingTemplate"]["Properties"]["LaunchTemplateData"]
    assert [one["InterfaceType"] for one in data["NetworkInterfaces"]] == ["interface"]
    assert "CapacityReservationSpecification" not in data and "InstanceMarketOptions" not in data
    order = made["TokenizingQueue"]["Properties"]["ComputeEnvironmentOrder"]
    assert order == [{"Order": 1, "ComputeEnvironment": {"Ref": "TokenizingEnvironment"}}]
    resources = made["Environment"]["Properties"]["ComputeResources"]
    assert (
        resources["InstanceTypes"] == ["trn1.32xlarge"]
        and resources["Ec2Configuration"][0]["ImageIdOverride"] == "ami-neuron"
    )


def test_its_queue_is_made_takes_the_job_and_goes_with_the_rest(
    account: Account, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    backend = Batch(config)
    machines = backend.machines()
    assert machines.apply() == 0 and machines.changes() == ()
    assert {thing.id for thing in mine(account) if thing.kind == "job-queue"} == {
        "trainfleet-cloudy",
        QUEUE,
    }
    job = tokenize_job(config)
    theirs = partial(batch_request.queue, QUEUE)
    backend.require(on_its_machines(config, job), job, theirs)
    with pytest.raises(CloudError, match="no compute environment of the queue can run this job"):
        backend.require(config, train_job(config), theirs)
    machines.remove(purge=False)
    assert not mine(account) and not machines.left() and untouched(account)


def test_a_plan_names_its_type_and_price_and_the_budget_s_hour_stays_the_fleet_s(
    account: Account, tmp_path: Path
) -> None:
    said = told(config_of(tmp_path))
    assert f"1 x {CHEAP} for $1.46 an hour instead of 2 x trn1.32xlarge for $43.07" in said, said
    assert "tokenizing\n" not in told(config_of(tmp_path, cheap=None))
    with_it, without = (
        BACKENDS["batch"](config_of(tmp_path, cheap=cheap)).bill() for cheap in (CHEAP, None)
    )
    assert with_it == without is not None


def test_what_it_can_not_be_is_refused(tmp_path: Path) -> None:
    for kind, why in (
        ("trn1.2xlarge", "does not use"),
        ("c5n.18xlarge", "does not use"),
        ("m1.tiny", "not in the table"),
    ):
        (said,) = [
            message
            for key, message in check(config_of(tmp_path, cheap=kind), set(), 0)
            if key == "data.tokenize_instance_type"
        ]
        assert why in said and CHEAP in said
    assert "data.tokenize_instance_type" not in dict(check(config_of(tmp_path), set(), 0))
    roles = {
        "job_role": "arn:aws:iam::111122223333:role/x",
        "execution_role": "arn:aws:iam::111122223333:role/x",
    }
    refused = dict(Batch.refuse(config_of(tmp_path, batch={"queue": "mine", **roles})))
    assert "fleet.batch.queue" in refused["data.tokenize_instance_type"]


def test_a_zone_must_have_both_types(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers = {"trn1.32xlarge": ["us-east-1a", "us-east-1b"], CHEAP: ["us-east-1b"]}
    monkeypatch.setattr(discovery, "_offering", lambda type, key, calls: offers[type])
    config = config_of(tmp_path)
    assert discovery.zones(config, Batch(config).calls) == ["us-east-1b"]
    offers[CHEAP] = ["us-east-1c"]
    with pytest.raises((ConfigError, CloudError), match="no zone with both"):
        discovery.zones(config, Batch(config).calls)
