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
from ...cloud.prices import Prices
from ...cloud.template import capacity_of
from ...cloud.template_inputs import LONGEST_WITH_DATABASE, cluster_name, own_tags, pairs
from ...cloud.template_storage import makes_file_system, refuse_size, refuse_unmade
from ...config import Config, Refusals
from ...config.types import Queue
from ...hardware import node_types
from ...hosts.install_steps import NOFILE, InstallStep, neuron_step
from ...hosts.platform import load_platform, load_system
from ...plan.job import Artifact
from ...process.install_paths import ROOT
from ..node_script import Body, form

FILE, SCRIPT = "cluster.yaml", "node.sh"
KEY = "fleet.slurm.parallelcluster"
QUEUES = f"{KEY}.queues"
HEAD = "c5.4xlarge"  # head node instance type in the AWS article that the recipe follows
# Allowed SSH source if only Session Manager has access. ParallelCluster's default is all addresses.
NOBODY = "127.0.0.1/32"
# operating system whose Python version is covered by the package lock
WITH_PYTHON = "ubuntu2404"
NONE_YET = f"fs-{0:017}"  # placeholder in a plan, until setup creates the file system
HEAD_DISK = 200  # GiB for home folders and the compiler toolchain
BOUGHT = {"spot": "SPOT", "block": "CAPACITY_BLOCK"}  # all others are ONDEMAND
RESERVED_KINDS = ("reservation", "block")
LONGEST_QUEUE = 25  # maximum characters in a queue's name (ParallelCluster's NAME_MAX_LENGTH)
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
    """Returns the name of the head node's key pair, configured or created by setup."""
    return config.fleet.aws.key_pair or f"trainfleet-{cluster_name(config)}"


def costs(config: Config, prices: Prices) -> spending.Spending:
    """Returns the cost while a job runs in the first of its queues (fleet.slurm.partition)."""
    queues, asked = queues_of(config), (config.fleet.slurm.partition or "").split(",")
    queue = next((queue for queue in queues if queue.name in asked), queues[0])
    others = [other for other in queues if other.name != queue.name]
    head = config.fleet.aws.bastion_type or HEAD, HEAD_DISK
    return spending.of_cluster(config, prices, queue, others, head)


