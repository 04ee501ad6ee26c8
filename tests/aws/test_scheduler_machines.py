"""What AWS Batch and SageMaker need, made by a stack, found by tag and taken down; killed at every request, and nothing is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from aws import batch, sagemaker, scheduler_crashes, watchers  # noqa: F401  what they answer
from aws.account import Account, Killed, Thing
from aws.test_fleet import untouched
from aws.world import aws, strangers
from trainfleet.backends import BACKENDS, is_guest, shared, terms_of
from trainfleet.backends.aws_managed import ManagedMachines
from trainfleet.cloud import prices
from trainfleet.cloud.template_inputs import own_tags
from trainfleet.config import Config, Settings, load
from trainfleet.launch import cleaning, job_image, provisioning
from trainfleet.plan.measurement import measured
from trainfleet.trust.errors import BackendError

SCHEDULERS = ("batch", "sagemaker")


def scheduler_config(folder: Path, scheduler: str, **more: Any) -> Config:
    """A config that leaves all to the stack; its buckets are the user's."""
    fleet = {"backend": scheduler, "nodes": 2, "instance_type": "c7i.8xlarge", "shared_folder": "s3://theirs/some",
             "container": "x/y:z", "secrets": ["THE_KEY"], "aws": {"region": "us-east-1"}} | more  # fmt: skip
    said = {"name": "cloudy", "fleet": fleet, "train": {"global_batch_size": 12},
            "data": {"name": "text", "sources": ["s3://theirs/text"], "tokenized_path": "s3://theirs/sets", "vocab_size": 340},
            "checkpoint": {"path": "s3://theirs/checkpoints"}}  # fmt: skip
    path = folder / "cloudy.yaml"
    path.write_text(yaml.safe_dump(said))
    return load(Settings(path, ""), terms_of)[0]


def mine(account: Account) -> list[Thing]:
    """What is left of this config."""
    return [thing for thing in account.ours() if thing.tags.get("trainfleet:config") == "cloudy"]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_all_is_made_found_and_taken_down_and_what_others_have_stays(
    scheduler: str, account: Account, tmp_path: Path
) -> None:
    config = scheduler_config(tmp_path, scheduler)
    machines = BACKENDS[scheduler](config).machines()
    assert [artifact.name for artifact in machines.changes()] == [
        "stack.yaml",
        "requests/01-cloudformation-CreateStack.json",
        "policy.json",
    ]
    assert machines.apply() == 0 and machines.changes() == ()
    kinds = {thing.kind for thing in mine(account)}
    assert {"role", "log-group"} <= kinds and ("job-queue" in kinds) == (scheduler == "batch")
    assert machines.left()
    machines.remove(purge=False)
    assert not mine(account) and not machines.left() and untouched(account)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_run_that_measures_uses_what_is_there_and_neither_changes_nor_removes_it(
    scheduler: str, account: Account, tmp_path: Path
) -> None:
    config = scheduler_config(tmp_path, scheduler)
    BACKENDS[scheduler](config).machines().apply()
    short = measured(shared(config), "cloudy-profile-1", 6)
    machines = BACKENDS[scheduler](short).machines()
    assert isinstance(machines, ManagedMachines) and machines.is_there() and machines.own.outputs()
    assert provisioning.planned(short) == () and cleaning.machines_of(short) is None
    with pytest.raises(BackendError, match="belong to the config cloudy"):
        provisioning.make_ready(short)
    again = measured(shared(short), "cloudy-profile-1-longer", 8)
    assert again.fleet_name == "cloudy" and not is_guest(config)


def test_a_config_s_clean_leaves_the_image_that_another_config_holds(
    account: Account, tmp_path: Path
) -> None:
    machines = BACKENDS["batch"](scheduler_config(tmp_path, "batch", container="build")).machines()
    held = {"sha256:1": {"cloudy.cpu-1", "bob.cpu-1"}, "sha256:2": {"cloudy.cpu-2"}}
    account.add("repository", "trainfleet", {}, own_tags("cloudy"), images=held)
    assert len(machines.left()) == 2 and all(
        "image" in line and "cloudy.cpu-" in line for line in machines.left()
    )
    machines.remove(purge=False)
    assert held == {"sha256:1": {"bob.cpu-1"}} and not machines.left()
    others = BACKENDS["batch"](replace(scheduler_config(tmp_path, "batch"), name="bob")).machines()
    others.remove(purge=False)
    assert "trainfleet" not in account.things, "the repository goes with the last image"


