"""Resources that outlive a cluster: the network, and the file system left by an earlier cluster.

Unless the config names subnets, setup creates the network before the cluster, and cleanup removes
it after the cluster. The network belongs to the config that created the cluster. Other configs that
use the cluster use the same subnets.

With several zones, the network stack also contains the file system, because ParallelCluster creates
one only for a single subnet (its ManagedFsxMultiAzValidator).

ParallelCluster creates the file system with DeletionPolicy Retain, so it and its security group
remain after the cluster is deleted. The config's next cluster finds the file system by tag and
reuses it. Its security group's rules refer to groups of the deleted cluster. Setup therefore opens
Lustre's ports to the file system's network (FSx for Lustre user guide, "File system access control
with Amazon VPC").

Not tested: a real ParallelCluster cluster that reuses a file system.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import replace

import yaml

from ...cloud import prices
from ...cloud.calls import Calls, Json, Row, passing
from ...cloud.resource_types import is_ours, tags_of
from ...cloud.scheduler_template import NETWORK, SchedulerStack
from ...cloud.template_storage import makes_file_system
from ...config import Config
from ...plan.job import Artifact
from ...trust.errors import NotAsked
from ..node_script import artifact
from .cluster_file import links

FILE = "network.yaml"
STACK = "aws:cloudformation:stack-id"


def network_stack(config: Config, maker: str = "") -> SchedulerStack:
    """Returns the network's stack.

    `maker` is the config that created the existing cluster, or "" if there is no cluster.
    """
    return SchedulerStack(replace(config, name=maker or config.fleet_name), NETWORK)


def with_network(config: Config, maker: str = "") -> Config:
    """Returns the config with subnets for the nodes and the head node: the configured ones, or
    those of the existing network stack. If that stack has a file system, the config names it.
    """
    fleet = config.fleet
    if fleet.aws.subnets:
        return config
    try:
        state = network_stack(config, maker).stack.look()
    except NotAsked:
        state = None
    names = ["Private", *(f"Private{number}" for number in range(1, len(fleet.aws.zones)))]
    if state is None or not {*names, "Public"} <= state.outputs.keys():
        return config
    made = state.outputs
    cluster = replace(fleet.slurm.parallelcluster, head_subnet=made["Public"])
    aws = replace(fleet.aws, subnets=tuple(made[name] for name in names))
    slurm = replace(fleet.slurm, parallelcluster=cluster)
    fsx = (
        replace(fleet.fsx, dns_name=made["DNSName"], mount_name=made["LustreMountName"])
        if "DNSName" in made
        else fleet.fsx
    )
    return replace(config, fleet=replace(fleet, aws=aws, slurm=slurm, fsx=fsx))


def network_changes(config: Config, maker: str = "") -> tuple[Artifact, ...]:
    """Returns the request that would create or update the network.

    Returns () if the config names subnets or another config owns the network.
    """
    if config.fleet.aws.subnets or maker not in ("", config.fleet_name):
        return ()
    found: list[Artifact] = []
    for number, (service, operation, body) in enumerate(
        network_stack(config).foresee(set()).requests, 1
    ):
        template = json.loads(str(body["TemplateBody"]))
        found += [
            Artifact(FILE, yaml.safe_dump(template, sort_keys=False)),
            artifact(number, service, operation, body),
        ]
    return tuple(found)


def left_behind(config: Config, calls: Calls, maker: str = "", stack: str = "") -> Row | None:
    """Returns the file system left by an earlier cluster of this config, or None if there isn't
    one.

    Also returns None if the config needs no file system, or if the existing cluster already created
    one. `maker` is the config that created the existing cluster, and `stack` is the ARN of that
    cluster's stack.
    """
    if not makes_file_system(config):
        return None
    try:
        rows = list(calls.pages("fsx", "DescribeFileSystems", "FileSystems"))
    except NotAsked:
        return None
    ours = [
        row
        for row in rows
        if row.get("Lifecycle") == "AVAILABLE"
        and is_ours(tags_of(row.get("Tags")), maker or config.fleet_name)
    ]
    if stack and any(tags_of(row["Tags"]).get(STACK) == stack for row in ours):
        return None
    return max(ours, key=lambda row: row["CreationTime"], default=None)


def with_file_system(config: Config, row: Row | None) -> Config:
    """Returns the config with `row` as its existing file system."""
    if row is None:
        return config
    lustre = row.get("LustreConfiguration", {})
    fsx = replace(
        config.fleet.fsx,
        dns_name=str(row["DNSName"]),
        mount_name=str(lustre.get("MountName") or "fsx"),
    )
    return replace(config, fleet=replace(config.fleet, fsx=fsx))


def describe_file_system(config: Config, calls: Calls, row: Row) -> Iterator[str]:
    """Yields lines describing the file system, and commands that recreate its missing S3 links."""
    id_ = str(row["FileSystemId"])
    what, usd = prices.cost_of("file system", row)
    cost = "" if usd is None else f", ${usd * 24:,.2f} a day"
    yield (
        f"reusing {id_} ({what}{cost}), which an earlier make clean kept with its data; make "
        "clean PURGE=1 removes it"
    )
    if row.get("StorageCapacity") != config.fleet.fsx.size_gib:
        yield f"  it has {row.get('StorageCapacity')} GiB, regardless of fleet.fsx.size_gib"
    of_it = [{"Name": "file-system-id", "Values": [id_]}]
    there = {
        str(one.get("FileSystemPath"))
        for one in calls.pages(
            "fsx", "DescribeDataRepositoryAssociations", "Associations", Filters=of_it
        )
    }
    for link in links(config):
        if link["FileSystemPath"] not in there:
            yield (
                f"  its {link['FileSystemPath']} is no longer linked to "
                f"{link['DataRepositoryPath']}; to link it, run:"
            )
            yield f"  {_command(id_, link, calls.region)}"


def _command(id_: str, link: Json, region: str) -> str:
    """Returns the AWS CLI command that links a folder of the file system to S3."""
    kind = next(kind for kind in ("AutoImportPolicy", "AutoExportPolicy") if kind in link)
    policy = f"{kind}={{Events=[{','.join(link[kind])}]}}"
    asked = f"aws fsx create-data-repository-association --region {region} --file-system-id {id_}"
    folders = shlex.join(
        [link["FileSystemPath"], "--data-repository-path", link["DataRepositoryPath"]]
    )
    return f"{asked} --file-system-path {folders} --s3 {shlex.quote(policy)}"


def open_to_network(calls: Calls, row: Row) -> None:
    """Opens Lustre's ports to the file system's network, in security groups that trainfleet
    created.

    Skips rules that already exist.
    """
    cards = calls(
        "ec2", "DescribeNetworkInterfaces", NetworkInterfaceIds=list(row["NetworkInterfaceIds"])
    )["NetworkInterfaces"]
    (vpc,) = calls("ec2", "DescribeVpcs", VpcIds=[str(row["VpcId"])])["Vpcs"]
    first, last = 988, 1023  # Lustre's TCP ports
    way = [
        {
            "IpProtocol": "tcp",
            "FromPort": first,
            "ToPort": last,
            "IpRanges": [{"CidrIp": str(vpc["CidrBlock"])}],
        }
    ]
    groups = sorted({str(group["GroupId"]) for card in cards for group in card.get("Groups", ())})
    for group in (
        calls("ec2", "DescribeSecurityGroups", GroupIds=groups)["SecurityGroups"] if groups else ()
    ):
        if is_ours(tags_of(group.get("Tags")), None):
            for operation in ("AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress"):
                with passing("InvalidPermission.Duplicate"):
                    calls("ec2", operation, GroupId=group["GroupId"], IpPermissions=way)
