"""make plan of a fleet that AWS is to make: dollars by resource, what would change, what stands against it, the very requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from aws.account import Account
from aws.amis import AMIS
from aws.fleets import INPUTS, fleet
from aws.rules import judge
from aws.validation import problems_of
from aws.world import aws, config_of
from trainfleet.backends import backend_of, terms_of
from trainfleet.backends.ec2 import Ec2
from trainfleet.cli import plan as verb
from trainfleet.cli.fleet import setup
from trainfleet.cloud import discovery, template_storage
from trainfleet.cloud.calls import Calls
from trainfleet.cloud.cloudformation import compare, describe
from trainfleet.cloud.inventory import weighed
from trainfleet.cloud.stack_nodes import FleetStack
from trainfleet.cloud.template import template
from trainfleet.cloud.template_inputs import own_tags
from trainfleet.cloud.template_storage import LOG_DAYS
from trainfleet.config import Settings, load
from trainfleet.plan.job import tokenize_job, train_job
from trainfleet.recipes import FOLDER
from trainfleet.trust.errors import CloudError, ConfigError

ASKS_ONLY = ("Describe", "Get", "List", "Simulate", "Head")
EC2 = sorted(path.stem for path in FOLDER.glob("*-ec2.yaml"))


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    monkeypatch.chdir(tmp_path)
    backend_of.cache_clear()
    found = Account()
    with aws(found):
        yield found
    backend_of.cache_clear()


def plan(capsys: pytest.CaptureFixture[str], **variables: str) -> str:
    backend_of.cache_clear()  # another command
    assert verb.plan({"CONFIG": "cloudy.yaml", **variables}, 0.0) == 0
    return capsys.readouterr().out


def test_a_plan_tells_dollars_changes_and_what_stands_against_it(
    account: Account, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_of(tmp_path, nodes=3)
    said = plan(capsys, OUT="plan")
    assert "+ a new stack of" in said and "4 EC2 Instance" in said
    assert (
        "  nodes              4.29  3 x c7i.8xlarge, on-demand" in said
        and "  all                6.11  an hour" in said
    )
    assert (
        "list price in us-east-1, 2026-11-22: nodes, volumes, file system, NAT, addresses, head"
        in said
    )
    assert (
        "FSx writes runs and datasets back to s3://trainfleet-cloudy-111122223333-us-east-1/cloudy/ as they change"
        in said
    )
    assert "access\n  SSH from 198.51.100.0/24, through the head, c7i.8xlarge" in said
    assert (
        "logs\n  to the log group /trainfleet/cloudy, kept for 30 days in CloudWatch: $0.50 a GB"
        in said
    )
    assert (
        "account: no obstacle found" in said
        and "first batch after a second" in said
        and "next: make setup" in said
    )
    assert not [
        operation for _, operation, _ in account.calls if not operation.startswith(ASKS_ONLY)
    ], "a plan makes nothing"


def test_what_a_plan_writes_is_what_setup_sends(
    account: Account, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path)
    plan(capsys, OUT="plan")
    stack = yaml.safe_load(Path("plan/stack.yaml").read_text())
    request = json.loads(Path("plan/requests/01-cloudformation-CreateStack.json").read_text())
    assert json.loads(request["TemplateBody"]) == stack and judge(stack) == []
    assert problems_of("cloudformation", "CreateStack", request | {"ClientRequestToken": "x"}) == []
    account.calls.clear()
    FleetStack(config).make(frozenset(), lambda *row: None, lambda text: None)
    sent = next(request for _, operation, request in account.calls if operation == "CreateStack")
    mine = {
        key: value
        for key, value in sent.items()
        if key not in ("ClientRequestToken", "Tags", "TemplateBody")
    }
    assert mine == {key: request[key] for key in mine}
    later = json.loads(sent["TemplateBody"])
    for one in (
        stack,
        later,
    ):  # the moment at which it is made is the one thing that a plan can't know
        one["Parameters"]["Created"]["Default"] = ""
    assert strip(later) == strip(stack)


def strip(value: Any) -> Any:
    """Without the moment in tags and names."""
    match value:
        case {"Key": "trainfleet:created" | "trainfleet:expires"}:
            return {}
        case dict():
            return {key: strip(inner) for key, inner in value.items()}
        case list():
            return [strip(inner) for inner in value]
        case str():
            return re.sub(r"\d{4}-\d\d-\d\dT[\d:+]+$", "", value)
    return value


def test_a_second_plan_tells_only_what_would_change(
    account: Account, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, nodes=2)
    FleetStack(config).make(frozenset(), lambda *row: None, lambda text: None)
    backend_of.cache_clear()
    found = FleetStack(config_of(tmp_path, nodes=3)).foresee(())
    assert [str(change) for change in found.changes] == ["+ Node2  EC2 Instance"]
    same = FleetStack(config_of(tmp_path, nodes=2)).foresee(())
    assert same.changes == [] and same.requests == []


def test_a_new_image_is_told_to_replace_every_node() -> None:
    before = template(fleet(), INPUTS)["Resources"]
    wider = fleet(volume_gib=500)
    after = template(wider, INPUTS)["Resources"]
    changes = compare(before, after)
    assert [str(change) for change in changes] == [
        "~ Template  EC2 LaunchTemplate",
        "± Node0  EC2 Instance",
        "± Node1  EC2 Instance",
    ]
    assert "warning: 2 nodes will be replaced" in "\n".join(describe(changes, False))
    other = template(fleet(), replace(INPUTS, zone="us-east-1c"))["Resources"]
    assert compare(before, other) == [], "a zone stands in the parameters"


def test_a_plan_over_the_budget_is_refused_and_tells_why(
    account: Account, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_of(tmp_path, instance_type="p5.48xlarge")
    with pytest.raises(
        ConfigError,
        match=r"budget.max_usd: set-up and idle time are already estimated at .*, over the limit of \$0.00",
    ):
        plan(capsys, SET="budget.max_usd=0.001")
    assert "NAT gateway" in capsys.readouterr().out, "what it would cost is told first"


def test_what_stands_against_it_is_told(
    account: Account, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_of(tmp_path)
    account.denied.add("ec2:CreateVpc")
    account.quotas["L-1216C47A"] = 0.0
    said = plan(capsys)
    assert (
        "your credentials may not do ec2:CreateVpc" in said
        and "is 0" in said
        and "request-service-quota-increase" in said
    )


def test_without_credentials_a_plan_says_so_and_setup_ends(
    account: Account, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_of(tmp_path)
    account.no_credentials = True
    assert "account: not asked, because no AWS credentials were found" in plan(capsys)
    with pytest.raises(CloudError, match="no AWS credentials were found"):
        setup({"CONFIG": "cloudy.yaml"}, 0.0)


@pytest.mark.parametrize("name", EC2)
def test_recipes_make_sound_fleets(name: str) -> None:
    config = load(Settings(FOLDER / f"{name}.yaml"), terms_of)[0]
    found = template(config, replace(INPUTS, slots=tuple(range(config.fleet.nodes))))
    assert (
        judge(found) == []
        and sum(entry["Type"] == "AWS::EC2::Instance" for entry in found["Resources"].values())
        == config.fleet.nodes
    )
    bill = backend_of(config).bill()
    assert bill and bill.node and bill.rest and config.budget.max_usd


def test_there_is_a_recipe_for_each_kind_of_node() -> None:
    kinds = {
        load(Settings(FOLDER / f"{name}.yaml"), terms_of)[0].fleet.instance_type for name in EC2
    }
    assert kinds >= {"p3dn.24xlarge", "p5.48xlarge", "trn1.32xlarge"}


@pytest.mark.parametrize(
    ("shared", "store", "steps", "way"),
    [
        ("/fsx/trainfleet", None, 1000, "FSx"),
        ("/mnt/nfs", None, 1000, "shared folder"),
        ("s3://bucket/x", None, 10, "NVMe copy"),  # 84 MB a node
        ("s3://bucket/x", "s3://bucket/sets", 10**6, "S3 stream"),
        ("/fsx/trainfleet", "s3://bucket/sets", 10**6, "S3 stream"),
    ],
)
def test_how_tokens_are_read_follows_from_their_size_and_where_they_are(
    shared: str, store: str | None, steps: int, way: str
) -> None:
    config = fleet()
    config = replace(
        config, fleet=replace(config.fleet, shared_folder=shared), data=replace(config.data, tokenized_path=store),
        train=replace(config.train, steps=steps),
    )  # fmt: skip
    chosen, why = template_storage.choose(config)
    assert chosen.name == way and why
    said = "\n".join(template_storage.describe(config, 1e6))
    assert (
        f"{way}: {why}" in said
        and "first batch after" in said
        and said.count("not ") == len(list(template_storage.ways(config))) - 1
    )


def test_what_s3_is_asked_for_is_far_below_what_a_prefix_takes() -> None:
    config = replace(fleet(), data=replace(fleet().data, tokenized_path="s3://bucket/sets"))
    assert "so one is enough" in "\n".join(template_storage.describe(config, 5e6))


def test_nodes_are_told_where_logs_go_and_whether_to_copy(account: Account, tmp_path: Path) -> None:
    config = config_of(tmp_path, instance_type="p5.4xlarge")
    stored = replace(config, data=replace(config.data, tokenized_path="s3://bucket/sets"))
    logs = {"TRAINFLEET_LOGS": "us-east-1 /trainfleet/cloudy"}
    assert Ec2(config).extras(train_job(config)) == logs
    assert Ec2(stored).extras(train_job(stored)) == logs | {"TRAINFLEET_COPY": "/scratch"}
    assert Ec2(stored).extras(tokenize_job(stored)) == logs
    group = template(config, INPUTS)["Resources"]["Log"]["Properties"]
    assert group["LogGroupName"] == "/trainfleet/cloudy" and group["RetentionInDays"] == LOG_DAYS


def test_what_is_paid_by_what_is_stored_is_weighed_for_people(
    account: Account, tmp_path: Path
) -> None:
    fleet = FleetStack(config_of(tmp_path))
    fleet.make(frozenset(), lambda *row: None, lambda text: None)
    own = {thing.kind: thing for thing in account.ours() if thing.kind in ("bucket", "log-group")}
    own["bucket"].more |= {"objects": {"runs/a": 1}, "size": 730 * 2**30}
    account.add(
        "repository",
        "trainfleet",
        {},
        own_tags("alice"),
        images={"sha256:1": {"cloudy.cpu-1", "alice.cpu-1"}},
    )
    own["log-group"].more["bytes"] = 2**30
    found = {one.kind: one for one in weighed(fleet.calls, fleet.left())}
    assert "$0.55 a day" in found["bucket"].line() and "730.0 GiB" in found["bucket"].line()
    assert (
        found["image"].what == "1.0 GiB, shared with 1 other config"
        and found["log group"].what == "1.0 GiB"
    )
    assert None not in [one.usd for one in found.values()]
    del own["bucket"].more["size"]  # CloudWatch tells of a new bucket on the next day
    assert [one.usd for one in weighed(fleet.calls, fleet.left()) if one.kind == "bucket"] == [None]
    account.denied |= {"cloudwatch:GetMetricStatistics"}
    assert [one.usd for one in weighed(fleet.calls, found.values()) if one.kind == "bucket"] == [
        found["bucket"].usd
    ]


def test_an_image_that_its_maker_has_deprecated_since_is_found_all_the_same(
    account: Account, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    by_name = replace(config, fleet=replace(config.fleet, platform="cuda"))
    account.deprecated = set(AMIS)
    assert discovery.image_of(by_name, Calls(account.region)).startswith("ami-")
