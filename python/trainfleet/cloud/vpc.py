"""The network of a fleet: a VPC with a public and a private subnet in one zone, or the user's own,
and who may reach whom.
"""

from __future__ import annotations

from typing import Any

from ..config import Config
from .template_inputs import Inputs

Resource = dict[str, Any]
Resources = dict[str, Resource]

WHOLE, PUBLIC, PRIVATE = "10.0.0.0/16", "10.0.0.0/24", "10.0.128.0/17"
ANYWHERE, SSH = "0.0.0.0/0", 22


def ref(name: str) -> dict[str, str]:
    return {"Ref": name}


def attribute(name: str, of: str) -> dict[str, list[str]]:
    return {"Fn::GetAtt": [name, of]}


def resource(kind: str, **properties: Any) -> Resource:
    return {"Type": kind, "Properties": properties}


def after(name: str, made: Resource) -> Resource:
    """A resource that is made when another is there, which it does not name."""
    return {**made, "DependsOn": name}


def vpc(config: Config) -> Any:
    """The VPC, as other resources name it."""
    return config.fleet.aws.vpc or ref("Vpc")


def subnet(inputs: Inputs) -> Any:
    """The subnet of nodes and file system, as other resources name it."""
    return inputs.subnet or ref("PrivateSubnet")


def network(config: Config, inputs: Inputs) -> Resources:
    """The network that is made; nothing where the config names a VPC. What is kept has no way out,
    which costs money.
    """
    if config.fleet.aws.vpc:
        return {}
    private = {
        "Vpc": resource(
            "AWS::EC2::VPC", CidrBlock=WHOLE, EnableDnsSupport=True, EnableDnsHostnames=True
        ),
        "PrivateSubnet": resource(
            "AWS::EC2::Subnet", VpcId=ref("Vpc"), CidrBlock=PRIVATE, AvailabilityZone=ref("Zone")
        ),
        "PrivateRoutes": resource("AWS::EC2::RouteTable", VpcId=ref("Vpc")),
        "PrivateRoutesOfSubnet": _of_subnet("Private"),
        "S3Endpoint": resource(
            "AWS::EC2::VPCEndpoint",
            VpcId=ref("Vpc"),
            VpcEndpointType="Gateway",
            ServiceName=f"com.amazonaws.{inputs.region}.s3",
            RouteTableIds=[ref("PrivateRoutes")],
        ),
    }
    return private if inputs.kept else private | _way_out()


def _way_out() -> Resources:
    """The public subnet, and the NAT gateway there through which private nodes reach the
    Internet.
    """
    address = attribute("NatAddress", "AllocationId")
    return {
        "Gateway": resource("AWS::EC2::InternetGateway"),
        "GatewayOfVpc": resource(
            "AWS::EC2::VPCGatewayAttachment", VpcId=ref("Vpc"), InternetGatewayId=ref("Gateway")
        ),
        "PublicSubnet": resource(
            "AWS::EC2::Subnet", VpcId=ref("Vpc"), CidrBlock=PUBLIC, AvailabilityZone=ref("Zone")
        ),
        "PublicRoutes": resource("AWS::EC2::RouteTable", VpcId=ref("Vpc")),
        "PublicRoutesOfSubnet": _of_subnet("Public"),
        "PublicWay": after("GatewayOfVpc", _route("Public", GatewayId=ref("Gateway"))),
        "NatAddress": after("GatewayOfVpc", resource("AWS::EC2::EIP", Domain="vpc")),
        "Nat": after(
            "PublicWay",
            resource("AWS::EC2::NatGateway", SubnetId=ref("PublicSubnet"), AllocationId=address),
        ),
        "PrivateWay": _route("Private", NatGatewayId=ref("Nat")),
    }


def _route(name: str, **way: Any) -> Resource:
    return resource(
        "AWS::EC2::Route", RouteTableId=ref(f"{name}Routes"), DestinationCidrBlock=ANYWHERE, **way
    )


def _of_subnet(name: str) -> Resource:
    kind = "AWS::EC2::SubnetRouteTableAssociation"
    return resource(kind, SubnetId=ref(f"{name}Subnet"), RouteTableId=ref(f"{name}Routes"))


def walls(config: Config, inputs: Inputs) -> Resources:
    """The security groups. EFA needs its group open to itself in both directions: a way out to
    anywhere does not count as one.
    """
    text = f"trainfleet {config.fleet_name}: nodes and file system, open to each other"
    out = [{"IpProtocol": "-1", "CidrIp": ANYWHERE, "Description": "packages, images, S3, SSM"}]
    group: dict[str, Any] = {
        "GroupId": ref("Wall"),
        "IpProtocol": "-1",
        "Description": "EFA, Lustre and the ranks themselves",
    }
    found = {
        "Wall": resource(
            "AWS::EC2::SecurityGroup",
            VpcId=vpc(config),
            GroupDescription=text,
            SecurityGroupEgress=out,
        ),
        "WallIn": resource(
            "AWS::EC2::SecurityGroupIngress", **group, SourceSecurityGroupId=ref("Wall")
        ),
        "WallOut": resource(
            "AWS::EC2::SecurityGroupEgress", **group, DestinationSecurityGroupId=ref("Wall")
        ),
    }
    aws = config.fleet.aws
    if inputs.kept:
        return found
    if aws.bastion_type:
        text = f"trainfleet {config.fleet_name}: the head node"
        way = _ssh("Wall", "the head node") | {"SourceSecurityGroupId": ref("HeadWall")}
        found["HeadWall"] = resource(
            "AWS::EC2::SecurityGroup",
            VpcId=vpc(config),
            GroupDescription=text,
            SecurityGroupEgress=out,
        )
        found["WallFromHead"] = resource("AWS::EC2::SecurityGroupIngress", **way)
    outer = "HeadWall" if aws.bastion_type else "Wall"
    for number, addresses in enumerate(aws.allow_ssh_from):
        way = _ssh(outer, "you") | {"CidrIp": addresses}
        found[f"SshFrom{number}"] = resource("AWS::EC2::SecurityGroupIngress", **way)
    return found


def _ssh(group: str, whom: str) -> dict[str, Any]:
    return {
        "GroupId": ref(group),
        "IpProtocol": "tcp",
        "FromPort": SSH,
        "ToPort": SSH,
        "Description": f"SSH from {whom}",
    }
