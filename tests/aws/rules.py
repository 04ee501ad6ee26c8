"""What cfn-lint does not see in a template: EFA interfaces, FSx's enums and sizes, groups open to themselves, capacity, secrecy.

Resources are judged as the requests that CloudFormation makes of them, by AWS's own models (validation.py), and interfaces by what
DescribeInstanceTypes says of the type, in the copy that moto carries.
"""

from __future__ import annotations

import base64
import functools
import gzip
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moto

from aws.validation import problems_of
from trainfleet.cloud.template import UNTAGGED

TYPES = Path(moto.__file__).parent / "ec2" / "resources" / "instance_types.json.gz"
SAMPLES = {"GroupId": "sg-0123456789abcdef0", "Arn": "arn:aws:iam::123456789012:instance-profile/x"}
KINDS = ("interface", "efa", "efa-only")  # EC2's model has no enum for them
USER_DATA = 16_384  # bytes (EC2 user guide)
LATEST = {"SCRATCH_2", "PERSISTENT_2"}


@functools.cache
def described(name: str) -> dict[str, Any]:
    """DescribeInstanceTypes' answer for a type."""
    return _types()[name]  # type: ignore[no-any-return]


@functools.cache
def _types() -> dict[str, Any]:
    return json.loads(gzip.decompress(TYPES.read_bytes()))  # type: ignore[no-any-return]


def judge(template: dict[str, Any]) -> list[str]:
    """All that is wrong with a template; none for a sound one."""
    return [problem for rule in RULES for problem in rule(template["Resources"], template)]


def plain(value: Any, template: dict[str, Any]) -> Any:
    """A property as the service would see it, with a name of the right form for what is not known yet."""
    match value:
        case {"Ref": str(name)} if len(value) == 1:
            parameter = template["Parameters"].get(name)
            sample = {
                "FileSystem": "fs-0123456789abcdef0",
                "PrivateSubnet": "subnet-0123456789abcdef0",
            }.get(name, name.lower())
            return parameter["Default"] if parameter else sample
        case {"Fn::GetAtt": [_, attribute]}:
            return SAMPLES.get(attribute, "x")
        case dict():
            return {key: plain(inner, template) for key, inner in value.items()}
        case list():
            return [plain(inner, template) for inner in value]
    return value


