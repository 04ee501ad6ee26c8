"""The keys of Slurm: what jobs ask for, and the cluster that AWS ParallelCluster makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .key import Key
from .types_aws import ACCOUNT, CAPACITIES, INSTANCE_TYPE, RESERVATION, SUBNET

WORD = "^[A-Za-z0-9][A-Za-z0-9._@%+=-]*$"


@dataclass(frozen=True)
class Queue:
    """One entry of fleet.slurm.parallelcluster.queues."""

    name: Annotated[str, Key(pattern="^[a-z][a-z0-9-]{0,24}$", maxLength=25, examples=["queue-0"])]
    """The partition's name."""
    instance_type: Annotated[
        str | None, Key(pattern=INSTANCE_TYPE, maxLength=64, examples=["trn1.32xlarge"])
    ] = None
    """The EC2 type. Null: fleet.instance_type."""
    min: Annotated[int, Key(unit="nodes", minimum=0, maximum=4096)] = 0
    """Nodes that are kept, also while no job runs: they cost."""
    max: Annotated[int | None, Key(unit="nodes", minimum=1, maximum=4096)] = None
    """The most nodes that jobs may have started. Null: fleet.nodes."""
    capacity: Annotated[str | None, Key(enum=CAPACITIES)] = None
    """How the nodes are bought. Null: fleet.aws.capacity."""
    reservation: Annotated[
        str | None, Key(pattern=RESERVATION, maxLength=20, examples=["cr-0123456789abcdef0"])
    ] = None
    """The capacity reservation, or that of the capacity block. Null: fleet.aws.reservation."""