@pytest.mark.parametrize(
    "name", ["sagemaker"]
)  # Batch's execution role may by a policy of AWS's own
@pytest.mark.parametrize(
    "image", ["build", "210987654321.dkr.ecr.eu-west-1.amazonaws.com/team/x:1"]
)
def test_the_role_that_pulls_may_pull_the_image_of_the_job(
    name: str, image: str, account: Account, tmp_path: Path
) -> None:
    config = scheduler_config(tmp_path, name, container=image)
    (stack, *_) = BACKENDS[name](config).machines().changes()
    policies = yaml.safe_load(stack.text)["Resources"]["JobRole"]["Properties"]["Policies"]
    statements = [one for policy in policies for one in policy["PolicyDocument"]["Statement"]]
    (pulls,) = [one["Resource"] for one in statements if "ecr:BatchGetImage" in one["Action"]]
    host, _, path = job_image.named(config).fleet.container.partition("/")
    number, region = host.split(".")[0], host.split(".")[3]
    assert pulls == [f"arn:aws:ecr:{region}:{number}:repository/{path.partition(':')[0]}"]


@pytest.mark.parametrize("name", ["batch", "sagemaker"])
def test_a_queue_and_roles_of_yours_need_nothing(
    name: str, account: Account, tmp_path: Path
) -> None:
    role = "arn:aws:iam::111122223333:role/train"
    own = {
        "batch": {"queue": "mine", "job_role": role, "execution_role": role},
        "sagemaker": {"role": role},
    }[name]
    machines = BACKENDS[name](scheduler_config(tmp_path, name, **{name: own})).machines()
    assert machines.changes() == () and machines.apply() == 0 and not mine(account)


def told(config: Config) -> str:
    machines = BACKENDS[config.fleet.backend](config).machines()
    assert isinstance(machines, ManagedMachines)
    return "\n".join(machines.prospect(10.0, None).lines)


def test_a_plan_says_what_an_hour_costs_and_whether_there_is_time_to_save(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainfleet.backends.sagemaker.size_of", lambda config: 200 * 2**30)
    said = told(scheduler_config(tmp_path, "sagemaker", sagemaker={"input_mode": "file"}))
    assert "2 x ml.c7i.8xlarge" in said and "2 x 400 GiB" in said and prices.OF_SAGEMAKER in said, (
        said
    )
    assert "if SageMaker stops the job, ranks have 110 s to save; saving takes about 0 s" in said
    said = told(scheduler_config(tmp_path, "batch"))
    assert "2 x c7i.8xlarge" in said and "2 x 300 GiB gp3" in said and "NAT gateway" in said, said
    assert "if AWS Batch stops the job, ranks have 100 s to save" in said and "warning" not in said
    config = scheduler_config(tmp_path, "batch", batch={"queue": "theirs"})
    large = replace(
        config,
        model=replace(config.model, layers=80, hidden_size=8192, heads=64, intermediate_size=28672),
    )
    assert "warning: if AWS Batch stops the job, ranks have 20 s to save" in told(
        large
    ) and "NAT" not in told(large)


@pytest.mark.parametrize(
    ("scheduler", "dollars"), [("sagemaker", 1.714 + 100 * 0.14 / 730), ("batch", 1.43)]
)
def test_the_budget_counts_with_the_scheduler_s_own_prices(
    scheduler: str, dollars: float, account: Account, tmp_path: Path
) -> None:
    bill = BACKENDS[scheduler](scheduler_config(tmp_path, scheduler)).bill()
    assert bill is not None and dollars <= bill.hour(2) / 2 < dollars + 0.1
    assert not account.calls, "the table knows this type"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_killed_at_any_request_of_setup_nothing_is_left_after_clean(
    scheduler: str, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies before or after a request, of the first each in turn; another one, which knows nothing, cleans."""
    monkeypatch.chdir(tmp_path)
    config, number, finished = scheduler_config(tmp_path, scheduler), 0, False
    while not finished:
        account = Account()
        strangers(account)
        with aws(account):
            account.dies = (number, when)
            try:
                BACKENDS[scheduler](config).machines().apply()
            except Killed:
                pass
            finished = len(account.calls) <= number
            account.dies = None
            account.rest()
            BACKENDS[scheduler](config).machines().remove(purge=False)
            assert not mine(account), number
            assert untouched(account), number
        number += (
            1 if number < 8 else 7
        )  # the first requests look and create; then it watches the stack
    assert number > 10


def test_who_may_not_delete_a_log_deletes_the_job_all_the_same(
    account: Account, tmp_path: Path
) -> None:
    scheduler_crashes.others(account)
    scheduler_crashes.at_work(account)
    account.denied.add("logs:DeleteLogStream")
    config = scheduler_config(tmp_path, "sagemaker")
    BACKENDS["sagemaker"](config).machines().remove(purge=False)
    assert {thing.kind for thing in mine(account)} == {"log-stream"}
    assert scheduler_crashes.undisturbed(account)
