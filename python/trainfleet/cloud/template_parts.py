"""Makes the template's network, security groups and roles.

The network is a VPC with a public and a private subnet in one zone, or the user's own. Roles allow
only SSM, the config's buckets, its images and its log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..config import Config
from ..config.tables import read_table
from ..storage import s3
from .repository import pulled
from .template_inputs import Inputs, bucket_of

Resource = dict[str, Any]
Resources = dict[str, Resource]

WHOLE, PUBLIC, PRIVATE = "10.0.0.0/16", "10.0.0.0/24", "10.0.128.0/17"
# Private subnets in other zones: 10.0.16.0/20, 10.0.32.0/20 ... No region has more than six zones.
OTHERS, OTHERS_BITS = 16, 20
ANYWHERE, SSH = "0.0.0.0/0", 22
LUSTRE_PORTS = 988, 1023  # first and last of Lustre's TCP ports
AGENT = "AmazonSSMManagedInstanceCore"  # AWS's managed policy for machines with an SSM agent
ROLE_ACTIONS: dict[str, list[str]] = read_table(Path(__file__).with_name("role_actions.yaml"))


def ref(name: str) -> dict[str, str]:
    return {"Ref": name}


def attribute(name: str, of: str) -> dict[str, list[str]]:
    return {"Fn::GetAtt": [name, of]}


def resource(kind: str, **properties: Any) -> Resource:
    return {"Type": kind, "Properties": properties}


def after(name: str, made: Resource) -> Resource:
    """Returns the resource with a dependency on the resource of this name."""
    return {**made, "DependsOn": name}


def vpc(config: Config) -> Any:
    """Returns the VPC's id, or a reference to the stack's VPC."""
    return config.fleet.aws.vpc or ref("Vpc")


def subnet(inputs: Inputs) -> Any:
    """Returns the id of the nodes' subnet, or a reference to the stack's private subnet."""
    return inputs.subnet or ref("PrivateSubnet")


def network(config: Config, inputs: Inputs) -> Resources:
    """Makes the network; empty if the config names a VPC.

    A stack that only keeps data has no NAT gateway, because the gateway costs money.
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
    """Makes the public subnet with the NAT gateway, the private nodes' way to the Internet."""
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


def another_zone(number: int, zone: str) -> Resources:
    """Makes a private subnet in another zone, which uses the first zone's NAT gateway."""
    name = f"Private{number}"
    made = resource(
        "AWS::EC2::Subnet",
        VpcId=ref("Vpc"),
        CidrBlock=f"10.0.{OTHERS * number}.0/{OTHERS_BITS}",
        AvailabilityZone=zone,
    )
    return {f"{name}Subnet": made, f"{name}RoutesOfSubnet": _of_subnet(name, "Private")}


def lustre_in() -> Resource:
    """Makes the rule that opens the file system to the whole network, on Lustre's ports."""
    first, last = LUSTRE_PORTS
    return resource(
        "AWS::EC2::SecurityGroupIngress",
        GroupId=ref("Wall"),
        IpProtocol="tcp",
        FromPort=first,
        ToPort=last,
        CidrIp=WHOLE,
        Description="Lustre, from the cluster's nodes",
    )


def _route(name: str, **way: Any) -> Resource:
    return resource(
        "AWS::EC2::Route", RouteTableId=ref(f"{name}Routes"), DestinationCidrBlock=ANYWHERE, **way
    )


def _of_subnet(name: str, routes: str = "") -> Resource:
    kind, table = "AWS::EC2::SubnetRouteTableAssociation", f"{routes or name}Routes"
    return resource(kind, SubnetId=ref(f"{name}Subnet"), RouteTableId=ref(table))


