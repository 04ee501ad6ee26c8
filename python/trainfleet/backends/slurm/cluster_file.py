"""Builds the AWS ParallelCluster cluster file and the node setup script from a config. Pure.

Sources: docs.aws.amazon.com/parallelcluster/latest/ug (cluster configuration file: HeadNode,
Scheduling, SharedStorage, CustomActions, Capacity Blocks), and the schema and validators of
ParallelCluster 3.16, which check these files in tests/oracles. Tested: the file. Not tested: a real
cluster and the contents of its image.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import yaml

from ...cloud import spending
from ...cloud.calls import partition_of
from ...cloud.instances import capacity_of
from ...cloud.prices import Prices
from ...cloud.template_inputs import LONGEST_WITH_DATABASE, cluster_name, own_tags, pairs
from ...cloud.template_storage import makes_file_system, refuse_size, refuse_unmade
from ...config import Config
from ...config.types import Queue
from ...hardware import node_types
from ...hosts.install_steps import NOFILE, InstallStep, neuron_step
from ...hosts.platform import load_platform, load_system
from ...plan.job import Artifact
from ...process.install_paths import ROOT

FILE, SCRIPT = "cluster.yaml", "node.sh"
QUEUES = "fleet.slurm.parallelcluster.queues"
HEAD = "c5.4xlarge"  # head node instance type in the AWS article that the recipe follows
# Allowed SSH source if only Session Manager has access. ParallelCluster's default is all addresses.
NOBODY = "127.0.0.1/32"
# operating systems whose Python version is covered by the package lock
WITH_PYTHON = ("ubuntu2404",)
NONE_YET = f"fs-{0:017}"  # in a plan, while setup has not created the file system
HEAD_DISK = 200  # GiB for home folders and the compiler toolchain
BOUGHT = {
    "on-demand": "ONDEMAND",
    "spot": "SPOT",
    "reservation": "ONDEMAND",
    "block": "CAPACITY_BLOCK",
}
RESERVED_KINDS = ("reservation", "block")
LONGEST_QUEUE = 25  # characters of a queue's name (ParallelCluster's NAME_MAX_LENGTH)
CHANGES = ["NEW", "CHANGED", "DELETED"]
# NVIDIA kernel modules missing from ParallelCluster's images, which since version 3.8 include only
# the open ones.
CLOSED = "proprietary"
# Mount points that ParallelCluster rejects (its ReservedMountDirValidator).
RESERVED = re.compile(
    "/(bin|boot|dev|etc|home|lib|lib64|media|mnt|opt|opt/intel|opt/parallelcluster|"
    "opt/parallelcluster/shared|opt/slurm|proc|root|run|sbin|srv|sys|tmp|usr|var)"
)


def queues_of(config: Config) -> tuple[Queue, ...]:
    """Returns the queues, with unset values taken from the fleet."""
    fleet = config.fleet
    queues = fleet.slurm.parallelcluster.queues or (Queue("compute1"),)
    return tuple(
        Queue(
            queue.name,
            queue.instance_type or fleet.instance_type,
            queue.min,
            queue.max or fleet.nodes,
            queue.capacity or capacity_of(config),
            queue.reservation or fleet.aws.reservation,
        )
        for queue in queues
    )


def key_of(config: Config) -> str:
    """Returns the name of the head node's key pair: the configured one, or the one that setup
    creates.
    """
    return config.fleet.aws.key_pair or f"trainfleet-{cluster_name(config)}"


def queue_of(config: Config) -> Queue:
    """Returns the queue that jobs use: the first in fleet.slurm.partition, or else the
    first queue.
    """
    queues, asked = queues_of(config), (config.fleet.slurm.partition or "").split(",")
    return next((queue for queue in queues if queue.name in asked), queues[0])


def costs(config: Config, prices: Prices) -> spending.Spending:
    """Returns the cost of the cluster while a job is running."""
    queue = queue_of(config)
    others = [other for other in queues_of(config) if other.name != queue.name]
    return spending.of_cluster(
        config, prices, queue, others, (config.fleet.aws.bastion_type or HEAD, HEAD_DISK)
    )


def subnets_of(config: Config) -> tuple[str, ...]:
    """Returns the nodes' subnets, one per zone. In a plan, their ids are placeholders while the
    network does not exist.
    """
    zones = max(1, len(config.fleet.aws.zones))
    return config.fleet.aws.subnets or tuple(f"subnet-{number:017}" for number in range(zones))


def in_zone(name: str, number: int) -> str:
    """Returns the name of a queue's copy in a zone. ParallelCluster allows nodes with EFA or in a
    placement group only in queues with one subnet.
    """
    return f"{name}-{number + 1}" if number else name


def in_every_zone(config: Config) -> Config:
    """Returns the config with the partitions of every zone, so that Slurm starts a job in the first
    zone with capacity. It is unchanged for a single zone, and for a cluster that setup does not
    create.

    If a zone has no capacity, ParallelCluster sets its nodes down for ten minutes
    (docs.aws.amazon.com/parallelcluster/latest/ug/slurm-short-capacity-fail-mode-v3.html).
    """
    slurm, zones = config.fleet.slurm, range(len(subnets_of(config)))
    if len(zones) == 1 or not slurm.create:
        return config
    asked = (slurm.partition or queues_of(config)[0].name).split(",")
    every = ",".join(in_zone(name, zone) for zone in zones for name in asked)
    return replace(config, fleet=replace(config.fleet, slurm=replace(slurm, partition=every)))


def artifacts(config: Config, maker: str = "") -> tuple[Artifact, ...]:
    """Returns cluster.yaml, and node.sh if the config has a bucket.

    `maker` is the config that created the existing cluster, or "" if there is no cluster.
    """
    script = node_script(config)
    text = yaml.safe_dump(
        cluster(config, script, maker or config.fleet_name), sort_keys=False, width=120
    )
    command = f"pcluster create-cluster --cluster-configuration {FILE}"
    head = f"# The cluster {cluster_name(config)}; AWS ParallelCluster creates it: {command}"
    return Artifact(FILE, f"{head}\n{text}"), *(
        [Artifact(SCRIPT, script)] if config.fleet.aws.bucket else ()
    )


def script_address(config: Config, script: str) -> str:
    """Returns the S3 address of node.sh.

    The address contains the script's hash, so that a cluster update installs a changed script.
    """
    digest = hashlib.sha256(script.encode()).hexdigest()[:12]
    return f"s3://{config.fleet.aws.bucket}/{cluster_name(config)}/setup/node-{digest}.sh"


def node_script(config: Config) -> str:
    """Returns the script that each node runs at startup.

    It embeds this project's scripts, with the versions from docker/platforms.lock.yaml.
    """
    steps = list(_steps(config))
    texts = {
        name: (ROOT / "scripts" / name).read_text(encoding="utf-8")
        for name in sorted({"key.sh", *(step.script for step in steps)})
    }
    what = (
        f"# Sets up a node of {cluster_name(config)} with scripts/*.sh for the platform "
        f"{config.fleet.platform}"
    )
    lines = ["#!/usr/bin/env bash", what, "set -euo pipefail", "folder=$(mktemp -d)"]  # fmt: skip
    for name, text in texts.items():
        lines += [
            f"cat > \"$folder/{name}\" << 'END-OF-{name}'",
            text.rstrip("\n"),
            f"END-OF-{name}",
        ]
        lines.append(f'chmod 755 "$folder/{name}"')
    lines += [
        step.command("$folder", is_root=True).replace("$folder/", '"$folder"/') for step in steps
    ]
    return "\n".join([*lines, 'rm -rf "$folder"', ""])


def _steps(config: Config) -> Iterator[InstallStep]:
    """Yields the setup steps that ParallelCluster's image still needs: Python, the Neuron SDK, and
    limits.

    The image already contains the NVIDIA driver and EFA.
    """
    platform = load_platform(config.fleet.platform)
    if not config.fleet.python or platform.neuron_packages:
        yield InstallStep(
            "build_tools.sh",
            ("headers",) if platform.neuron_packages else (),
            "the shared Python environment needs the node's Python, and the node compiles "
            "Neuron's driver",
        )
    yield InstallStep("limits.sh", (str(NOFILE),), "limits for locked memory and open files")
    if platform.neuron_packages:
        yield neuron_step(platform, "the image has no Neuron SDK")


def cluster(config: Config, script: str, maker: str) -> dict[str, Any]:
    """Returns the contents of the cluster file."""
    fleet, wanted = config.fleet, config.fleet.slurm.parallelcluster
    image = {"Os": wanted.os} | ({"CustomAmi": fleet.aws.ami} if fleet.aws.ami else {})
    return {
        "Region": fleet.aws.region,
        "Image": image,
        "HeadNode": _head(config),
        "Scheduling": {
            "Scheduler": "slurm",
            "SlurmSettings": _settings(config),
            "SlurmQueues": [
                _queue(config, queue, script, zone)
                for zone in range(len(subnets_of(config)))
                for queue in queues_of(config)
            ],
        },
        **(
            {"SharedStorage": [_storage(config)]}
            if fleet.fsx.dns_name or makes_file_system(config)
            else {}
        ),
        "Tags": pairs(own_tags(maker)),
    }


def _head(config: Config) -> dict[str, Any]:
    aws, wanted = config.fleet.aws, config.fleet.slurm.parallelcluster
    ssh = {
        "KeyName": key_of(config),
        "AllowedIps": aws.allow_ssh_from[0] if aws.allow_ssh_from else NOBODY,
    }
    policies = f"arn:{partition_of(aws.region or '')}:iam::aws:policy"
    access = [{"Policy": f"{policies}/AmazonSSMManagedInstanceCore"}]
    return {
        "InstanceType": aws.bastion_type or HEAD,
        "Networking": {"SubnetId": wanted.head_subnet or subnets_of(config)[0]},
        "Ssh": ssh,
        "LocalStorage": {"RootVolume": {"Size": HEAD_DISK, "Encrypted": True}},
        "Iam": {"AdditionalIamPolicies": access} | _buckets(config),
    }


def _buckets(config: Config) -> dict[str, Any]:
    names = dict.fromkeys(
        filter(None, (config.fleet.aws.bucket, *config.fleet.slurm.parallelcluster.buckets))
    )
    if names:
        return {"S3Access": [{"BucketName": name, "EnableWriteAccess": True} for name in names]}
    return {}


def _settings(config: Config) -> dict[str, Any]:
    wanted, idle = config.fleet.slurm.parallelcluster, config.fleet.idle_minutes
    settings: dict[str, Any] = {
        "ScaledownIdletime": idle if idle is not None else -1,
        "QueueUpdateStrategy": "DRAIN",
    }
    if wanted.database_uri:
        settings["Database"] = {"Uri": wanted.database_uri, "UserName": wanted.database_user,
                                "PasswordSecretArn": wanted.database_secret}  # fmt: skip
    return settings


def _queue(config: Config, queue: Queue, script: str, zone: int) -> dict[str, Any]:
    aws = config.fleet.aws
    row = node_types.instance(queue.instance_type)
    block = queue.capacity == "block"
    target = {"CapacityReservationId": queue.reservation}
    is_reserved = queue.capacity in RESERVED_KINDS
    compute = {
        "Name": re.sub(r"[^a-z0-9]+", "-", (queue.instance_type or "").partition(".")[0]),
        "Instances": [{"InstanceType": queue.instance_type}],
        "MinCount": 0 if zone else queue.min,
        "MaxCount": queue.max,
        **({"Efa": {"Enabled": True}} if row and row.efa else {}),
        **({"CapacityReservationTarget": target} if is_reserved else {}),
    }
    return {
        "Name": in_zone(queue.name, zone),
        "CapacityType": BOUGHT[queue.capacity or "on-demand"],
        "ComputeResources": [compute],
        "ComputeSettings": {
            "LocalStorage": {"RootVolume": {"Size": aws.volume_gib, "Encrypted": True}}
        },
        # AWS chooses the placement of capacity block nodes:
        # https://docs.aws.amazon.com/parallelcluster/latest/ug/launch-instances-capacity-blocks.html
        "Networking": {
            "SubnetIds": [subnets_of(config)[zone]],
            "PlacementGroup": {"Enabled": not block and bool(row and row.efa)},
        },
        **(
            {"CustomActions": {"OnNodeConfigured": {"Script": script_address(config, script)}}}
            if aws.bucket
            else {}
        ),
        **({"Iam": found} if (found := _buckets(config)) else {}),
    }


def _storage(config: Config) -> dict[str, Any]:
    fsx = config.fleet.fsx
    if fsx.dns_name or len(config.fleet.aws.zones) > 1:
        settings: dict[str, Any] = {"FileSystemId": (fsx.dns_name or NONE_YET).partition(".")[0]}
    else:
        settings = {
            "StorageCapacity": fsx.size_gib,
            "DeploymentType": "SCRATCH_2",
            "DataCompressionType": "LZ4",
            "DeletionPolicy": "Retain",
        }
        if fsx.type == "persistent":
            settings |= {
                "DeploymentType": "PERSISTENT_2",
                "PerUnitStorageThroughput": fsx.throughput,
            }
        if found := list(links(config)):
            settings["DataRepositoryAssociations"] = found
    return {
        "Name": "fsx",
        "MountDir": fsx.mount_point,
        "StorageType": "FsxLustre",
        "FsxLustreSettings": settings,
    }


def links(config: Config) -> Iterator[dict[str, Any]]:
    """Yields the file system's data repository associations: folders that import from or export to
    S3.
    """
    fsx, bucket = config.fleet.fsx, config.fleet.aws.bucket
    if fsx.s3_import:
        yield {
            "Name": "linked",
            "FileSystemPath": "/linked",
            "DataRepositoryPath": fsx.s3_import,
            "BatchImportMetaDataOnCreate": True,
            "AutoImportPolicy": [*CHANGES],
        }
    if fsx.s3_export and bucket:
        inside = PurePosixPath(config.fleet.shared_folder or "").relative_to(
            fsx.mount_point.rstrip("/")
        )
        for name in ("runs", "data"):
            to = f"s3://{bucket}/{cluster_name(config)}/{name}"
            path = f"/{inside}/{name}".replace("/./", "/")
            yield {
                "Name": name,
                "FileSystemPath": path,
                "DataRepositoryPath": to,
                "AutoExportPolicy": [*CHANGES],
            }


def refuse(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (key, message) for missing settings, and for those that ParallelCluster's schema
    accepts but AWS rejects.
    """
    fleet = config.fleet
    wanted = config.fleet.slurm.parallelcluster
    key = "fleet.slurm.parallelcluster"
    if not fleet.aws.region:
        yield "fleet.aws.region", "null: the cluster file needs a region, such as us-west-2"
    if fleet.aws.subnets and fleet.aws.zones:
        yield (
            "fleet.aws.zones",
            f"{', '.join(fleet.aws.zones)}: fleet.aws.subnets already sets the nodes' zone; "
            "remove it",
        )
    if not fleet.aws.subnets and wanted.head_subnet:
        yield (
            f"{key}.head_subnet",
            f"{wanted.head_subnet}: without fleet.aws.subnets, setup creates the head's subnet; "
            "set both or neither",
        )
    if not fleet.aws.subnets and not fleet.instance_type:
        yield (
            "fleet.instance_type",
            "null: setup creates the network in a zone with this type; set it, or "
            "fleet.aws.subnets",
        )
    if load_platform(fleet.platform).neuron_packages:
        yield from _refuse_neuron(config)
    if wanted.os not in WITH_PYTHON and not fleet.aws.bucket and not fleet.python:
        works = f"set a bucket, or {key}.os {WITH_PYTHON[0]}"
        yield (
            "fleet.aws.bucket",
            f"null: {wanted.os} nodes download the Python installer from the bucket; {works}",
        )
    if len(fleet.aws.allow_ssh_from) > 1:
        one = (
            "ParallelCluster accepts only one; set a network that includes all, or [] to use "
            "Session Manager"
        )
        yield "fleet.aws.allow_ssh_from", f"{len(fleet.aws.allow_ssh_from)} networks: {one}"
    if wanted.os == "rocky9" and not fleet.aws.ami:
        yield (
            f"{key}.os",
            "rocky9: ParallelCluster has no image for it; set fleet.aws.ami",
        )
    given = [name for name in ("uri", "user", "secret") if getattr(wanted, f"database_{name}")]
    if given and len(given) < 3:
        yield (
            f"{key}.database_{given[0]}",
            "set all of database_uri, database_user and database_secret, or none",
        )
    if wanted.database_uri and len(cluster_name(config)) > LONGEST_WITH_DATABASE:
        yield (
            f"{key}.name",
            f"{cluster_name(config)}: with accounting, use at most {LONGEST_WITH_DATABASE} "
            "characters",
        )
    yield from _refuse_zones(config)
    yield from _refuse_queues(config)
    yield from _refuse_storage(config)


