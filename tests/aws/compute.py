"""The pretended account's EC2: network, instances with placement and capacity, and the refusals of what others still use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from . import baked
from .account import Account, Refused, Thing, answers, moment_of, tag_list, tags_of

BOOT, END = 35.0, 45.0  # seconds until an instance runs, and until one that is terminated is gone
REMEMBERED = 3600.0  # seconds that a terminated instance is still described, as EC2 documents

# kind → (operation that describes it, key of the list, key of the id, filter for ids, prefix of ids, code of "not found")
KINDS = {
    "vpc": ("DescribeVpcs", "Vpcs", "VpcId", "VpcIds", "vpc-", "InvalidVpcID.NotFound"),
    "subnet": ("DescribeSubnets", "Subnets", "SubnetId", "SubnetIds", "subnet-", "InvalidSubnetID.NotFound"),
    "security-group": ("DescribeSecurityGroups", "SecurityGroups", "GroupId", "GroupIds", "sg-", "InvalidGroup.NotFound"),
    "internet-gateway": ("DescribeInternetGateways", "InternetGateways", "InternetGatewayId", "InternetGatewayIds", "igw-",
                         "InvalidInternetGatewayID.NotFound"),
    "nat-gateway": ("DescribeNatGateways", "NatGateways", "NatGatewayId", "NatGatewayIds", "nat-", "NatGatewayNotFound"),
    "address": ("DescribeAddresses", "Addresses", "AllocationId", "AllocationIds", "eipalloc-", "InvalidAllocationID.NotFound"),
    "route-table": ("DescribeRouteTables", "RouteTables", "RouteTableId", "RouteTableIds", "rtb-", "InvalidRouteTableID.NotFound"),
    "endpoint": ("DescribeVpcEndpoints", "VpcEndpoints", "VpcEndpointId", "VpcEndpointIds", "vpce-", "InvalidVpcEndpointId.NotFound"),
    "placement-group": ("DescribePlacementGroups", "PlacementGroups", "GroupName", "GroupNames", "pg-",
                        "InvalidPlacementGroup.Unknown"),
    "launch-template": ("DescribeLaunchTemplates", "LaunchTemplates", "LaunchTemplateId", "LaunchTemplateIds", "lt-",
                        "InvalidLaunchTemplateId.NotFound"),
    "volume": ("DescribeVolumes", "Volumes", "VolumeId", "VolumeIds", "vol-", "InvalidVolume.NotFound"),
    "network-interface": ("DescribeNetworkInterfaces", "NetworkInterfaces", "NetworkInterfaceId", "NetworkInterfaceIds", "eni-",
                          "InvalidNetworkInterfaceID.NotFound"),
    "key-pair": ("DescribeKeyPairs", "KeyPairs", "KeyPairId", "KeyPairIds", "key-", "InvalidKeyPair.NotFound"),
    "snapshot": ("DescribeSnapshots", "Snapshots", "SnapshotId", "SnapshotIds", "snap-", "InvalidSnapshot.NotFound"),
    "flow-log": ("DescribeFlowLogs", "FlowLogs", "FlowLogId", "FlowLogIds", "fl-", "InvalidFlowLogId.NotFound"),
}  # fmt: skip
BUSY = {
    "placement-group": "InvalidPlacementGroup.InUse",
    "address": "InvalidIPAddress.InUse",
    "volume": "VolumeInUse",
}
DELETES = {
    "DeleteVpc": ("vpc", "VpcId"), "DeleteSubnet": ("subnet", "SubnetId"), "DeleteSecurityGroup": ("security-group", "GroupId"),
    "DeleteInternetGateway": ("internet-gateway", "InternetGatewayId"), "DeleteNatGateway": ("nat-gateway", "NatGatewayId"),
    "ReleaseAddress": ("address", "AllocationId"), "DeleteRouteTable": ("route-table", "RouteTableId"),
    "DeletePlacementGroup": ("placement-group", "GroupName"), "DeleteLaunchTemplate": ("launch-template", "LaunchTemplateId"),
    "DeleteVolume": ("volume", "VolumeId"), "DeleteNetworkInterface": ("network-interface", "NetworkInterfaceId"),
    "DeleteKeyPair": ("key-pair", "KeyPairId"), "DeleteSnapshot": ("snapshot", "SnapshotId"),
}  # fmt: skip


def matches(thing: Thing, filters: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a thing passes all filters, by tag or by what EC2 calls a property in filters."""
    for one in filters:
        name, values = one["Name"], one["Values"]
        if name.startswith("tag:"):
            has = thing.tags.get(name.removeprefix("tag:")) in values
        elif name == "tag-key":
            has = bool(set(values) & set(thing.tags))
        elif name == "description":
            has = any(
                fnmatchcase(str(thing.properties.get("Description", "")), value) for value in values
            )
        elif name in ("instance-state-name", "state", "status"):
            has = thing.state in values
        else:
            key = {"vpc-id": "VpcId", "attachment.vpc-id": "VpcId", "group-id": "GroupId", "subnet-id": "SubnetId",
                   "group-name": "GroupName"}.get(name, name)  # fmt: skip
            has = str(thing.properties.get(key, thing.id if key.endswith("Id") else "")) in values
        if not has:
            return False
    return True


