"""What CloudFormation's resource types come to in the pretended account: how each is made, changed, deleted, and how long that takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import compute, storage
from .account import Account, Refused, Thing, tags_of

# type → (kind, prefix of its ids; "" where it is called by its name, seconds)
TYPES: dict[str, tuple[str, str, float]] = {
    "AWS::EC2::VPC": ("vpc", "vpc-", 12), "AWS::EC2::Subnet": ("subnet", "subnet-", 4),
    "AWS::EC2::SecurityGroup": ("security-group", "sg-", 6), "AWS::EC2::InternetGateway": ("internet-gateway", "igw-", 16),
    "AWS::EC2::NatGateway": ("nat-gateway", "nat-", 95), "AWS::EC2::EIP": ("address", "eipalloc-", 16),
    "AWS::EC2::RouteTable": ("route-table", "rtb-", 11), "AWS::EC2::VPCEndpoint": ("endpoint", "vpce-", 6),
    "AWS::EC2::PlacementGroup": ("placement-group", "", 8), "AWS::EC2::LaunchTemplate": ("launch-template", "lt-", 3),
    "AWS::EC2::KeyPair": ("key-pair", "key-", 2), "AWS::EC2::Instance": ("instance", "i-", compute.BOOT + 3),
    "AWS::EC2::FlowLog": ("flow-log", "fl-", 3),
    "AWS::FSx::FileSystem": ("file-system", "fs-", storage.FORMATTED + 5),
    "AWS::FSx::DataRepositoryAssociation": ("data-repository-association", "dra-", 40),
    "AWS::S3::Bucket": ("bucket", "", 22), "AWS::Logs::LogGroup": ("log-group", "", 2),
    "AWS::IAM::Role": ("role", "", 18), "AWS::IAM::InstanceProfile": ("instance-profile", "", 125),
}  # fmt: skip
# Not things of their own, but something about others.
JOINS = {
    "AWS::EC2::VPCGatewayAttachment", "AWS::EC2::SubnetRouteTableAssociation", "AWS::EC2::Route", "AWS::EC2::SecurityGroupIngress",
    "AWS::EC2::SecurityGroupEgress", "AWS::S3::BucketPolicy", "AWS::IAM::Policy", "AWS::IAM::RolePolicy",
}  # fmt: skip
NAMES = {"placement-group": "GroupName", "bucket": "BucketName", "log-group": "LogGroupName",
         "role": "RoleName", "instance-profile": "InstanceProfileName"}  # fmt: skip
MAKERS: dict[
    str, Callable[[Account, str, str, Mapping[str, Any], Mapping[str, str]], str]
] = {}  # more types, from other files
REMOVERS: dict[str, Callable[[Account, str], bool]] = {}


def known(type_: str) -> None:
    if type_ not in TYPES and type_ not in JOINS and type_ not in MAKERS:
        raise AssertionError(f"the pretended CloudFormation has no {type_}")


def seconds(type_: str) -> float:
    return TYPES[type_][2] if type_ in TYPES else 3.0


def make(
    account: Account,
    stack: str,
    arn: str,
    logical: str,
    type_: str,
    properties: dict[str, Any],
    tags: Mapping[str, str],
) -> str:
    """The physical id of the new resource. Refused where its service refuses."""
    own = {
        **tags,
        **tags_of(properties.get("Tags")),
        "aws:cloudformation:stack-id": arn,
        "aws:cloudformation:logical-id": logical,
    }
    if type_ in MAKERS:
        return MAKERS[type_](account, stack, logical, properties, own)
    if type_ in JOINS:
        return _join(account, type_, properties)
    kind, prefix, _ = TYPES[type_]
    if kind == "instance":
        return compute.launch(account, properties, own, stack).id
    if kind == "file-system":
        return storage.make_file_system(account, properties, own, stack).id
    if kind == "launch-template":
        own = {**tags, "aws:cloudformation:stack-id": arn} | {
            key: value for row in properties.get("TagSpecifications", ()) for key, value in tags_of(row["Tags"]).items()}  # fmt: skip
    name = properties.get(NAMES.get(kind, ""), "") if kind in NAMES else account.new_id(prefix)
    name = name or f"{stack}-{logical}-{account.new_id('')[-12:]}"
    name = name.lower() if kind == "bucket" else name
    if name in account.things:
        raise Refused("AlreadyExists", f"{name} already exists")
    thing = account.add(kind, name, dict(properties), own, stack)
    if kind == "launch-template":
        thing.more |= {
            "LaunchTemplateName": properties.get("LaunchTemplateName", f"{stack}-{logical}"),
            "LatestVersionNumber": 1,
            "DefaultVersionNumber": 1,
        }
    if kind == "nat-gateway":
        subnet = account.things[properties["SubnetId"]]
        account.things[properties["AllocationId"]].properties["VpcId"] = subnet.properties["VpcId"]
        thing.properties["VpcId"] = subnet.properties["VpcId"]
    if kind == "address" and (instance := account.things.get(properties.get("InstanceId", ""))):
        instance.more["public"] = (
            account.public_of(instance) if account.public_of else "203.0.113.7"
        )
    if kind == "subnet" and "AvailabilityZone" not in properties:
        thing.properties["AvailabilityZone"] = account.zones[0]
    return name


def _join(account: Account, type_: str, properties: Mapping[str, Any]) -> str:
    id = account.new_id("join-")
    if type_ == "AWS::EC2::VPCGatewayAttachment" and properties.get("InternetGatewayId"):
        account.things[properties["InternetGatewayId"]].properties["VpcId"] = properties["VpcId"]
    if type_ == "AWS::EC2::SubnetRouteTableAssociation":
        table = account.things[properties["RouteTableId"]].properties
        table.setdefault("Associations", []).append(
            {"RouteTableAssociationId": id, "SubnetId": properties["SubnetId"], "Main": False}
        )
    return id


def update(
    account: Account, type_: str, physical: str, properties: dict[str, Any], tags: Mapping[str, str]
) -> None:
    thing = account.things.get(physical)
    if thing is None:
        return
    if thing.kind == "launch-template" and thing.properties.get(
        "LaunchTemplateData"
    ) != properties.get("LaunchTemplateData"):
        thing.more["LatestVersionNumber"] += 1
    keep = {
        key: thing.properties[key]
        for key in ("VpcId", "Associations", "AvailabilityZone")
        if key in thing.properties
    }
    if thing.kind != "instance":
        thing.properties = {**properties, **keep}
    thing.tags |= {**tags, **tags_of(properties.get("Tags"))}


def is_replaced(type_: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether another resource takes its place, as CloudFormation's pages say of each property (Update requires: Replacement)."""
    changed = {key for key in {*before, *after} if before.get(key) != after.get(key)} - {"Tags"}
    final = {
        "AWS::EC2::Instance": changed, "AWS::FSx::FileSystem": changed & {"SubnetIds", "SecurityGroupIds", "FileSystemType", "StorageType"},
        "AWS::EC2::VPC": changed & {"CidrBlock"}, "AWS::EC2::Subnet": changed & {"CidrBlock", "AvailabilityZone", "VpcId"},
        "AWS::EC2::SecurityGroup": changed & {"VpcId", "GroupName", "GroupDescription"}, "AWS::S3::Bucket": changed & {"BucketName"},
        "AWS::EC2::NatGateway": changed & {"SubnetId", "AllocationId"}, "AWS::EC2::PlacementGroup": changed,
        "AWS::EC2::LaunchTemplate": changed & {"LaunchTemplateName"}, "AWS::IAM::Role": changed & {"RoleName", "Path"},
    }  # fmt: skip
    return bool(final.get(type_, set()))


