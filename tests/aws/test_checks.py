"""What is looked at before anything is made: each lack is told once, with the command that mends it, and nothing is asked in vain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from botocore.exceptions import ClientError

from aws.fleets import INPUTS, RESERVATION, SUBNET, VPC, fleet
from trainfleet.cloud import calls, checks, prices, spending
from trainfleet.cloud.calls import Calls
from trainfleet.cloud.permissions import needed
from trainfleet.cloud.template_inputs import Inputs
from trainfleet.config import Config
from trainfleet.plan.estimate import Bill
from trainfleet.trust.errors import CloudError

TWO = 2 * 192  # vCPUs of two p5.48xlarge
Answers = dict[str, Any]


def refused(code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "not authorized"}}, "X")


def quota(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "Quota": {"Value": {"L-F678F1CE": 5.0, "L-0263D0A3": 5.0}.get(request["QuotaCode"], 1000.0)}
    }


def allow(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "EvaluationResults": [
            {"EvalActionName": name, "EvalDecision": "allowed"} for name in request["ActionNames"]
        ]
    }


def running(kind: str, **words: Any) -> dict[str, Any]:
    row = {"InstanceType": kind, "State": {"Name": "running"}, **words}
    return {"Reservations": [{"Instances": [row]}]}


GOOD: Answers = {
    "GetCallerIdentity": {"Arn": "arn:aws:sts::123456789012:assumed-role/Builder/me"},
    "SimulatePrincipalPolicy": allow,
    "ListRoles": {
        "Roles": [
            {"Path": f"/aws-service-role/{service}/"}
            for service in ("fsx.amazonaws.com", "spot.amazonaws.com")
        ]
    },
    "GetServiceQuota": quota,
    "DescribeInstances": {"Reservations": []},
    "DescribeVpcs": {"Vpcs": [{"VpcId": "vpc-1"}]},
    "DescribeAddresses": {"Addresses": []},
    "DescribeRouteTables": {"RouteTables": []},
    "DescribeKeyPairs": {"KeyPairs": [{"KeyName": "mine"}]},
    "GetEbsDefaultKmsKeyId": {"KmsKeyId": "alias/aws/ebs"},
    "DescribeFileSystems": {"FileSystems": []},
    "ListServiceQuotas": {
        "Quotas": [
            {
                "QuotaName": "Lustre Scratch storage capacity",
                "QuotaCode": "L-ABC",
                "Value": 100800.0,
            }
        ]
    },
    "HeadBucket": {"BucketRegion": "us-east-1"},
    "GetEbsEncryptionByDefault": {"EbsEncryptionByDefault": False},
}


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, dict[str, Any]]]]:
    """An account that answers as GOOD, but for what is named; the requests that it was sent."""

    def build(**other: Any) -> list[tuple[str, dict[str, Any]]]:
        sent: list[tuple[str, dict[str, Any]]] = []

        def send(
            region: str, service: str, operation: str, request: dict[str, Any]
        ) -> dict[str, Any]:
            sent.append((operation, dict(request)))
            answer = (GOOD | other)[operation]
            answer = answer(request) if callable(answer) else answer
            if isinstance(answer, Exception):
                raise answer
            return answer  # type: ignore[no-any-return]

        monkeypatch.setattr(calls, "send", send)
        monkeypatch.setattr(checks, "PROGRAMS", ())
        return sent

    return build


def told(config: Config, inputs: Inputs = INPUTS) -> str:
    return "\n".join(map(str, checks.findings(config, Calls(inputs.region), inputs)))


def test_a_good_account_has_nothing_against_a_fleet(account: Any) -> None:
    sent = account()
    checks.require(fleet(), Calls("us-east-1"), INPUTS)
    simulated = [request for operation, request in sent if operation == "SimulatePrincipalPolicy"]
    assert {request["PolicySourceArn"] for request in simulated} == {
        "arn:aws:iam::123456789012:role/Builder"
    }
    own_role = 1  # of a file system, for S3: AWS makes one for each
    asked = sum(len(request["ActionNames"]) for request in simulated)
    assert asked == sum(len(names) for names, _ in needed(fleet(), INPUTS)) + own_role
    assert not {
        operation
        for operation, _ in sent
        if operation.startswith(("Create", "Delete", "Put", "Run"))
    }


def test_every_action_that_is_missing_is_named(account: Any) -> None:
    def deny(request: dict[str, Any]) -> dict[str, Any]:
        bad = ("ec2:CreatePlacementGroup", "iam:PassRole")
        return {"EvaluationResults": [{"EvalActionName": name, "EvalDecision": "implicitDeny" if name in bad else "allowed"}
                                      for name in request["ActionNames"]]}  # fmt: skip

    account(SimulatePrincipalPolicy=deny)
    with pytest.raises(CloudError, match="the fleet can't be made with this config") as caught:
        checks.require(fleet(), Calls("us-east-1"), INPUTS)
    assert "your credentials may not do ec2:CreatePlacementGroup, iam:PassRole" in str(caught.value)


@pytest.mark.parametrize(
    "operation",
    ["SimulatePrincipalPolicy", "GetServiceQuota", "ListServiceQuotas", "DescribeFileSystems"],
)
def test_what_may_not_be_looked_at_keeps_nobody_from_trying(operation: str, account: Any) -> None:
    account(**{operation: refused("AccessDenied")})
    checks.require(fleet(), Calls("us-east-1"), INPUTS)
    assert "not checked" in told(fleet())


def test_credentials_that_have_expired_end_it_at_once(account: Any) -> None:
    account(GetCallerIdentity=refused("ExpiredToken"))
    with pytest.raises(CloudError, match="expired"):
        checks.require(fleet(), Calls("us-east-1"), INPUTS)


def test_too_small_a_quota_comes_with_the_command_that_asks_for_more(account: Any) -> None:
    account(
        GetServiceQuota=lambda request: {
            "Quota": {"Value": 0.0 if request["QuotaCode"] == "L-417A185B" else 5.0}
        }
    )
    assert (
        f"2 x p5.48xlarge need {TWO} vCPUs, but your quota 'Running On-Demand P instances' is 0"
        in told(fleet())
    )
    assert (
        f"--service-code ec2 --quota-code L-417A185B --desired-value {TWO} --region us-east-1"
        in told(fleet())
    )


def test_a_quota_counts_what_others_run_and_not_our_own(account: Any) -> None:
    limit = {"Quota": {"Value": TWO + 100.0}}
    account(GetServiceQuota=lambda _: limit, DescribeInstances=running("p4d.24xlarge"))
    assert told(fleet()) == ""
    account(
        GetServiceQuota=lambda _: {"Quota": {"Value": TWO + 95.0}},
        DescribeInstances=running("p4d.24xlarge"),
    )
    assert "other instances use 96" in told(fleet())
    own = [
        {"Key": "trainfleet:config", "Value": fleet().name},
        {"Key": "trainfleet:project", "Value": "trainfleet"},
    ]
    account(
        GetServiceQuota=lambda _: {"Quota": {"Value": float(TWO)}},
        DescribeInstances=running("p5.48xlarge", Tags=own),
    )
    assert told(fleet()) == ""
    spot = running("p4d.24xlarge", InstanceLifecycle="spot")
    account(GetServiceQuota=lambda _: {"Quota": {"Value": float(TWO)}}, DescribeInstances=spot)
    assert told(fleet()) == "", "a spot instance counts against another quota"


def test_the_builder_of_the_environment_counts_against_its_own_quota(account: Any) -> None:
    def quota(request: dict[str, Any]) -> dict[str, Any]:
        return {"Quota": {"Value": 3.0 if request["QuotaCode"] == "L-1216C47A" else 1000.0}}

    account(GetServiceQuota=quota)
    config = fleet()
    lacks = "1 x c7i.xlarge need 4 vCPUs, but your quota 'Running On-Demand Standard"
    assert lacks in told(config)
    built = replace(config, fleet=replace(config.fleet, python="/usr/bin/python3"))
    assert told(built) == "", "no environment is built"
    account(GetServiceQuota=quota, DescribeInstances=running("p5.48xlarge"))
    assert lacks not in told(config), "a fleet that has nodes has its environment"


def test_a_quota_that_the_account_never_asked_for_is_the_default(account: Any) -> None:
    account(
        GetServiceQuota=refused("NoSuchResourceException"),
        GetAWSDefaultServiceQuota={"Quota": {"Value": 10.0}},
    )
    assert "is 10" in told(fleet())


def test_room_for_a_network_and_a_file_system(account: Any) -> None:
    account(DescribeVpcs={"Vpcs": [{"VpcId": str(number)} for number in range(5)]})
    assert "the fleet needs 1 more 'VPCs per Region'; you use 5 of 5" in told(fleet())
    account(DescribeAddresses={"Addresses": [{}] * 5})
    assert "'EC2-VPC Elastic IPs'; you use 5 of 5" in told(fleet())
    there = {"StorageCapacity": 100800, "LustreConfiguration": {"DeploymentType": "SCRATCH_2"}}
    account(DescribeFileSystems={"FileSystems": [there]})
    assert (
        "fleet.fsx.size_gib 1,200: your quota 'Lustre Scratch storage capacity' is 100,800, 100,800 is in use"
        in told(fleet())
    )


BLOCK = {"InstanceType": "p5.48xlarge", "AvailabilityZone": "us-east-1b", "State": "active", "AvailableInstanceCount": 2,
         "ReservationType": "capacity-block", "CapacityReservationId": RESERVATION}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        (
            {"ReservationType": "default"},
            "is not a capacity block\n    next: set fleet.aws.capacity: reservation",
        ),
        ({"InstanceType": "p4d.24xlarge"}, "reserves p4d.24xlarge, not p5.48xlarge"),
        (
            {"AvailabilityZone": "us-east-1c"},
            "is in us-east-1c, but the nodes would be in us-east-1b",
        ),
        ({"State": "scheduled", "StartDate": "2026-12-01"}, "is scheduled; it begins 2026-12-01"),
        (
            {"AvailableInstanceCount": 1},
            "has room for 1 nodes, but the config asks for 2\n    next: NODES=1",
        ),
    ],
)
def test_a_reservation_is_of_the_type_the_zone_and_the_size(
    change: dict[str, Any], said: str, account: Any
) -> None:
    account(DescribeCapacityReservations={"CapacityReservations": [BLOCK | change]})
    found = told(fleet(capacity="block"))
    assert said in found and bool(said) == bool(found)


def test_a_reservation_that_is_not_there(account: Any) -> None:
    account(DescribeCapacityReservations=refused("InvalidCapacityReservationId.NotFound"))
    assert f"{RESERVATION} does not exist in us-east-1" in told(fleet(capacity="block"))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("p4d.24xlarge", {"AvailableIpAddressCount": 10}, ""),
        (
            "p4d.24xlarge",
            {"AvailableIpAddressCount": 9},
            "9 free addresses: too few for 2 nodes with 4 addresses each and 2 for the file",
        ),
        ("p5.48xlarge", {"AvailableIpAddressCount": 4}, ""),  # its EFA interfaces take none
        ("p5.48xlarge", {"AvailabilityZone": "us-east-1a"}, "is in us-east-1a, not in us-east-1b"),
        ("p5.48xlarge", {"VpcId": "vpc-1"}, "is in vpc-1, not in fleet.aws.vpc"),
    ],
)
def test_a_subnet_has_room_for_every_interface(
    name: str, change: dict[str, Any], said: str, account: Any
) -> None:
    row = {
        "SubnetId": SUBNET,
        "VpcId": VPC,
        "AvailabilityZone": "us-east-1b",
        "AvailableIpAddressCount": 1000,
    } | change
    tables = {"RouteTables": [{"Associations": [MAIN], "Routes": [INTERNET]}]}
    account(DescribeSubnets={"Subnets": [row]}, DescribeRouteTables=tables)
    found = told(fleet(name, vpc=VPC, subnets=(SUBNET,)), replace(INPUTS, subnet=SUBNET))
    assert said in found and bool(said) == bool(found)


def test_what_reaching_the_nodes_needs_here_is_looked_at_before_anything_is_made(
    account: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = account()
    named, own = fleet(key_pair="mine"), fleet()
    for key, what, then in (
        (
            None,
            "null, and ~/.ssh has no public key; nobody could log in",
            "ssh-keygen -t ed25519 -f ~/.ssh/id_ed25519",
        ),
        (
            "~/.ssh/no-such",
            "~/.ssh/no-such.pub can't be read",
            "ssh-keygen -t ed25519 -f ~/.ssh/no-such",
        ),
        (__file__, ".pub can't be read", f"ssh-keygen -y -f {__file__} > {__file__}.pub"),
    ):
        found = told(
            replace(own, fleet=replace(own.fleet, ssh=replace(own.fleet.ssh, key=key))),
            replace(INPUTS, public_key=""),
        )
        assert what in found and f"next: {then}; or set fleet.aws.key_pair" in found
    assert (
        told(named, replace(INPUTS, public_key="")) == ""
        and ("DescribeKeyPairs", {"KeyNames": ["mine"]}) in sent
    )
    account(DescribeKeyPairs=refused("InvalidKeyPair.NotFound"))
    assert "fleet.aws.key_pair: us-east-1 has no key pair mine" in told(named)
    monkeypatch.setattr(checks, "PROGRAMS", ("no-such-program",))
    assert "SSH through SSM needs no-such-program, which is not installed here" in told(fleet())
    assert "no-such-program" not in told(fleet(allow_ssh_from=("203.0.113.7/32",))), (
        "no SSM, no plug-in"
    )


OWN_KEY = "arn:aws:kms:us-east-1:123456789012:key/0123abcd"


@pytest.mark.parametrize(
    ("answers", "said", "blocks"),
    [
        ({"GetEbsDefaultKmsKeyId": {"KmsKeyId": "alias/aws/ebs"}}, "", False),
        (
            {},
            f"the account encrypts disks with {OWN_KEY}; instances end at once unless its policy lets",
            False,
        ),
        (
            {"DescribeKey": {"KeyMetadata": {"KeyState": "Disabled"}}},
            "default key of EBS: the key is Disabled",
            True,
        ),
        (
            {"DescribeKey": refused("NotFoundException")},
            "default key of EBS: it does not exist",
            True,
        ),
        ({"GetEbsEncryptionByDefault": refused("UnauthorizedOperation")}, "not checked", False),
    ],
)
def test_the_account_s_own_key_of_disks_is_told(
    answers: dict[str, Any], said: str, blocks: bool, account: Any
) -> None:
    on = {"GetEbsEncryptionByDefault": {"EbsEncryptionByDefault": True}, "GetEbsDefaultKmsKeyId": {"KmsKeyId": OWN_KEY},
          "DescribeKey": {"KeyMetadata": {"KeyState": "Enabled"}}}  # fmt: skip
    account(**on | answers)
    found = checks.findings(fleet(), Calls("us-east-1"), INPUTS)
    assert (
        said in "\n".join(map(str, found))
        and any(one.blocks for one in found) == blocks
        and bool(said) == bool(found)
    )


def rule(**words: Any) -> dict[str, Any]:
    return {"SecurityGroups": [{"GroupId": "sg-1", "IpPermissions": [words]}]}


@pytest.mark.parametrize(
    ("groups", "is_told"),
    [
        (
            rule(IpProtocol="tcp", FromPort=988, ToPort=1023, IpRanges=[{"CidrIp": "10.0.0.0/16"}]),
            False,
        ),
        (rule(IpProtocol="-1", IpRanges=[{"CidrIp": "0.0.0.0/0"}]), False),
        (rule(IpProtocol="tcp", FromPort=22, ToPort=22, IpRanges=[{"CidrIp": "0.0.0.0/0"}]), True),
        (rule(IpProtocol="-1", IpRanges=[{"CidrIp": "10.9.0.0/16"}]), True),
        (
            rule(IpProtocol="-1", UserIdGroupPairs=[{"GroupId": "sg-1"}]),
            True,
        ),  # to itself alone: the nodes' group is new
    ],
)
def test_a_file_system_of_yours_lets_the_nodes_in(
    groups: dict[str, Any], is_told: bool, account: Any
) -> None:
    row = {"SubnetId": SUBNET, "VpcId": VPC, "AvailabilityZone": "us-east-1b", "AvailableIpAddressCount": 1000,
           "CidrBlock": "10.0.128.0/17"}  # fmt: skip
    tables = {"RouteTables": [{"Associations": [MAIN], "Routes": [INTERNET]}]}
    account(DescribeSubnets={"Subnets": [row]}, DescribeRouteTables=tables, DescribeSecurityGroups=groups,
            DescribeFileSystems={"FileSystems": [{"NetworkInterfaceIds": ["eni-1"]}]},
            DescribeNetworkInterfaces={"NetworkInterfaces": [{"Groups": [{"GroupId": "sg-1"}]}]})  # fmt: skip
    own = fleet(vpc=VPC, subnets=(SUBNET,))
    config = replace(
        own,
        fleet=replace(
            own.fleet,
            fsx=replace(own.fleet.fsx, dns_name="fs-0123456789abcdef0.fsx.us-east-1.amazonaws.com"),
        ),
    )
    found = told(config, replace(INPUTS, subnet=SUBNET))
    assert (
        "no security group of fs-0123456789abcdef0 lets in nodes of" in found
        and "--group-id sg-1" in found
    ) == is_told


def test_groups_of_a_training_job_are_open_to_themselves_on_both_sides(account: Any) -> None:
    plain = fleet("p4d.24xlarge")
    own = replace(plain.fleet.sagemaker, subnets=(SUBNET,), security_groups=("sg-1", "sg-2"))
    config, inputs = (
        replace(plain, fleet=replace(plain.fleet, sagemaker=own)),
        replace(INPUTS, scheduler="sagemaker"),
    )
    both = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-2"}]}
    anywhere = {"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    rows = {"SecurityGroups": [{"GroupId": "sg-1", "IpPermissions": [both], "IpPermissionsEgress": [both]},
                               {"GroupId": "sg-2", "IpPermissions": [both], "IpPermissionsEgress": [anywhere]}]}  # fmt: skip
    account(
        DescribeSecurityGroups=rows,
        DescribeRouteTables={"RouteTables": [{"Associations": [MAIN], "Routes": [ELSEWHERE]}]},
        DescribeSubnets={
            "Subnets": [{"SubnetId": SUBNET, "VpcId": VPC, "AvailableIpAddressCount": 99}]
        },
    )
    found = told(config, inputs)
    assert (
        "sg-2 does not let all traffic out to itself" in found
        and "sg-1" not in found
        and "in from" not in found
    )
    assert f"{SUBNET} has no route to the Internet" in found


@pytest.mark.parametrize(
    ("key", "is_told"), [(OWN_KEY, False), (OWN_KEY.replace("123456789012", "210987654321"), True)]
)
def test_a_key_of_another_account_is_told_in_the_plan(
    key: str, is_told: bool, account: Any
) -> None:
    plain = fleet("p4d.24xlarge")
    config = replace(
        plain, fleet=replace(plain.fleet, sagemaker=replace(plain.fleet.sagemaker, kms_key=key))
    )
    account(DescribeKey={"KeyMetadata": {"KeyState": "Enabled"}})
    assert (
        "belongs to another account; its policy must let"
        in told(config, replace(INPUTS, scheduler="sagemaker"))
    ) == is_told


def test_sagemaker_s_quotas_are_looked_at_before_a_job_but_for_a_training_plan(
    account: Any,
) -> None:
    name = "ml.p4d.24xlarge for training job usage"
    row = {"QuotaName": name, "QuotaCode": "L-1", "Value": 1.0}
    account(ListServiceQuotas={"Quotas": [row]})
    plain, inputs = fleet("p4d.24xlarge"), replace(INPUTS, scheduler="sagemaker")
    said = told(plain, inputs)
    assert f"the job needs 2 x ml.p4d.24xlarge, but your quota {name!r} is 1" in said
    assert "--service-code sagemaker --quota-code L-1 --desired-value 2" in said
    own = replace(plain.fleet.sagemaker, plan_hours=24.0)
    assert told(replace(plain, fleet=replace(plain.fleet, sagemaker=own)), inputs) == ""


INTERNET, ELSEWHERE = {"DestinationCidrBlock": "0.0.0.0/0"}, {"DestinationCidrBlock": "10.0.0.0/16"}
MAIN, OF_IT = {"Main": True}, {"SubnetId": SUBNET}


@pytest.mark.parametrize(
    ("tables", "is_told"),
    [
        ([(MAIN, [ELSEWHERE, INTERNET])], False),
        ([(MAIN, [INTERNET]), (OF_IT, [ELSEWHERE])], True),
        ([(MAIN, []), (OF_IT, [INTERNET])], False),
        ([(OF_IT, [INTERNET | {"State": "blackhole"}])], True),  # its NAT gateway is gone
        (
            [(OF_IT, [INTERNET | {"GatewayId": "igw-1"}])],
            True,
        ),  # and nodes with EFA have no public address
        ([(OF_IT, [INTERNET | {"NatGatewayId": "nat-1"}])], False),
    ],
)
def test_a_subnet_without_a_way_out_is_told_and_not_refused(
    tables: Any, is_told: bool, account: Any
) -> None:
    row = {
        "SubnetId": SUBNET,
        "VpcId": VPC,
        "AvailabilityZone": "us-east-1b",
        "AvailableIpAddressCount": 1000,
    }
    found = [{"Associations": [joined], "Routes": routes} for joined, routes in tables]
    account(DescribeSubnets={"Subnets": [row]}, DescribeRouteTables={"RouteTables": found})
    config, inputs = fleet(vpc=VPC, subnets=(SUBNET,)), replace(INPUTS, subnet=SUBNET)
    assert ("the Internet" in told(config, inputs)) == is_told
    checks.require(config, Calls("us-east-1"), inputs)


def test_buckets_are_there_and_in_the_region(account: Any) -> None:
    account(HeadBucket={"BucketRegion": "eu-west-1"})
    assert "fleet.fsx.s3_import: corpus is in eu-west-1" in told(
        fleet(fsx_s3_import="s3://corpus/web")
    )
    plain = fleet()
    store = replace(plain, data=replace(plain.data, tokenized_path="s3://corpus/sets"))
    for scheduler, blocks in (("", False), ("batch", True)):
        (found,) = checks.findings(store, Calls("us-east-1"), replace(INPUTS, scheduler=scheduler))
        assert (
            "data.tokenized_path: corpus is in eu-west-1" in str(found) and found.blocks == blocks
        )
    account(HeadBucket=refused("404"))
    assert "fleet.aws.bucket: the bucket mine-of-old does not exist" in told(
        fleet(bucket="mine-of-old")
    )


PRODUCT = '{"terms": {"OnDemand": {"a": {"priceDimensions": {"b": {"unit": "Hrs", "pricePerUnit": {"USD": "43.1"}}}}}}}'


def test_prices_are_asked_for_and_tell_where_they_stand(account: Any) -> None:
    sent = account(GetProducts={"PriceList": [PRODUCT]}, DescribeSpotPriceHistory={"SpotPriceHistory": [
        {"AvailabilityZone": "us-east-1b", "Timestamp": "2", "SpotPrice": "9.5"},
        {"AvailabilityZone": "us-east-1b", "Timestamp": "1", "SpotPrice": "20"},
    ]})  # fmt: skip
    asked = prices.Prices(Calls("us-east-1"))
    assert asked.instance("p5.48xlarge") == prices.Price(43.1, prices.API)
    assert asked.instance("p5.48xlarge", "spot", "us-east-1b") == prices.Price(9.5, prices.SPOT)
    assert asked.instance("p5.48xlarge", "block") == prices.Price(0.0, prices.PAID)
    asked.instance("p5.48xlarge")
    assert len(sent) == 2, "a price is asked for once"


def test_sagemaker_s_machines_have_prices_of_their_own(account: Any) -> None:
    def product(usage: str, usd: str) -> str:
        attributes = f'"product": {{"attributes": {{"usagetype": "{usage}"}}}}'
        return PRODUCT.replace("43.1", usd).replace("{", f"{{{attributes}, ", 1)

    listed = [product("USE1-Train:ml.p6-b200.48xlarge", "131.0"), product("USE1-Host:ml.p6-b200.48xlarge", "1.0"),
              product("USE1-Train:ml.p6-b200.48xlarge-Plan", "2.0"), PRODUCT]  # fmt: skip
    sent = account(GetProducts={"PriceList": listed})
    asked = prices.Prices(Calls("us-east-1"))
    assert asked.training("p6-b200.48xlarge") == prices.Price(131.0, prices.API), (
        "hosting and what has no usage are others'"
    )
    assert asked.training("p6-b200.48xlarge", is_reserved=True) == prices.Price(
        0.0, prices.RESERVED
    )
    ((operation, request),) = sent
    assert (operation, request["ServiceCode"]) == ("GetProducts", "AmazonSageMaker")
    assert {
        "Type": "TERM_MATCH",
        "Field": "instanceName",
        "Value": "ml.p6-b200.48xlarge",
    } in request["Filters"]
    account(GetProducts=refused("AccessDenied"))
    table = prices.Prices(Calls("us-east-1"))
    assert (
        table.training("p4d.24xlarge") == prices.Price(25.2513, prices.OF_SAGEMAKER)
        and table.trouble
    )
    assert prices.Prices().training("p5en.48xlarge").usd is None


@pytest.mark.parametrize(
    "product",
    [
        "{",
        "[]",
        "null",
        '{"terms": 4}',
        PRODUCT.replace("43.1", "NaN"),
        PRODUCT.replace("43.1", "-1"),
    ],
)
def test_a_price_list_that_is_none_is_not_believed(product: str, account: Any) -> None:
    account(GetProducts={"PriceList": [product]})
    assert prices.Prices(Calls("us-east-1")).instance("p5.48xlarge") == prices.Price(
        55.04, prices.TABLE
    )


def test_without_an_answer_the_table_answers_and_says_so(account: Any) -> None:
    account(GetProducts=refused("AccessDenied"))
    asked = prices.Prices(Calls("us-east-1"))
    assert (
        asked.instance("p5.48xlarge") == prices.Price(55.04, prices.TABLE)
        and "pricing:GetProducts" in asked.trouble
    )
    assert prices.Prices().instance("p5e.48xlarge").usd is None


def bill_of(config: Config) -> Bill:
    found = spending.of_ec2(config).bill(config.fleet.nodes)
    assert found
    return found


def test_a_fleet_s_hours_are_those_of_all_its_resources() -> None:
    config = fleet(bastion_type="c7i.xlarge", allow_ssh_from=("203.0.113.7/32",))
    found = {row.name: row for row in spending.of_ec2(config).rows}
    assert set(found) == {"nodes", "volumes", "file system", "NAT", "addresses", "head"}
    assert found["nodes"].usd == 2 * 55.04 and found["file system"].usd == pytest.approx(
        0.14 * 1200 / 730
    )
    whole = spending.hourly(found.values())
    assert (
        whole is not None
        and bill_of(config).hour(2) == pytest.approx(whole)
        and whole > 2 * 55.04 + 0.5
    )
    assert spending.hourly(spending.of_ec2(fleet("p5e.48xlarge")).rows) is None
    told = "\n".join(spending.describe(found.values(), 10.0))
    assert f"{whole:,.2f}  about ${whole * 10:,.2f} in 10.0 h" in told and prices.TABLE in told
    assert "unknown  no list price for p5e.48xlarge" in "\n".join(
        spending.describe(spending.of_ec2(fleet("p5e.48xlarge")).rows, 1.0)
    )


def test_on_the_head_an_hour_costs_the_same() -> None:
    config = fleet()
    fsx = replace(
        config.fleet.fsx,
        dns_name="fs-0123456789abcdef0.fsx.us-east-1.amazonaws.com",
        mount_name="abc",
    )
    handed = replace(
        config, fleet=replace(config.fleet, hosts=("i-1=10.0.0.1", "i-2=10.0.0.2"), fsx=fsx)
    )
    assert bill_of(handed) == bill_of(config)


def test_what_is_the_user_s_own_costs_nothing_more() -> None:
    own = fleet(vpc=VPC, subnets=(SUBNET,))
    mounted = replace(own, fleet=replace(own.fleet, shared_folder="/mnt/mine"))
    assert {row.name for row in spending.of_ec2(mounted).rows} == {"nodes", "volumes"}
    block = bill_of(fleet(capacity="block"))
    assert block.hour(2) == pytest.approx(
        spending.hourly(spending.of_ec2(fleet(capacity="block")).rows) or 0
    )