@answers("ec2", "ImportKeyPair")
def import_key_pair(
    account: Account, KeyName: str, TagSpecifications: Iterable[Mapping[str, Any]] = (), **_: Any
) -> dict[str, Any]:
    if any(thing.properties.get("KeyName") == KeyName for thing in account.of("key-pair")):
        raise Refused("InvalidKeyPair.Duplicate", f"The keypair already exists: {KeyName}")
    tags = {tag["Key"]: tag["Value"] for one in TagSpecifications for tag in one["Tags"]}
    thing = account.add("key-pair", account.new_id("key-"), {"KeyName": KeyName}, tags)
    return {"KeyPairId": thing.id, "KeyName": KeyName}


def chosen(
    account: Account, kind: str, code: str, ids: Iterable[str], filters: Iterable[Mapping[str, Any]]
) -> list[Thing]:
    ids = list(ids)
    found = [
        thing
        for thing in account.of(kind)
        if (not ids or thing.id in ids) and matches(thing, filters)
    ]
    if missing := set(ids) - {thing.id for thing in found}:
        raise Refused(code, f"The {kind} ID '{sorted(missing)[0]}' does not exist")
    return found


def _describe(kind: str) -> None:
    operation, listed, id_key, ids_key, _, code = KINDS[kind]

    def describe(account: Account, **request: Any) -> dict[str, Any]:
        things = chosen(
            account,
            kind,
            code,
            request.get(ids_key, ()),
            request.get("Filters", request.get("Filter", ())),
        )
        return {listed: [described(account, thing, id_key) for thing in things]}

    answers("ec2", operation)(describe)