def walls(config: Config, inputs: Inputs) -> Resources:
    """Makes the security groups.

    EFA needs a group that allows all traffic to and from itself. A rule for all outgoing traffic is
    not enough.
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


def written(config: Config, inputs: Inputs) -> set[str]:
    """Returns the buckets that a run writes to."""
    addresses = (config.data.tokenized_path, config.checkpoint.path, config.fleet.shared_folder)
    # A scheduler's stack has no bucket.
    own = {bucket_of(config, inputs)} if config.fleet.aws.bucket or not inputs.scheduler else set()
    return own | set(_buckets(addresses))


def only_read(config: Config, inputs: Inputs) -> set[str]:
    """Returns the buckets that a run only reads."""
    addresses = (
        config.fleet.fsx.s3_import,
        config.train.init_from,
        *(source.path for source in config.data.mixture),
    )
    return set(_buckets(addresses)) - written(config, inputs)


def _buckets(addresses: Iterable[str | None]) -> Iterator[str]:
    return (
        s3.split(address)[0] for address in addresses if address and address.startswith(s3.SCHEME)
    )


def roles(config: Config, inputs: Inputs) -> Resources:
    """Makes the roles of nodes and head, with their instance profiles."""
    allowed = [*statements(config, inputs), *pulls(config, inputs)]
    found = {
        "NodeRole": role(inputs, "ec2.amazonaws.com", allowed, [AGENT]),
        "NodeProfile": resource("AWS::IAM::InstanceProfile", Roles=[ref("NodeRole")]),
    }
    if config.fleet.aws.bastion_type:
        found["HeadRole"] = role(inputs, "ec2.amazonaws.com", (), [AGENT])
        found["HeadProfile"] = resource("AWS::IAM::InstanceProfile", Roles=[ref("HeadRole")])
    return found


def statements(config: Config, inputs: Inputs) -> Iterator[dict[str, Any]]:
    """Yields the statements that ranks need: data, checkpoints, log."""
    for access, buckets in (
        ("write", written(config, inputs)),
        ("read", only_read(config, inputs)),
    ):
        arns = [f"arn:{inputs.partition}:s3:::{name}" for name in sorted(buckets)]
        if arns:
            yield allow("list", arns)
            yield allow(access, [f"{arn}/*" for arn in arns])
    yield allow("log", [attribute("Log", "Arn")])


def pulls(config: Config, inputs: Inputs) -> Iterator[dict[str, Any]]:
    """Yields the statements of a role that pulls the image itself."""
    if source := pulled(config, inputs):
        yield allow("login", ["*"])
        yield allow("pull", [source])


def keys(config: Config, inputs: Inputs) -> Iterator[dict[str, Any]]:
    """Yields the statements for a training job's use of fleet.sagemaker.kms_key. The key's policy
    must allow the same actions.

    The config may name the key by id, alias, or the ARN of either. A policy's resource can't be an
    alias, so the statement has a condition instead. Source: the SageMaker API's OutputDataConfig
    and ResourceConfig, KmsKeyId (2026-11-23).
    """
    key = config.fleet.sagemaker.kms_key
    if key is None:
        return
    home = f"arn:{inputs.partition}:kms:{inputs.region}:{inputs.account}:"
    arn = key
    if not key.startswith("arn:"):
        arn = home + (key if key.startswith("alias/") else f"key/{key}")
    where, _, alias = arn.partition(":alias/")
    named = {"ForAnyValue:StringEquals": {"kms:ResourceAliases": f"alias/{alias}"}} if alias else {}
    resources = [f"{where}:key/*" if alias else arn]
    yield allow("use key", resources, named)
    by_aws = {"Bool": {"kms:GrantIsForAWSResource": "true"}}
    yield allow("grant key", resources, named | by_aws)


def allow(
    access: str, resources: list[Any], conditions: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns a statement with the actions of a row of role_actions.yaml."""
    return statement(ROLE_ACTIONS[access], resources, conditions)


def statement(
    actions: list[str], resources: list[Any], conditions: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns a policy's statement that allows the actions."""
    allowed = {"Effect": "Allow", "Action": actions, "Resource": resources}
    return allowed | ({"Condition": conditions} if conditions else {})


def role(
    inputs: Inputs, service: str, allowed: Iterable[dict[str, Any]], managed: Iterable[str] = ()
) -> Resource:
    """Makes a role that `service` assumes. `managed`: names of AWS's managed policies."""
    trust = {"Effect": "Allow", "Action": ["sts:AssumeRole"], "Principal": {"Service": [service]}}
    made = resource(
        "AWS::IAM::Role", AssumeRolePolicyDocument={"Version": "2012-10-17", "Statement": [trust]}
    )
    if arns := [f"arn:{inputs.partition}:iam::aws:policy/{name}" for name in managed]:
        made["Properties"]["ManagedPolicyArns"] = arns
    if statements := list(allowed):
        policy = {"Version": "2012-10-17", "Statement": statements}
        made["Properties"]["Policies"] = [{"PolicyName": "run", "PolicyDocument": policy}]
    return made