def remove(account: Account, type_: str, physical: str, properties: Mapping[str, Any]) -> bool:
    """Whether it is gone; called again until it is. Refused where its service refuses."""
    if type_ in REMOVERS:
        return REMOVERS[type_](account, physical)
    thing = account.things.get(physical)
    if type_ in JOINS:
        _unjoin(account, type_, physical, properties)
        return True
    if thing is None or thing.state == "terminated":
        return True
    match thing.kind:
        case "instance":
            compute.terminate(account, physical)
            return False
        case "file-system":
            if thing.state != "DELETING":
                storage.delete_file_system(account, physical)
            return False
        case "role":
            if account.users(thing):
                raise Refused(
                    "DeleteConflict",
                    "Cannot delete entity, must remove roles from instance profile first.",
                )
            del account.things[physical]
        case "bucket":
            storage.delete_bucket(account, physical)
        case "nat-gateway":
            if thing.state != "deleting":
                compute.remove(account, "nat-gateway", physical)
            return False
        case kind if kind in compute.KINDS:
            compute.remove(account, kind, physical)
        case _:
            del account.things[physical]
    return True


def _unjoin(account: Account, type_: str, physical: str, properties: Mapping[str, Any]) -> None:
    if type_ == "AWS::EC2::VPCGatewayAttachment" and (
        gateway := account.things.get(properties.get("InternetGatewayId", ""))
    ):
        vpc = gateway.properties.get("VpcId")
        if any(
            thing.kind == "address" and thing.properties.get("VpcId") == vpc
            for thing in account.living()
        ):
            raise Refused(
                "DependencyViolation",
                f"Network {vpc} has some mapped public address(es). Please unmap those public address(es) before detaching the gateway.",
            )
        gateway.properties.pop("VpcId", None)
    if type_ == "AWS::EC2::SubnetRouteTableAssociation" and (
        table := account.things.get(properties["RouteTableId"])
    ):
        table.properties["Associations"] = [
            row
            for row in table.properties.get("Associations", [])
            if row["RouteTableAssociationId"] != physical
        ]


def reference(account: Account, type_: str, physical: str) -> str:
    return physical


def attribute(account: Account, type_: str, physical: str, name: str) -> Any:
    """What Fn::GetAtt gives."""
    thing = account.things.get(physical) or Thing("", physical, {}, {}, 0.0)
    known = {
        "Arn": storage.arn_of(account, thing), "GroupId": physical, "VpcId": thing.properties.get("VpcId", physical),
        "AllocationId": physical, "LatestVersionNumber": str(thing.more.get("LatestVersionNumber", 1)), "DefaultVersionNumber": "1",
        "DNSName": f"{physical}.fsx.{account.region}.amazonaws.com", "LustreMountName": thing.more.get("mount", ""),
        "PrivateIp": thing.more.get("address", ""), "PublicIp": thing.more.get("public", ""), "CidrBlock": thing.properties.get("CidrBlock", ""),
        "GroupName": physical, "DomainName": f"{physical}.s3.amazonaws.com",
        "PublicIpAddress": thing.more.get("public", ""), "AvailabilityZone": thing.properties.get("AvailabilityZone", ""), "AssociationId": physical,
        "ResourceARN": storage.arn_of(account, thing), "KeyPairId": physical, "LaunchTemplateId": physical, "NatGatewayId": physical, "SubnetId": physical,
        "DefaultSecurityGroup": f"{physical}-default", "InternetGatewayId": physical, "RouteTableId": physical, "Id": physical, "RoleId": "AROA0123456789ABCDEF",
    }  # fmt: skip
    return known[name]