def described(account: Account, thing: Thing, id_key: str) -> dict[str, Any]:
    row = {id_key: thing.id, "Tags": tag_list(thing.tags), "State": thing.state, **thing.more}
    if thing.kind in ("subnet", "vpc"):
        row |= {
            "CidrBlock": thing.properties.get("CidrBlock", "10.0.0.0/16"),
            "VpcId": thing.properties.get("VpcId", thing.id),
        }
    if thing.kind == "subnet":
        row |= {
            "AvailabilityZone": thing.properties.get("AvailabilityZone", account.zones[0]),
            "AvailableIpAddressCount": 4091,
        }
    if thing.kind == "internet-gateway":
        row.pop("State")
        row["Attachments"] = [
            {"VpcId": vpc, "State": "available"} for vpc in [thing.properties.get("VpcId")] if vpc
        ]
    if thing.kind == "route-table":
        row.pop("State")
        row["Associations"] = thing.properties.get("Associations", [])
    if thing.kind in ("volume", "snapshot"):
        row |= {"Size": thing.properties.get("Size", 0), "VolumeType": thing.properties.get("VolumeType", "gp3"),
                "CreateTime": moment_of(thing.since), "StartTime": moment_of(thing.since)}  # fmt: skip
        row["VolumeSize"] = row["Size"]
    if thing.kind == "snapshot":
        row |= {
            "Description": thing.properties.get("Description", ""),
            "Progress": "100%" if thing.state == "completed" else "42%",
        }
    if thing.kind in ("nat-gateway", "launch-template"):
        row["CreateTime"] = moment_of(thing.since)
    if thing.kind == "security-group":
        row |= {
            "GroupName": thing.properties.get("GroupName", thing.id),
            "VpcId": thing.properties.get("VpcId", ""),
        }
    if thing.kind == "network-interface":
        row |= {"Description": thing.properties.get("Description", ""), "Status": "in-use" if thing.properties.get("Attachment") else "available", "TagSet": row.pop("Tags"), "Groups": [{"GroupId": one} for one in thing.properties.get("Groups", ())],
                "Attachment": thing.properties.get("Attachment", {}), "RequesterManaged": bool(thing.more.get("RequesterManaged"))}  # fmt: skip
    return row


for _kind in KINDS:
    _describe(_kind)


def remove(account: Account, kind: str, id: str) -> None:
    """Deletes one thing, or refuses as its service does while others use it."""
    thing = account.get(kind, id, KINDS[kind][5])
    if thing.more.get("image") in account.things:
        raise Refused(
            "InvalidSnapshot.InUse",
            f"The snapshot {id} is currently in use by {thing.more['image']}",
        )
    if users := account.users(thing):
        raise Refused(BUSY.get(kind, "DependencyViolation"),
                      f"The {kind} '{id}' has dependencies and cannot be deleted ({users[0].kind} {users[0].id})")  # fmt: skip
    if kind == "nat-gateway":
        thing.state = "deleting"

        def gone() -> None:
            account.things.pop(id, None)
            if address := account.things.get(thing.properties.get("AllocationId", "")):
                address.properties.pop("VpcId", None)

        account.later(30.0, gone)
        return
    if kind == "route-table" and thing.properties.get("Associations"):
        raise Refused(
            "DependencyViolation", f"The routeTable '{id}' has dependencies and cannot be deleted."
        )
    if kind == "internet-gateway" and thing.properties.get("VpcId"):
        raise Refused(
            "DependencyViolation",
            f"The internetGateway '{id}' has dependencies and cannot be deleted.",
        )
    del account.things[id]


def _delete(operation: str) -> None:
    kind, key = DELETES[operation]

    def delete(account: Account, **request: Any) -> dict[str, Any]:
        remove(account, kind, request[key])
        return {}

    answers("ec2", operation)(delete)


for _operation in DELETES:
    _delete(_operation)


def _authorize(operation: str) -> None:
    def authorize(
        account: Account, GroupId: str, IpPermissions: list[dict[str, Any]]
    ) -> dict[str, Any]:
        rules = account.get("security-group", GroupId, "InvalidGroup.NotFound").more.setdefault(
            operation, []
        )
        if any(rule in rules for rule in IpPermissions):
            raise Refused("InvalidPermission.Duplicate", "the specified rule already exists")
        rules += IpPermissions
        return {"Return": True}

    answers("ec2", operation)(authorize)


for _operation in ("AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress"):
    _authorize(_operation)