def subnets_of(config: Config) -> tuple[str, ...]:
    """Returns the nodes' subnets, one per zone. In a plan, their IDs are placeholders until the
    network exists.
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
    zone with capacity. Single zones and clusters that setup does not create stay unchanged.

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
    made = cluster(config, script, maker or config.fleet_name)
    text = yaml.safe_dump(made, sort_keys=False, width=120)
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
    lines = [
        "#!/usr/bin/env bash",
        f"# Sets up a node of {cluster_name(config)} with scripts/*.sh for the platform "
        f"{config.fleet.platform}",
        "set -euo pipefail",
        "folder=$(mktemp -d)",
    ]
    for name, text in texts.items():
        lines += [
            f"cat > \"$folder/{name}\" << 'END-OF-{name}'",
            text.rstrip("\n"),
            f"END-OF-{name}",
            f'chmod 755 "$folder/{name}"',
        ]
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


def cluster(config: Config, script: str, maker: str) -> Any:
    """Returns the contents of the cluster file."""
    fleet, wanted = config.fleet, config.fleet.slurm.parallelcluster
    return form(
        "cluster",
        REGION=fleet.aws.region,
        SYSTEM=wanted.os,
        IMAGE=fleet.aws.ami,
        MACHINE=fleet.aws.bastion_type or HEAD,
        SUBNET=wanted.head_subnet or subnets_of(config)[0],
        KEY=key_of(config),
        ADDRESSES=(*fleet.aws.allow_ssh_from, NOBODY)[0],
        DISK=HEAD_DISK,
        PARTITION=partition_of(fleet.aws.region or ""),
        BUCKETS=_buckets(config),
        IDLE=-1 if fleet.idle_minutes is None else fleet.idle_minutes,
        DATABASE=wanted.database_uri,
        USER=wanted.database_user,
        SECRET=wanted.database_secret,
        QUEUES=[
            _queue(config, queue, script, zone)
            for zone in range(len(subnets_of(config)))
            for queue in queues_of(config)
        ],
        STORAGE=_storage(config),
        TAGS=pairs(own_tags(maker)),
    )


def _buckets(config: Config) -> list[Body] | None:
    own = (config.fleet.aws.bucket, *config.fleet.slurm.parallelcluster.buckets)
    names = dict.fromkeys(filter(None, own))
    return [{"BucketName": name, "EnableWriteAccess": True} for name in names] or None


def _queue(config: Config, queue: Queue, script: str, zone: int) -> Any:
    aws, row = config.fleet.aws, node_types.instance(queue.instance_type)
    has_efa = bool(row and row.efa)
    return form(
        "queue",
        QUEUE=in_zone(queue.name, zone),
        CAPACITY=BOUGHT.get(queue.capacity or "", "ONDEMAND"),
        COMPUTE=re.sub(r"[^a-z0-9]+", "-", (queue.instance_type or "").partition(".")[0]),
        MACHINE=queue.instance_type,
        LEAST=0 if zone else queue.min,
        MOST=queue.max,
        FABRIC=has_efa or None,
        RESERVATION=queue.reservation if queue.capacity in RESERVED_KINDS else None,
        DISK=aws.volume_gib,
        SUBNET=subnets_of(config)[zone],
        # AWS chooses the placement of capacity block nodes:
        # https://docs.aws.amazon.com/parallelcluster/latest/ug/launch-instances-capacity-blocks.html
        TOGETHER=has_efa and queue.capacity != "block",
        SCRIPT=script_address(config, script) if aws.bucket else None,
        BUCKETS=_buckets(config),
    )


def _storage(config: Config) -> Any:
    fsx = config.fleet.fsx
    if not (fsx.dns_name or makes_file_system(config)):
        return None
    if fsx.dns_name or len(config.fleet.aws.zones) > 1:
        settings = {"FileSystemId": (fsx.dns_name or NONE_YET).partition(".")[0]}
    else:
        keeps = fsx.type == "persistent"
        settings = form(
            "new file system",
            SIZE=fsx.size_gib,
            KIND="PERSISTENT_2" if keeps else "SCRATCH_2",
            RATE=fsx.throughput if keeps else None,
            LINKS=list(links(config)) or None,
        )
    return form("storage", FOLDER=fsx.mount_point, SETTINGS=settings)


def links(config: Config) -> Iterator[Body]:
    """Yields the file system's data repository associations: folders that import from or export to
    S3.
    """
    fsx, bucket = config.fleet.fsx, config.fleet.aws.bucket
    if fsx.s3_import:
        yield form("import", ADDRESS=fsx.s3_import)
    if fsx.s3_export and bucket:
        top, folder = fsx.mount_point.rstrip("/"), PurePosixPath(config.fleet.shared_folder or "")
        for name in ("runs", "data"):
            to = f"s3://{bucket}/{cluster_name(config)}/{name}"
            path = f"/{folder.relative_to(top)}/{name}".replace("/./", "/")
            yield form("export", FOLDER=name, PATH=path, ADDRESS=to)


def refuse(config: Config) -> Refusals:
    """Yields (key, message) for missing settings, and for those that ParallelCluster's schema
    accepts but AWS rejects.
    """
    for rule in (_network, _system, _accounting, _zones, _queues, _file_system):
        yield from rule(config)


def _network(config: Config) -> Refusals:
    aws, head = config.fleet.aws, config.fleet.slurm.parallelcluster.head_subnet
    if not aws.region:
        yield "fleet.aws.region", "null: the cluster file needs a region, such as us-west-2"
    if aws.subnets and aws.zones:
        yield (
            "fleet.aws.zones",
            f"{', '.join(aws.zones)}: fleet.aws.subnets already sets the nodes' zone; remove it",
        )
    if head and not aws.subnets:
        yield (
            f"{KEY}.head_subnet",
            f"{head}: without fleet.aws.subnets, setup creates the head's subnet; set both or "
            "neither",
        )
    if not aws.subnets and not config.fleet.instance_type:
        yield (
            "fleet.instance_type",
            "null: setup creates the network in a zone with this type; set it, or "
            "fleet.aws.subnets",
        )
    if len(aws.allow_ssh_from) > 1:
        one = (
            "ParallelCluster accepts only one; set a network that includes all, or [] to use "
            "Session Manager"
        )
        yield "fleet.aws.allow_ssh_from", f"{len(aws.allow_ssh_from)} networks: {one}"


def _system(config: Config) -> Refusals:
    aws, os = config.fleet.aws, config.fleet.slurm.parallelcluster.os
    if load_platform(config.fleet.platform).neuron_packages:
        yield from _refuse_neuron(config)
    if os != WITH_PYTHON and not aws.bucket and not config.fleet.python:
        works = f"set a bucket, or {KEY}.os {WITH_PYTHON}"
        yield (
            "fleet.aws.bucket",
            f"null: {os} nodes download the Python installer from the bucket; {works}",
        )
    if os == "rocky9" and not aws.ami:
        yield f"{KEY}.os", "rocky9: ParallelCluster has no image for it; set fleet.aws.ami"


def _accounting(config: Config) -> Refusals:
    wanted, name = config.fleet.slurm.parallelcluster, cluster_name(config)
    given = [part for part in ("uri", "user", "secret") if getattr(wanted, f"database_{part}")]
    if 0 < len(given) < 3:
        yield (
            f"{KEY}.database_{given[0]}",
            "set all of database_uri, database_user and database_secret, or none",
        )
    if wanted.database_uri and len(name) > LONGEST_WITH_DATABASE:
        what = f"{name}: with accounting, use at most {LONGEST_WITH_DATABASE} characters"
        yield f"{KEY}.name", what


def _refuse_neuron(config: Config) -> Refusals:
    platform, wanted = load_platform(config.fleet.platform), config.fleet.slurm.parallelcluster.os
    if not config.fleet.aws.bucket:
        what = "the nodes download the Neuron SDK installer from the bucket; set a bucket"
        yield "fleet.aws.bucket", f"null: {what}"
    system = load_system(wanted)
    lack = ""
    if not system.apt:
        lack = "Neuron's packages need apt, and its PyTorch needs a newer glibc"
    elif system.python < platform.python and not config.fleet.python:
        needs = f"the packages of platform {platform.name} need {platform.python} or newer"
        lack = f"its Python is {system.python}, but {needs}"
    if lack:
        yield f"{KEY}.os", f"{wanted}: {lack}; set {WITH_PYTHON}"


def _queues(config: Config) -> Refusals:
    fleet, asked, queues = config.fleet, config.fleet.slurm.partition, queues_of(config)
    for queue in queues:
        for what in (*_lacks(queue), *_unfit(queue, fleet.aws.ami)):
            yield QUEUES, f"{queue.name}: {what}"
    names = [queue.name for queue in queues]
    chosen = asked.split(",") if asked else names
    if unknown := sorted(set(chosen) - set(names)):
        yield (
            "fleet.slurm.partition",
            f"{', '.join(unknown)} is not one of the queues: {', '.join(names)}",
        )
    most = max((queue.max or 0 for queue in queues if queue.name in chosen), default=0)
    if 0 < most < fleet.nodes:
        yield (
            "fleet.nodes",
            f"{fleet.nodes}: the largest queue has at most {most} nodes; set NODES={most}, or "
            "raise max",
        )


def _zones(config: Config) -> Refusals:
    queues, zones = queues_of(config), len(subnets_of(config))
    names = [in_zone(queue.name, zone) for queue in queues for zone in range(zones)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield QUEUES, f"two queues have the name {', '.join(twice)}"
    if long := [name for name in names if len(name) > LONGEST_QUEUE]:
        yield QUEUES, f"{long[0]}: with {zones} zones, use at most {LONGEST_QUEUE - 3} characters"
    if zones > 1 and (bound := [one for one in queues if one.capacity in RESERVED_KINDS]):
        what = f"{bound[0].name} has capacity {bound[0].capacity}, which is in one zone"
        yield QUEUES, f"{what}; set one zone, not {zones}"


def _lacks(queue: Queue) -> Iterator[str]:
    """Yields the errors in a queue's name, size and capacity."""
    most = queue.max or 0
    if queue.name == "default":
        yield "Slurm reserves this name; use for example compute1"
    if queue.min > most:
        yield f"min {queue.min} is more than max {most}"
    if queue.capacity in RESERVED_KINDS and not queue.reservation:
        yield f"capacity {queue.capacity} needs a reservation, such as cr-0123456789abcdef0"
    if queue.capacity == "block" and queue.min != most:
        yield f"a capacity block keeps all of its nodes running; set min {most}"


def _unfit(queue: Queue, image: str | None) -> Iterator[str]:
    """Yields the reasons why a queue's nodes can't train on its instance type."""
    kind, row = queue.instance_type, node_types.instance(queue.instance_type)
    if kind is None:
        yield "instance_type and fleet.instance_type are null; set one of them"
        return
    if row is None:
        yield f"{kind} is not a known instance type"
        return
    if row.accelerator and not row.efa and (queue.max or 0) > 1:
        yield (
            f"{kind} has no EFA, so its nodes can't train together; set max 1, or use a larger size"
        )
    if not image and load_platform(node_types.platform_of(row)).kernel_modules == CLOSED:
        yield (
            f"the NVIDIA driver of ParallelCluster's images does not support {row.name} "
            "(aws-parallelcluster issue 6014); set fleet.aws.ami to an image from pcluster "
            "build-image, or use backend ec2"
        )


def _file_system(config: Config) -> Refusals:
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