def kinds(resources: dict[str, Any], kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    return (
        (name, entry["Properties"]) for name, entry in resources.items() if entry["Type"] == kind
    )


def requests_are_valid(resources: dict[str, Any], template: dict[str, Any]) -> Iterator[str]:
    for kind, service, operation in (
        ("AWS::FSx::FileSystem", "fsx", "CreateFileSystem"),
        ("AWS::FSx::DataRepositoryAssociation", "fsx", "CreateDataRepositoryAssociation"),
        ("AWS::EC2::PlacementGroup", "ec2", "CreatePlacementGroup"),
        ("AWS::EC2::NatGateway", "ec2", "CreateNatGateway"),
    ):
        for name, properties in kinds(resources, kind):
            request = {
                key: value for key, value in plain(properties, template).items() if key != "Tags"
            }
            yield from (
                f"{name}: {problem}" for problem in problems_of(service, operation, request)
            )
    for name, properties in kinds(resources, "AWS::EC2::LaunchTemplate"):
        request = {
            "LaunchTemplateName": "abc",
            "LaunchTemplateData": plain(properties["LaunchTemplateData"], template),
        }
        yield from (
            f"{name}: {problem}" for problem in problems_of("ec2", "CreateLaunchTemplate", request)
        )


def interfaces_fit_the_type(resources: dict[str, Any], template: dict[str, Any]) -> Iterator[str]:
    if "Template" not in resources:
        return
    data = resources["Template"]["Properties"]["LaunchTemplateData"]
    info, places = described(data["InstanceType"])["NetworkInfo"], data["NetworkInterfaces"]
    yield from (
        f"{place['InterfaceType']} is not one of {KINDS}"
        for place in places
        if place["InterfaceType"] not in KINDS
    )
    efa = [place for place in places if place["InterfaceType"] in ("efa", "efa-only")]
    most = info.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
    alone = len([*kinds(resources, "AWS::EC2::Instance")]) - ("Head" in resources) <= 1 and not efa
    if len(efa) != most and not alone:
        yield f"{len(efa)} EFA interfaces, the type has {most}"
    if len({(place["NetworkCardIndex"], place["DeviceIndex"]) for place in places}) != len(places):
        yield "two interfaces are in one place"
    for card, count in Counter(place["NetworkCardIndex"] for place in places).items():
        if card >= info["MaximumNetworkCards"]:
            yield f"there is no network card {card}"
        elif count > info["NetworkCards"][card]["MaximumNetworkInterfaces"]:
            yield f"{count} interfaces on card {card}"
    if any(count > 1 for count in Counter(place["NetworkCardIndex"] for place in efa).values()):
        yield "two EFA interfaces on one card"
    first = [
        place for place in places if (place["NetworkCardIndex"], place["DeviceIndex"]) == (0, 0)
    ]
    if [place["InterfaceType"] for place in first] not in (["interface"], ["efa"]):
        yield "the primary interface must be one with an address"
    if len({json.dumps([place["SubnetId"], place["Groups"]]) for place in places}) > 1:
        yield "interfaces in different subnets or groups"
    if any("AssociatePublicIpAddress" in place for place in places) and len(places) > 1:
        yield "a public address can't be given to a node with several interfaces"


def capacity_is_asked_for_as_ec2_takes_it(
    resources: dict[str, Any], template: dict[str, Any]
) -> Iterator[str]:
    if "Template" not in resources:
        return
    data = resources["Template"]["Properties"]["LaunchTemplateData"]
    market = data.get("InstanceMarketOptions", {}).get("MarketType", "on-demand")
    if market not in described(data["InstanceType"])["SupportedUsageClasses"]:
        yield f"{data['InstanceType']} is not sold as {market}"
    if market != "on-demand" and data["InstanceInitiatedShutdownBehavior"] != "terminate":
        yield f"a {market} node can't be stopped by itself"
    if market == "capacity-block" and (
        "Placement" in data or "CapacityReservationSpecification" not in data
    ):
        yield "a capacity block is named by its reservation, and takes no placement group"


def groups_are_open_to_themselves_alone(
    resources: dict[str, Any], template: dict[str, Any]
) -> Iterator[str]:
    inside = [properties for _, properties in kinds(resources, "AWS::EC2::SecurityGroupIngress")]
    outside = [properties for _, properties in kinds(resources, "AWS::EC2::SecurityGroupEgress")]
    if "Wall" in resources:
        for way, rules, key in (
            ("in", inside, "SourceSecurityGroupId"),
            ("out", outside, "DestinationSecurityGroupId"),
        ):
            own = {"Ref": "Wall"}
            if not any(
                rule.get(key) == own and rule["GroupId"] == own and rule["IpProtocol"] == "-1"
                for rule in rules
            ):
                yield f"the nodes' group is not open to itself: {way}"
    for rule in inside:
        if rule.get("CidrIp") in ("0.0.0.0/0", "::/0") or (
            "CidrIp" in rule and (rule["FromPort"], rule["ToPort"]) != (22, 22)
        ):
            yield f"open to the outside: {rule}"
    if any(
        "SecurityGroupIngress" in properties
        for _, properties in kinds(resources, "AWS::EC2::SecurityGroup")
    ):
        yield "a rule in a group itself, where none is looked for"


def what_is_kept_secret_is(resources: dict[str, Any], template: dict[str, Any]) -> Iterator[str]:
    for name, properties in kinds(resources, "AWS::EC2::LaunchTemplate"):
        data = properties["LaunchTemplateData"]
        if data["MetadataOptions"]["HttpTokens"] != "required":
            yield f"{name}: the metadata service answers without a token"
        if not all(
            disk["Ebs"]["Encrypted"] and disk["Ebs"]["DeleteOnTermination"]
            for disk in data["BlockDeviceMappings"]
        ):
            yield f"{name}: a disk that is not encrypted, or outlives its node"
    for name, properties in kinds(resources, "AWS::S3::Bucket"):
        if (
            not all(properties["PublicAccessBlockConfiguration"].values())
            or "BucketEncryption" not in properties
        ):
            yield f"{name}: not private"
        if "AbortIncompleteMultipartUpload" not in json.dumps(
            properties.get("LifecycleConfiguration")
        ):
            yield f"{name}: parts of broken uploads stay for ever"
    for name, properties in kinds(resources, "AWS::IAM::Role"):
        for policy in properties.get("Policies", []):
            for statement in policy["PolicyDocument"]["Statement"]:
                if any("*" in action for action in statement["Action"]):
                    yield f"{name}: {statement['Action']}"
                if "*" in statement["Resource"] and statement["Action"] != [
                    "ecr:GetAuthorizationToken"
                ]:
                    yield f"{name}: {statement['Action']} on everything"


def all_is_tagged(resources: dict[str, Any], template: dict[str, Any]) -> Iterator[str]:
    keys = {f"trainfleet:{key}" for key in ("project", "config", "owner", "created", "expires")}
    for name, entry in resources.items():
        if (
            entry["Type"] not in UNTAGGED
            and {tag["Key"] for tag in entry["Properties"].get("Tags", [])} != keys
        ):
            yield f"{name} lacks tags"
    for name, properties in kinds(resources, "AWS::EC2::LaunchTemplate"):
        told = properties["LaunchTemplateData"]["TagSpecifications"]
        if {part["ResourceType"] for part in told} != {"instance", "volume", "network-interface"}:
            yield f"{name}: what it brings is not tagged"
        told = [*told, *properties.get("TagSpecifications", [{"Tags": []}])]
        yield from (
            f"{name}: lacks tags" for part in told if {tag["Key"] for tag in part["Tags"]} != keys
        )


def what_holds_data_stays(resources: dict[str, Any], template: dict[str, Any]) -> Iterator[str]:
    for name, entry in resources.items():
        policies = (entry.get("DeletionPolicy"), entry.get("UpdateReplacePolicy"))
        if entry["Type"] in ("AWS::S3::Bucket", "AWS::FSx::FileSystem") and policies != (
            "RetainExceptOnCreate",
            "Retain",
        ):
            yield f"{name} goes with the stack"
    for name, properties in kinds(resources, "AWS::FSx::FileSystem"):
        size, lustre = properties["StorageCapacity"], properties["LustreConfiguration"]
        step = (
            {125: 38400, 250: 19200, 500: 9600, 1000: 4800}[lustre["PerUnitStorageThroughput"]]
            if "EfaEnabled" in lustre
            else 2400
        )
        if size % step and (size != 1200 or "EfaEnabled" in lustre):
            yield f"{name}: {size} GiB is no size"
        if lustre["DeploymentType"] not in LATEST or ("PerUnitStorageThroughput" in lustre) != (
            lustre["DeploymentType"] != "SCRATCH_2"
        ):
            yield f"{name}: {lustre}"
        if properties.get("FileSystemTypeVersion") != "2.15":
            yield f"{name}: without a version it is Lustre 2.10, which has no links to S3"


def logs_end_and_nodes_may_write_them(
    resources: dict[str, Any], template: dict[str, Any]
) -> Iterator[str]:
    for name, properties in kinds(resources, "AWS::Logs::LogGroup"):
        if not 0 < properties.get("RetentionInDays", 0) <= 365:
            yield f"{name}: logs are kept for ever"
        write = {
            "Effect": "Allow",
            "Action": ["logs:CreateLogStream", "logs:PutLogEvents"],
            "Resource": [{"Fn::GetAtt": [name, "Arn"]}],
        }
        policies = (
            resources["NodeRole"]["Properties"].get("Policies", [])
            if "NodeRole" in resources
            else []
        )
        if "Template" in resources and write not in [
            one for policy in policies for one in policy["PolicyDocument"]["Statement"]
        ]:
            yield f"{name}: nodes may not write to it"


def user_data_is_a_script(resources: dict[str, Any], template: dict[str, Any]) -> Iterator[str]:
    for name, properties in kinds(resources, "AWS::EC2::LaunchTemplate"):
        if data := properties["LaunchTemplateData"].get("UserData"):
            script = base64.b64decode(data)
            said = subprocess.run(["bash", "-n"], input=script, capture_output=True, check=False)
            if said.returncode or len(script) > USER_DATA or not script.startswith(b"#!"):
                yield f"{name}: {said.stderr.decode()[:200]}"


RULES = (
    requests_are_valid, interfaces_fit_the_type, capacity_is_asked_for_as_ec2_takes_it, groups_are_open_to_themselves_alone,
    what_is_kept_secret_is, all_is_tagged, what_holds_data_stays, logs_end_and_nodes_may_write_them, user_data_is_a_script,
)  # fmt: skip