@answers("ec2", "DetachInternetGateway")
def detach_gateway(account: Account, InternetGatewayId: str, VpcId: str) -> dict[str, Any]:
    gateway = account.get(
        "internet-gateway", InternetGatewayId, "InvalidInternetGatewayID.NotFound"
    )
    if gateway.properties.get("VpcId") != VpcId:
        raise Refused(
            "Gateway.NotAttached",
            f"resource {InternetGatewayId} is not attached to network {VpcId}",
        )
    if any(
        thing.kind == "address" and VpcId == thing.properties.get("VpcId")
        for thing in account.living()
    ):
        raise Refused("DependencyViolation", f"Network {VpcId} has some mapped public address(es)")
    gateway.properties.pop("VpcId")
    return {}


@answers("ec2", "DisassociateRouteTable")
def disassociate_route_table(account: Account, AssociationId: str) -> dict[str, Any]:
    for table in account.of("route-table"):
        table.properties["Associations"] = [
            row
            for row in table.properties.get("Associations", [])
            if row["RouteTableAssociationId"] != AssociationId
        ]
    return {}


@answers("ec2", "DeleteVpcEndpoints")
def delete_endpoints(account: Account, VpcEndpointIds: list[str]) -> dict[str, Any]:
    for id in VpcEndpointIds:
        remove(account, "endpoint", id)
    return {"Unsuccessful": []}


@answers("ec2", "DeleteFlowLogs")
def delete_flow_logs(account: Account, FlowLogIds: list[str]) -> dict[str, Any]:
    for id in FlowLogIds:
        remove(account, "flow-log", id)
    return {"Unsuccessful": []}


@answers("ec2", "CreateTags")
def create_tags(
    account: Account, Resources: list[str], Tags: list[dict[str, str]]
) -> dict[str, Any]:
    for id in Resources:
        if id not in account.things:
            raise Refused("InvalidID", f"The ID '{id}' is not valid")
        account.things[id].tags |= tags_of(Tags)
    return {}


# Instances


def launch(
    account: Account, properties: Mapping[str, Any], tags: Mapping[str, str], made_by: str = ""
) -> Thing:
    """Starts one instance, or refuses: no capacity in the zone, or a type that the zone has not."""
    data = dict(launch_data(account, properties)) | {
        key: value for key, value in properties.items() if key != "LaunchTemplate"
    }
    type_, zone = data.get("InstanceType", "m5.large"), zone_of(account, data)
    if zone in account.offered and type_ not in account.offered[zone]:
        raise Refused("Unsupported", f"Your requested instance type ({type_}) is not supported in your requested Availability "
                      f"Zone ({zone}). Please retry your request by not specifying an Availability Zone.")  # fmt: skip
    baked.require_startable(account, data)
    running = sum(thing.properties.get("InstanceType") == type_ and thing.more["zone"] == zone for thing in account.living()
                  if thing.kind == "instance")  # fmt: skip
    if running >= account.capacity.get((zone, type_), 1000):
        raise Refused("InsufficientInstanceCapacity", f"We currently do not have sufficient {type_} capacity in the Availability "
                      f"Zone you requested ({zone}). Our system will be working on provisioning additional capacity.")  # fmt: skip
    id = account.new_id("i-")
    instance = account.add("instance", id, data, dict(tags), made_by, zone=zone, address="")
    instance.state = "pending"
    for specification in data.get("TagSpecifications", ()):
        if specification["ResourceType"] == "instance":
            instance.tags |= tags_of(specification["Tags"])
    instance.more["address"] = (
        account.address_of(instance)
        if account.address_of
        else f"10.0.{len(account.things) % 250}.{int(id[2:], 16) % 250 + 4}"
    )
    _attach(account, instance, data)
    account.on_launch(instance)
    account.later(BOOT, lambda: _runs(instance))
    return instance