def _refuse_neuron(config: Config) -> Iterator[tuple[str, str]]:
    platform, wanted = load_platform(config.fleet.platform), config.fleet.slurm.parallelcluster.os
    if not config.fleet.aws.bucket:
        yield (
            "fleet.aws.bucket",
            "null: the nodes download the Neuron SDK installer from the bucket; set a bucket",
        )
    system = load_system(wanted)
    lack = "" if system.apt else "Neuron's packages need apt, and its PyTorch needs a newer glibc"
    if not lack and system.python < platform.python and not config.fleet.python:
        lack = (
            f"its Python is {system.python}, but the packages of platform {platform.name} "
            f"need {platform.python} or newer"
        )
    if lack:
        yield "fleet.slurm.parallelcluster.os", f"{wanted}: {lack}; set ubuntu2404"


def _refuse_queues(config: Config) -> Iterator[tuple[str, str]]:
    fleet, key, queues = config.fleet, QUEUES, queues_of(config)
    names = [queue.name for queue in queues]
    for queue in queues:
        yield from ((key, f"{queue.name}: {what}") for what in _lacks(queue))
        row = node_types.instance(queue.instance_type)
        if (
            row
            and not fleet.aws.ami
            and load_platform(node_types.platform_of(row)).kernel_modules == CLOSED
        ):
            what = (
                f"the NVIDIA driver of ParallelCluster's images does not support {row.name} "
                "(aws-parallelcluster issue 6014)"
            )
            yield (
                key,
                f"{queue.name}: {what}; set fleet.aws.ami to an image from pcluster build-image, "
                "or use backend ec2",
            )
    asked = fleet.slurm.partition
    if asked and (unknown := sorted(set(asked.split(",")) - set(names))):
        yield (
            "fleet.slurm.partition",
            f"{', '.join(unknown)} is not one of the queues: {', '.join(names)}",
        )
    most = max(
        (queue.max or 0 for queue in queues if not asked or queue.name in asked.split(",")),
        default=0,
    )
    if 0 < most < fleet.nodes:
        yield (
            "fleet.nodes",
            f"{fleet.nodes}: the largest queue has at most {most} nodes; set NODES={most}, or a "
            "larger max",
        )