@dataclass(frozen=True)
class ParallelCluster:
    """The keys of fleet.slurm.parallelcluster."""

    name: Annotated[
        str | None, Key(pattern="^[A-Za-z][A-Za-z0-9-]{0,59}$", maxLength=60, examples=["trn1-16"])
    ] = None
    """The cluster's name. Null: the run's, as far as such a name may go."""
    os: Annotated[str, Key(enum=["ubuntu2204", "ubuntu2404", "alinux2023", "rhel9", "rocky9"])] = (
        "ubuntu2404"
    )
    """The operating system of head and nodes."""
    head_subnet: Annotated[
        str | None, Key(pattern=SUBNET, maxLength=24, examples=["subnet-0123456789abcdef0"])
    ] = None
    """The subnet of the head node, one with a public address. Null: the public one of the network
    that is made, or else that of the nodes, fleet.aws.subnets; these are private, as nodes of
    several interfaces get no public address."""
    queues: Annotated[
        tuple[Queue, ...],
        Key(maxItems=50, examples=[[{"name": "queue-0", "max": 8}, {"name": "queue-1", "max": 8}]]),
    ] = ()
    """The queues, each a partition of Slurm, as {name, instance_type, min, max, capacity,
    reservation}. Empty: one, compute1, of fleet.instance_type and up to fleet.nodes nodes."""
    buckets: Annotated[
        tuple[str, ...],
        Key(
            maxItems=50,
            items={"pattern": "^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", "maxLength": 63},
            examples=[["my-corpora"]],
        ),
    ] = ()
    """S3 buckets that head and nodes read and write, beside fleet.aws.bucket."""
    database_uri: Annotated[
        str | None,
        Key(
            pattern="^[A-Za-z0-9.-]+(:[0-9]{1,5})?$",
            maxLength=300,
            examples=["slurm.cluster-x.us-west-2.rds.amazonaws.com:3306"],
        ),
    ] = None
    """The MySQL server in which Slurm keeps its accounting. Null: no accounting is kept, and sacct
    shows nothing."""
    database_user: Annotated[
        str | None, Key(pattern="^[A-Za-z0-9_-]+$", maxLength=64, examples=["clusteradmin"])
    ] = None
    """Its user."""
    database_secret: Annotated[
        str | None,
        Key(
            pattern=f"^arn:aws[a-z-]*:secretsmanager:{ACCOUNT}:secret:[A-Za-z0-9/_+=.@-]+$",
            maxLength=600,
            examples=["arn:aws:secretsmanager:us-west-2:123456789012:secret:slurm-AbCdEf"],
        ),
    ] = None
    """The secret of Secrets Manager that holds its password."""


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """The keys of fleet.slurm."""

    partition: Annotated[
        str | None,
        Key(
            pattern="^[A-Za-z0-9][A-Za-z0-9._-]*(,[A-Za-z0-9][A-Za-z0-9._-]*)*$",
            maxLength=255,
            examples=["gpu"],
        ),
    ] = None
    """The partition. Null: the cluster's default. Several may be named, with commas."""
    account: Annotated[str | None, Key(pattern=WORD, maxLength=255, examples=["vision"])] = None
    """The account that is charged. Null: your default."""
    qos: Annotated[str | None, Key(pattern=WORD, maxLength=255, examples=["long"])] = None
    """The quality of service. Null: the account's default."""
    time_limit_minutes: Annotated[int | None, Key(unit="minutes", minimum=1, maximum=525_600)] = (
        None
    )
    """How long one start of a job may last; then it saves, and is queued again until train.steps
    are done. Null: the partition's."""
    warn_before_seconds: Annotated[int, Key(unit="s", minimum=10, maximum=65_535)] = 300
    """The time before the limit when a job must save and stop: long enough for a step and a
    checkpoint."""
    constraint: Annotated[
        str | None,
        Key(pattern=r"^[A-Za-z0-9_.:=&|*()\[\]-]+$", maxLength=255, examples=["h100&nvme"]),
    ] = None
    """Features that nodes must have, as sbatch --constraint takes them."""
    reservation: Annotated[str | None, Key(pattern=WORD, maxLength=255, examples=["team-week"])] = (
        None
    )
    """A reservation to run in."""
    gres: Annotated[
        str | None, Key(pattern="^[A-Za-z0-9_.:=,-]+$", maxLength=255, examples=["gpu:8"])
    ] = None
    """Generic resources of each node. Null: all that a node has while fleet.exclusive is true."""
    options: Annotated[
        tuple[str, ...],
        Key(
            maxItems=32,
            items={
                "examples": ["--switches=1"],
                "pattern": r"^--[a-z][a-z0-9-]*(=[A-Za-z0-9_.,:@%+/\[\]=-]+)?$",
                "maxLength": 255,
            },
            examples=[["--switches=1", "--licenses=matlab:1", "--mail-type=END"]],
        ),
    ] = ()
    """Further options of sbatch that a site demands, each as one word, `--name=value` or `--name`,
    for job.sbatch. Options that other keys set are refused."""
    container_runtime: Annotated[str | None, Key(enum=["pyxis", "apptainer"])] = None
    """What starts fleet.container on a node: pyxis (srun --container-image) or apptainer. Null:
    jobs run in the nodes' environment, without fleet.container."""
    requeue: bool = True
    """Whether a job that lost a node, was preempted or reached its time limit is requeued
    automatically and resumes from its last checkpoint."""
    preflight: bool = False
    """Whether the nodes of a job pass the preflight in their own allocation before its ranks start:
    each is examined, and the links between them are tried, which takes about a minute. A node that
    is to blame is left out of the next attempt."""
    create: Annotated[str | None, Key(enum=["parallelcluster"])] = None
    """What creates the cluster: parallelcluster (AWS ParallelCluster). Null: the cluster exists
    already."""
    parallelcluster: Annotated[ParallelCluster, Key(backends=["parallelcluster"])]
    """The cluster that `make setup` has AWS ParallelCluster make where fleet.slurm.create asks for
    one: region, subnets of the nodes, type of the head, key pair, image, disks and bucket are
    fleet.aws's; the file system is fleet.fsx's."""
