"""What a user may have wrong with his account or his config: one message, with what to type, and nothing is made or lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import UnauthorizedSSOTokenError

from aws.account import Account
from aws.amis import AMIS
from aws.crashes import World
from aws.fleets import INPUTS, RESERVATION, SUBNET, VPC, fleet
from trainfleet.cloud.calls import NotAws
from trainfleet.cloud.permissions import needed

ELSEWHERE = {
    "vpc": VPC,
    "subnets": [SUBNET],
    "bastion_type": None,
    "capacity": "reservation",
    "reservation": RESERVATION,
}


def no_credentials(account: Account) -> None:
    account.no_credentials = True


def expired(account: Account) -> None:
    account.expires_at = 0


def raises(account: Account, error: Exception) -> None:
    """Every request ends so, before any service of AWS has seen it."""

    def respond(*_: Any) -> Any:
        raise error

    account.respond = respond  # type: ignore[method-assign]


def signed_out(account: Account) -> None:
    raises(account, UnauthorizedSSOTokenError())


def proxied(account: Account) -> None:
    raises(account, NotAws("DescribeStacks was answered with a page"))


def imageless(account: Account) -> None:
    account.lacks_images = set(AMIS)


def denied(account: Account) -> None:
    account.denied.add("ec2:CreatePlacementGroup")


def not_offered(account: Account) -> None:
    account.offered = {zone: {"p5.48xlarge"} for zone in account.zones}


def no_quota(account: Account) -> None:
    account.quotas["L-1216C47A"] = 0.0


def reserved_elsewhere(account: Account) -> None:
    room = {
        "InstanceType": "c7i.8xlarge",
        "AvailabilityZone": "us-east-1c",
        "AvailableInstanceCount": 2,
    }
    account.add("capacity-reservation", RESERVATION, room, {}).state = "active"
    account.add("vpc", VPC, {"CidrBlock": "10.0.0.0/16"}, {})
    account.add(
        "subnet",
        SUBNET,
        {"CidrBlock": "10.0.0.0/20", "VpcId": VPC, "AvailabilityZone": "us-east-1b"},
        {},
    )


BAD: dict[str, tuple[Callable[[Account], None], dict[str, Any], str, str]] = {
    "no credentials": (
        no_credentials,
        {},
        "no AWS credentials were found",
        "set AWS_PROFILE",
    ),
    "an expired single sign-on": (signed_out, {}, "your credentials have expired", "aws sso login"),
    "a proxy's page": (proxied, {}, "the answer did not come from AWS", "check HTTPS_PROXY"),
    "a region without the image": (
        imageless,
        {},
        "us-east-1 does not have the image of platform",
        "or another region",
    ),
    "expired ones": (expired, {}, "your credentials have expired", "aws sso login"),
    "one action denied": (
        denied,
        {},
        "your credentials may not do ec2:CreatePlacementGroup",
        "allow these actions",
    ),
    "a region without the type": (
        not_offered,
        {},
        "us-east-1 does not offer c7i.8xlarge",
        "another fleet.aws.region",
    ),
    "quota 0": (
        no_quota,
        {},
        "your quota 'Running On-Demand Standard",
        "aws service-quotas request-service-quota-increase",
    ),
    "a subnet in another zone": (
        reserved_elsewhere,
        {"aws": ELSEWHERE},
        "no subnet is in us-east-1c: subnet-",
        "a subnet in that zone",
    ),
    "no such FSx size": (
        lambda account: None,
        {"fsx": {"size_gib": 3600}},
        "fleet.fsx.size_gib: 3600",
        "set 4800",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_each_is_one_message_and_nothing_is_made(name: str) -> None:
    prepare, changes, what, next = BAD[name]
    world = World(prepare, **changes)
    code, told = world.type("setup")
    assert code not in (0, None) and what in told and next in told, told
    assert told.count("error:") == 1 and "Traceback" not in told, told
    made = [
        row for row in world.account.calls if row[1].startswith(("Create", "Run", "Put", "Delete"))
    ]
    assert not made and world.untouched


ENTERED = fleet("c7i.8xlarge", bastion_type="c7i.8xlarge", allow_ssh_from=("198.51.100.0/24",))
ACTIONS = sorted({name for names, _ in needed(ENTERED, INPUTS) for name in names})
EACH = [
    pytest.param(name, marks=[] if number % 20 == 0 else [pytest.mark.thorough])
    for number, name in enumerate(ACTIONS)
]


@pytest.mark.parametrize("action", EACH)
def test_each_action_of_the_policy_that_is_denied_is_named_and_nothing_is_made(action: str) -> None:
    world = World(lambda account: account.denied.add(action))
    code, told = world.type("setup")
    assert code == 1 and f"your credentials may not do {action}" in " ".join(told.split()), told
    assert told.count("error:") == 1 and "Traceback" not in told
    assert (
        not [
            row
            for row in world.account.calls
            if row[1].startswith(("Create", "Run", "Put", "Delete"))
        ]
        and world.untouched
    )


def test_a_name_of_a_foreign_stack_is_one_message_and_the_stack_stays() -> None:
    world = World()
    assert world.type("setup")[0] == 0
    stack = next(iter(world.account.stacks.values()))
    for thing in (stack, *(world.account.things[id] for id in world.ours)):
        thing.tags = {"team": "theirs"}
    before = world.ours
    for verb in ("setup", "clean"):
        code, told = world.type(verb)
        assert (
            code not in (0, None)
            and told.count("error:") == 1
            and "this config did not make it" in told
        ), told
        assert stack.status == "CREATE_COMPLETE" and world.ours == before