def launch_data(account: Account, properties: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the launch template of an instance says, in the version that is asked for."""
    wanted = properties.get("LaunchTemplate")
    if not wanted:
        return {}
    template = next((thing for thing in account.things.values() if thing.kind == "launch-template" and (
        thing.id == wanted.get("LaunchTemplateId") or thing.more.get("LaunchTemplateName") == wanted.get("LaunchTemplateName", "?"))), None)  # fmt: skip
    if template is None:
        raise Refused(
            "InvalidLaunchTemplateId.NotFound", "The specified launch template does not exist"
        )
    return template.properties["LaunchTemplateData"]


def zone_of(account: Account, data: Mapping[str, Any]) -> str:
    placed = data.get("AvailabilityZone") or data.get("Placement", {}).get("AvailabilityZone")
    subnets = [
        data.get("SubnetId"),
        *(card.get("SubnetId") for card in data.get("NetworkInterfaces", ())),
    ]
    known = [
        account.things[subnet].properties.get("AvailabilityZone")
        for subnet in subnets
        if subnet in account.things
    ]
    return placed or next(filter(None, known), account.zones[0])


def _attach(account: Account, instance: Thing, data: Mapping[str, Any]) -> None:
    """The instance's own interfaces and volumes, with the tags that its launch template gives them."""
    given = {row["ResourceType"]: tags_of(row["Tags"]) for row in data.get("TagSpecifications", ())}
    cards = data.get("NetworkInterfaces") or [
        {"SubnetId": data.get("SubnetId"), "Groups": data.get("SecurityGroupIds", [])}
    ]
    for card in cards:
        properties = {
            "SubnetId": card.get("SubnetId"),
            "Groups": card.get("Groups", []),
            "Attachment": {"InstanceId": instance.id},
        }
        properties["VpcId"] = getattr(
            account.things.get(str(card.get("SubnetId"))), "properties", {}
        ).get("VpcId")
        account.add(
            "network-interface",
            account.new_id("eni-"),
            properties,
            given.get("network-interface", {}),
            instance.id,
        )
    for disk in data.get("BlockDeviceMappings", ()):
        if ebs := disk.get("Ebs"):
            account.add("volume", account.new_id("vol-"), {"Size": ebs.get("VolumeSize", 8), "VolumeType": ebs.get("VolumeType", "gp3"),
                        "Attachment": instance.id}, given.get("volume", {}), instance.id, DeleteOnTermination=ebs.get("DeleteOnTermination", True), device=disk["DeviceName"]).state = "in-use"  # fmt: skip


def _runs(instance: Thing) -> None:
    if instance.state == "pending":
        instance.state = "running"


def terminate(account: Account, id: str) -> None:
    """Begins the end of an instance: its interfaces and volumes go with it, and it is remembered for an hour."""
    instance = account.get("instance", id, "InvalidInstanceID.NotFound")
    if instance.state in ("shutting-down", "terminated"):
        return
    instance.state = "shutting-down"
    account.on_end(instance)

    def gone() -> None:
        instance.state = "terminated"
        for thing in [thing for thing in account.things.values() if thing.made_by == id]:
            if thing.more.get("DeleteOnTermination", True):
                account.things.pop(thing.id)
            else:
                thing.state = "available"
                thing.properties.pop("Attachment", None)
        account.later(REMEMBERED, lambda: account.things.pop(id, None))

    account.later(END, gone)


@answers("ec2", "DescribeInstances")
def describe_instances(
    account: Account,
    InstanceIds: Iterable[str] = (),
    Filters: Iterable[Mapping[str, Any]] = (),
    **_: Any,
) -> dict[str, Any]:
    rows = [
        _instance(account, thing)
        for thing in chosen(account, "instance", "InvalidInstanceID.NotFound", InstanceIds, Filters)
    ]
    return {
        "Reservations": [
            {"ReservationId": f"r-{row['InstanceId'][2:]}", "Instances": [row]} for row in rows
        ]
    }


def _instance(account: Account, thing: Thing) -> dict[str, Any]:
    row = {
        "InstanceId": thing.id, "InstanceType": thing.properties.get("InstanceType", "m5.large"), "Tags": tag_list(thing.tags),
        "State": {"Name": thing.state, "Code": 16}, "LaunchTime": moment_of(thing.since),
        "Placement": {"AvailabilityZone": thing.more["zone"], "GroupName": ""}, "ImageId": thing.properties.get("ImageId", "ami-0"),
    }  # fmt: skip
    if thing.state in ("pending", "running", "stopping", "stopped"):
        row |= {"PrivateIpAddress": thing.more["address"], "SubnetId": "subnet-0", "VpcId": "vpc-0"}
        if public := thing.more.get("public"):
            row["PublicIpAddress"] = public
    disks = [
        one.more["device"]
        for one in account.things.values()
        if one.kind == "volume" and one.properties.get("Attachment") == thing.id
    ]
    row |= {
        "RootDeviceName": baked.ROOT,
        "BlockDeviceMappings": [{"DeviceName": disk, "Ebs": {}} for disk in disks],
    }
    if thing.more.get("why"):
        row |= {"StateReason": {"Code": thing.more["why"], "Message": thing.more["why"]}}
    return row


@answers("ec2", "TerminateInstances")
def terminate_instances(account: Account, InstanceIds: list[str]) -> dict[str, Any]:
    for id in InstanceIds:
        terminate(account, id)
    return {
        "TerminatingInstances": [
            {"InstanceId": id, "CurrentState": {"Name": "shutting-down"}} for id in InstanceIds
        ]
    }


@answers("ec2", "StartInstances")
def start_instances(account: Account, InstanceIds: list[str]) -> dict[str, Any]:
    for id in InstanceIds:
        instance = account.get("instance", id, "InvalidInstanceID.NotFound")
        if instance.state not in ("stopped", "running"):
            raise Refused(
                "IncorrectInstanceState",
                f"The instance '{id}' is not in a state from which it can be started.",
            )
        instance.state = "pending"
        account.on_launch(instance)
        account.later(BOOT, lambda instance=instance: _runs(instance))  # type: ignore[misc]
    return {"StartingInstances": [{"InstanceId": id} for id in InstanceIds]}


@answers("ec2", "GetConsoleOutput")
def console_output(account: Account, InstanceId: str, Latest: bool = False) -> dict[str, Any]:
    instance = account.get("instance", InstanceId, "InvalidInstanceID.NotFound")
    text = instance.more.get("console", "") if instance.state == "running" else ""
    return {"InstanceId": InstanceId, "Output": text, "Timestamp": moment_of(account.now)}


@answers("ec2", "DescribeInstanceTypeOfferings")
def offerings(
    account: Account,
    LocationType: str = "region",
    Filters: Iterable[Mapping[str, Any]] = (),
    **_: Any,
) -> dict[str, Any]:
    types = [value for one in Filters if one["Name"] == "instance-type" for value in one["Values"]]
    rows = [{"InstanceType": type_, "LocationType": LocationType, "Location": zone} for type_ in types for zone in account.zones
            if type_ in account.offered.get(zone, {type_})]  # fmt: skip
    return {"InstanceTypeOfferings": rows}


@answers("ec2", "DescribeAvailabilityZones")
def zones(account: Account, **_: Any) -> dict[str, Any]:
    return {"AvailabilityZones": [{"ZoneName": zone, "State": "available", "ZoneId": f"use1-az{number}", "RegionName": account.region,
                                   "ZoneType": "availability-zone"} for number, zone in enumerate(account.zones, 1)]}  # fmt: skip


@answers("ec2", "DescribeCapacityReservations")
def reservations(
    account: Account, CapacityReservationIds: Iterable[str] = (), **_: Any
) -> dict[str, Any]:
    things = chosen(
        account,
        "capacity-reservation",
        "InvalidCapacityReservationId.NotFound",
        CapacityReservationIds,
        (),
    )
    return {
        "CapacityReservations": [
            {"CapacityReservationId": thing.id, "State": thing.state, **thing.properties}
            for thing in things
        ]
    }
