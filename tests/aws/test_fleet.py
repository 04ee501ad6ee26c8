"""Machines from nothing and back to nothing, in a pretended account: what is made, what fails, what stays, what is left alone."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from aws.account import Account
from aws.amis import UBUNTU
from aws.world import config_of, strangers
from trainfleet.cloud.stack_nodes import FleetStack, next_slots
from trainfleet.config import Config
from trainfleet.trust.errors import CloudError


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(tmp_path)


def make(config: Config, bad: set[str] = frozenset()) -> tuple[FleetStack, list[str]]:  # type: ignore[assignment]
    """The fleet once it is made, and what was said on the way."""
    fleet, said = FleetStack(config), list[str]()
    fleet.make(bad, lambda *row: said.append(" ".join(row)), said.append)
    fleet.await_nodes()
    return fleet, said


def ids(fleet: FleetStack) -> list[str]:
    return [node.id for node in fleet.nodes()]


def ours(account: Account) -> dict[str, str]:
    """What is left of ours, tagged or not: all but what the strangers have."""
    before = Account()
    known = strangers(before)
    return {thing.id: thing.kind for thing in account.living() if thing.id not in known}


def untouched(account: Account) -> bool:
    before = Account()
    known = strangers(before)
    return all((there := account.things.get(id)) is not None and (there.state, there.tags, there.properties) == (thing.state, thing.tags, thing.properties)
               for id, thing in known.items())  # fmt: skip


def test_a_fleet_is_made_found_and_taken_down_and_what_others_have_stays(
    account: Account, config: Config
) -> None:
    fleet, said = make(config)
    assert [node.slot for node in fleet.nodes()] == [0, 1] and fleet.head() and fleet.mount()
    assert any(line.startswith("Node1 made EC2 Instance i-") for line in said)
    order = [line.split()[0] for line in said if " made " in line]
    assert order.index("FileSystem") < order.index("Node0"), "what costs most is paid for last"
    assert not any("CloudFormation Stack" in line for line in said), (
        "the stack's own events are no resource's"
    )
    found = fleet.left()
    assert {one.id for one in found} - {"trainfleet-cloudy"} == {
        id
        for id, kind in ours(account).items()
        if not account.things[id].more.get("RequesterManaged")
    }
    fleet.remove(False, said.append)
    assert fleet.left() == [] and ours(account) == {} and untouched(account)


def test_a_fleet_that_is_as_it_should_be_stays_as_it_is(account: Account, config: Config) -> None:
    fleet, _ = make(config)
    before = ids(fleet)
    _, said = make(config)
    assert ids(fleet) == before and "the stack trainfleet-cloudy is up to date" in said
    assert fleet.foresee(()).requests == []


def test_another_number_of_nodes_leaves_the_others_alone(account: Account, tmp_path: Path) -> None:
    fleet, _ = make(config_of(tmp_path, nodes=4))
    four = ids(fleet)
    account.amis[UBUNTU] = "ami-0fedcba9876543210"  # another image, as after a change of the lock
    fleet, said = make(config_of(tmp_path, nodes=2))
    assert ids(fleet) == four[:2]
    assert not [line for line in said if line.startswith(("Vpc", "FileSystem", "Template"))]
    fleet, _ = make(config_of(tmp_path, nodes=3))
    assert ids(fleet)[:2] == four[:2] and ids(fleet)[2] not in four


def test_a_bad_node_is_replaced_alone_and_so_is_one_that_is_gone(
    account: Account, tmp_path: Path
) -> None:
    fleet, _ = make(config := config_of(tmp_path, nodes=3))
    three = ids(fleet)
    make(config, {three[1]})
    assert (
        (three[0], three[2]) == tuple(ids(fleet)[:2])
        and three[1] not in ids(fleet)
        and len(ids(fleet)) == 3
    )
    now = ids(fleet)
    from aws.compute import terminate

    terminate(account, now[0])
    account.sleep(100)
    make(config)
    assert ids(fleet)[:2] == now[1:] and len(ids(fleet)) == 3


def test_in_a_reservation_a_node_goes_before_another_comes(
    account: Account, tmp_path: Path
) -> None:
    account.capacity["us-east-1a", "c7i.8xlarge"] = (
        3 + 1
    )  # two strangers' and the head's are elsewhere
    aws = {
        "capacity": "reservation",
        "reservation": "cr-0123456789abcdef0",
        "bastion_type": None,
        "allow_ssh_from": [],
        "zones": ["us-east-1a"],
    }
    room = {
        "InstanceType": "c7i.8xlarge",
        "AvailabilityZone": "us-east-1a",
        "AvailableInstanceCount": 3,
    }
    account.add(
        "capacity-reservation", "cr-0123456789abcdef0", room, {"team": "ours"}
    ).state = "active"
    fleet, _ = make(config := config_of(tmp_path, nodes=3, aws=aws))
    first = ids(fleet)
    make(config, {first[0]})
    assert ids(fleet)[:2] == first[1:] and len(ids(fleet)) == 3


def test_what_was_stopped_is_started_again(account: Account, config: Config) -> None:
    fleet, _ = make(config)
    before = ids(fleet)
    account.things[before[1]].state = "stopped"
    _, said = make(config)
    assert ids(fleet) == before and any("starting" in line for line in said)


def test_without_room_the_next_zone_is_tried_and_nothing_of_the_first_is_left(
    account: Account, config: Config
) -> None:
    account.capacity["us-east-1a", "c7i.8xlarge"] = 2  # another's and the head
    fleet, said = make(config)
    assert {node.zone for node in fleet.nodes()} == {"us-east-1b"}
    assert any(
        "AWS has no capacity for this instance type now: We currently do not have sufficient c7i.8xlarge"
        in line
        and "next zone" in line
        for line in said
    )
    assert len(account.stacks) == 2 and sum(kind == "vpc" for kind in ours(account).values()) == 1


def test_without_room_anywhere_that_is_said_and_nothing_is_left(
    account: Account, config: Config
) -> None:
    account.capacity |= {(zone, "c7i.8xlarge"): 1 for zone in account.zones}
    with pytest.raises(CloudError, match="could not be made in us-east-1c") as told:
        make(config)
    assert told.value.code == "InsufficientCapacity" and "fleet.aws.zones" in told.value.next
    assert ours(account) == {} and untouched(account)


def test_more_nodes_than_there_is_room_for_leaves_those_that_are_there(
    account: Account, tmp_path: Path
) -> None:
    fleet, _ = make(config_of(tmp_path))
    before = ids(fleet)
    account.capacity["us-east-1a", "c7i.8xlarge"] = 4
    with pytest.raises(CloudError, match="its nodes are unchanged"):
        make(config_of(tmp_path, nodes=4))
    account.sleep(100)
    assert ids(fleet) == before and fleet.stack.look().status == "UPDATE_ROLLBACK_COMPLETE"  # type: ignore[union-attr]
    account.capacity.clear()
    assert ids(make(config_of(tmp_path, nodes=3))[0])[:2] == before


REASONS = {
    "You have requested more vCPU capacity than your current vCPU limit of 0 allows": "vCPU quota",
    "User: arn:aws:iam::1:user/x is not authorized to perform: iam:CreateRole on resource: role": "may not create it",
    "The maximum number of VPCs has been reached.": "its limit of VPCs",
    "The security token included in the request is expired": "expired during the set-up",
    "something that nobody foresaw": "something that nobody foresaw",
}


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize(
    "type_", ["AWS::FSx::FileSystem", "AWS::EC2::VPC", "AWS::IAM::Role", "Node1"]
)
def test_what_fails_is_told_in_plain_words_and_leaves_nothing(
    account: Account, config: Config, reason: str, type_: str
) -> None:
    account.faults[type_] = (
        f'Resource handler returned message: "{reason} (Service: Ec2, Status Code: 400, Request ID: 5)" (RequestToken: 7, HandlerErrorCode: X)'
    )
    with pytest.raises(CloudError) as told:
        make(config)
    assert (
        REASONS[reason] in told.value.why
        and reason.rstrip(".") in told.value.why
        and "RequestToken" not in told.value.why
    )
    account.sleep(1000)
    assert ours(account) == {} and untouched(account)


@pytest.mark.parametrize("type_", ["AWS::EC2::SecurityGroup", "AWS::EC2::VPC", "AWS::EC2::Subnet", "AWS::IAM::Role", "AWS::EC2::PlacementGroup",
                                   "AWS::EC2::InternetGateway", "AWS::EC2::LaunchTemplate", "AWS::Logs::LogGroup", "AWS::EC2::NatGateway", "AWS::EC2::EIP",
                                   "AWS::IAM::InstanceProfile", "AWS::EC2::RouteTable", "AWS::EC2::VPCEndpoint", "AWS::EC2::Instance"])  # fmt: skip
@pytest.mark.parametrize("times", [1, 100])
def test_what_a_stack_can_t_delete_is_removed_piece_by_piece(
    account: Account, config: Config, type_: str, times: int
) -> None:
    fleet, said = make(config)
    account.stuck[type_] = times
    fleet.remove(True, said.append)
    assert fleet.left() == [] and ours(account) == {} and untouched(account)


def test_what_holds_data_stays_and_is_listed_until_it_is_purged(
    account: Account, config: Config
) -> None:
    fleet, said = make(config)
    next(account.of("bucket"))
    bucket = next(thing for thing in account.of("bucket") if "cloudy" in thing.id)
    bucket.more["objects"] = {f"data/{number}": 100 for number in range(1500)}
    disk = next(thing for thing in account.of("file-system") if thing.made_by)
    disk.more["written"] = 1e9
    stay = fleet.remove(False, said.append)
    kinds = set(ours(account).values())
    assert {bucket.id, disk.id} <= stay and {
        "instance",
        "nat-gateway",
        "address",
        "volume",
    }.isdisjoint(kinds)
    assert {one.id for one in fleet.left()} <= stay and fleet.remove(False, said.append) == stay
    again, _ = make(config)
    assert len(ids(again)) == 2 and disk.id in account.things and bucket.more["objects"]
    fleet.remove(True, said.append)
    assert fleet.left() == [] and ours(account) == {} and untouched(account)


def test_a_stranger_in_our_network_is_left_alone_and_named(
    account: Account, config: Config
) -> None:
    from trainfleet.cloud.inventory import strangers as named

    fleet, said = make(config)
    subnet = next(thing for thing in account.of("subnet") if thing.made_by)
    account.add(
        "network-interface",
        "eni-0f0e1a2b3c4d5e6f7",
        {
            "SubnetId": subnet.id,
            "VpcId": subnet.properties["VpcId"],
            "Description": "their database",
        },
        {},
    )
    fleet.remove(True, said.append)
    left = fleet.left()
    assert {one.kind for one in left} == {
        "stack",
        "subnet",
        "VPC",
    } and "eni-0f0e1a2b3c4d5e6f7" in account.things
    assert [
        "eni-0f0e1a2b3c4d5e6f7" in line and "their database" in line
        for line in named(fleet.calls, left)
    ] == [True]
    del account.things["eni-0f0e1a2b3c4d5e6f7"]
    fleet.remove(True, said.append)
    assert fleet.left() == [] and ours(account) == {}


def test_a_stack_of_that_name_that_is_not_ours_is_never_touched(
    account: Account, config: Config
) -> None:
    make(config)
    stack = next(iter(account.stacks.values()))
    stack.tags = {"team": "theirs"}
    before = len(account.living())
    for act in (lambda: make(config), lambda: FleetStack(config).remove(True, print)):
        with pytest.raises(CloudError, match="this config did not make it"):
            act()
    assert len(account.living()) == before or stack.status == "CREATE_COMPLETE"


def test_what_is_new_and_not_seen_yet_is_made_and_removed_all_the_same(
    account: Account, config: Config
) -> None:
    account.lag = 8.0
    fleet, said = make(config)
    fleet.remove(False, said.append)
    account.sleep(20)
    assert fleet.left() == [] and ours(account) == {} and untouched(account)


def test_throttling_delays_and_breaks_nothing(account: Account, config: Config) -> None:
    """While the stack is followed: before that, botocore itself asks again."""
    looks, throttled = {"DescribeStackEvents", "DescribeStacks"}, list[int]()

    def throttle(number: int) -> bool:
        followed = any(
            operation == "CreateStack" for _, operation, _ in account.calls[: number - 2]
        )
        if followed and number % 3 == 0 and account.calls[number][1] in looks:
            throttled.append(number)
            return True
        return False

    account.throttled = throttle
    fleet, _ = make(config)
    assert len(ids(fleet)) == 2 and len(throttled) > 5


def test_credentials_that_expire_on_the_way_are_said_and_the_same_again_goes_on(
    account: Account, config: Config
) -> None:
    def expire_while_the_stack_is_made(number: int) -> bool:
        if account.calls[number][1] == "CreateStack":
            account.expires_at = number + 2
        return False

    account.throttled = expire_while_the_stack_is_made
    with pytest.raises(CloudError, match="your credentials have expired"):
        make(config)
    account.throttled, account.expires_at = lambda _: False, None
    fleet, said = make(config)
    assert (
        any("another command began it; following its progress" in line for line in said)
        and len(ids(fleet)) == 2
        and len(account.stacks) == 1
    )


@pytest.mark.parametrize(
    "action",
    [
        "cloudformation:CreateStack",
        "ssm:GetParameter",
        "ec2:DescribeInstanceTypeOfferings",
        "sts:GetCallerIdentity",
    ],
)
def test_a_denied_action_is_named_and_nothing_is_made(
    account: Account, config: Config, action: str
) -> None:
    account.denied.add(action)
    with pytest.raises(CloudError, match=f"your credentials may not do {action}"):
        make(config)
    assert ours(account) == {}


def test_no_credentials_are_one_message(account: Account, config: Config) -> None:
    account.no_credentials = True
    with pytest.raises(CloudError, match="no AWS credentials were found"):
        make(config)


def test_slots_that_stay_stay_and_new_ones_come_behind_all() -> None:
    assert next_slots((), (), 2) == (0, 1)
    assert next_slots((0, 1, 2), (0, 2), 3) == (0, 2, 3)
    assert next_slots((0, 1, 2, 3), (0, 1, 2, 3), 2) == (0, 1)
    assert next_slots((0, 2), (0,), 2) == (0, 3)
    assert next_slots((4,), (), 1) == (5,)


def test_the_requests_are_those_that_aws_was_sent(account: Account, config: Config) -> None:
    planned = FleetStack(config).foresee(()).requests
    make(config)
    sent = [request for service, operation, request in account.calls if operation == "CreateStack"]
    assert [row[1] for row in planned] == ["CreateStack"] and len(sent) == 1
    assert {key: value for key, value in planned[0][2].items() if key not in ("ClientRequestToken", "Tags", "TemplateBody")} == {
        key: value for key, value in sent[0].items() if key not in ("ClientRequestToken", "Tags", "TemplateBody")}  # fmt: skip
    assert (
        json.loads(planned[0][2]["TemplateBody"])["Resources"].keys()
        == json.loads(sent[0]["TemplateBody"])["Resources"].keys()
    )


def test_too_small_a_quota_is_told_before_anything_is_made(
    account: Account, config: Config
) -> None:
    account.quotas["L-1216C47A"] = 64.0
    with pytest.raises(
        CloudError,
        match=r"2 x c7i.8xlarge need 64 vCPUs, but your quota 'Running On-Demand Standard .* is 64, and other instances use 32",
    ):
        make(config)
    assert ours(account) == {}, "nothing was begun"


def test_a_bucket_that_was_kept_is_used_again(account: Account, config: Config) -> None:
    fleet, _ = make(config)
    name = next(thing.id for thing in account.living() if thing.kind == "bucket" and thing.made_by)
    account.things[name].more["objects"] = {"runs/x": 5}
    account.stacks.clear()  # somebody has deleted the stack in the console, which kept the bucket
    for thing in list(account.things.values()):
        if thing.made_by and thing.id != name:
            del account.things[thing.id]
    fleet, _ = make(config)
    assert "Bucket" not in fleet.stack.resources() and account.things[name].more["objects"] == {
        "runs/x": 5
    }


def test_the_end_of_a_capacity_block_is_known(account: Account, tmp_path: Path) -> None:
    aws = {
        "capacity": "block",
        "reservation": "cr-0123456789abcdef0",
        "bastion_type": None,
        "allow_ssh_from": [],
    }
    end = datetime.datetime(2026, 11, 23, 11, 30, tzinfo=datetime.UTC)
    account.add(
        "capacity-reservation",
        "cr-0123456789abcdef0",
        {"EndDate": end, "InstanceType": "p5.48xlarge"},
        {},
    )
    blocked = config_of(tmp_path, instance_type="p5.48xlarge", aws=aws)
    assert FleetStack(blocked).ends() == end.timestamp() - 1800
    assert FleetStack(config_of(tmp_path)).ends() is None


def test_nodes_are_made_where_their_reservation_is(account: Account, tmp_path: Path) -> None:
    room = {"InstanceType": "c7i.8xlarge", "AvailabilityZone": "us-east-1c", "AvailableInstanceCount": 2,
            "PlacementGroupArn": "arn:aws:ec2:us-east-1:111122223333:placement-group/close"}  # fmt: skip
    account.add(
        "capacity-reservation", "cr-0123456789abcdef0", room, {"team": "ours"}
    ).state = "active"
    words = {"capacity": "reservation", "reservation": "cr-0123456789abcdef0"}
    fleet, _ = make(config_of(tmp_path, aws=words))
    assert {node.zone for node in fleet.nodes()} == {"us-east-1c"}
    data = fleet.stack.template()["Resources"]["Template"]["Properties"]["LaunchTemplateData"]
    assert data["Placement"] == {"GroupName": "close"}