def _refuse_zones(config: Config) -> Iterator[tuple[str, str]]:
    key, queues, zones = QUEUES, queues_of(config), len(subnets_of(config))
    names = [in_zone(queue.name, zone) for queue in queues for zone in range(zones)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield key, f"two queues have the name {', '.join(twice)}"
    if long := [name for name in names if len(name) > LONGEST_QUEUE]:
        yield key, f"{long[0]}: with {zones} zones, use at most {LONGEST_QUEUE - 3} characters"
    if zones > 1 and (bound := [one for one in queues if one.capacity in RESERVED_KINDS]):
        what = f"{bound[0].name} has capacity {bound[0].capacity}, which is in one zone"
        yield key, f"{what}; set one zone, not {zones}"


def _lacks(queue: Queue) -> Iterator[str]:
    """Yields the queue's invalid or missing settings."""
    row, most = node_types.instance(queue.instance_type), queue.max or 0
    if queue.name == "default":
        yield "Slurm reserves this name; use for example compute1"
    if queue.min > most:
        yield f"min {queue.min} is more than max {most}"
    if queue.instance_type is None:
        yield "instance_type and fleet.instance_type are null; set one of them"
    elif row is None:
        yield f"{queue.instance_type} is not a known instance type"
    elif row.accelerator and not row.efa and most > 1:
        yield (
            f"{queue.instance_type} has no EFA, so its nodes can't train together; set max 1, "
            "or use a larger size"
        )
    if queue.capacity in RESERVED_KINDS and not queue.reservation:
        yield f"capacity {queue.capacity} needs a reservation, such as cr-0123456789abcdef0"
    if queue.capacity == "block" and queue.min != most:
        yield f"a capacity block keeps all of its nodes running; set min {most}"


def _refuse_storage(config: Config) -> Iterator[tuple[str, str]]:
    fsx = config.fleet.fsx
    makes, zones = makes_file_system(config), len(config.fleet.aws.subnets)
    if makes and zones > 1:
        what = "ParallelCluster creates a file system only for a single subnet"
        yield "fleet.aws.subnets", f"{zones} subnets: {what}; set one, or fleet.fsx.dns_name"
    yield from refuse_size(fsx) if makes else refuse_unmade(fsx)
    if makes and fsx.efa:
        yield (
            "fleet.fsx.efa",
            "true: file systems that ParallelCluster creates have no EFA; set false, or set "
            "dns_name to your own file system",
        )
    if fsx.dns_name and not re.fullmatch(r"fs-[0-9a-f]{17}\..+", fsx.dns_name):
        yield (
            "fleet.fsx.dns_name",
            f"{fsx.dns_name}: it must begin with the file system's id, like "
            "fs-0123456789abcdef0.fsx...",
        )
    if (makes or fsx.dns_name) and RESERVED.fullmatch(fsx.mount_point.rstrip("/")):
        yield "fleet.fsx.mount_point", f"{fsx.mount_point} is reserved; use for example /fsx"
