"""The keys of backends: AWS (for machines that trainfleet makes), Batch, SageMaker and Slurm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .key import NAME, Key

MAKERS = ("ec2", "parallelcluster", "batch")  # backends that make machines from fleet.aws
ON_AWS = (*MAKERS, "sagemaker")
CAPACITIES = ("on-demand", "spot", "reservation", "block")
SUBNET = "^subnet-[0-9a-f]{8,17}$"
RESERVATION = "^cr-[0-9a-f]{8,17}$"
INSTANCE_TYPE = r"^[a-z0-9-]{1,24}\.[a-z0-9-]{1,24}$"
REGION = "^[a-z]{2,4}(-[a-z]{2,12}){1,3}-[0-9]{1,2}"
QUEUE = "^(arn:aws[a-z-]*:batch:[a-z0-9-]+:[0-9]{12}:job-queue/)?[A-Za-z0-9][A-Za-z0-9_-]{0,127}$"
ROLE = "^arn:aws[a-z-]*:iam::[0-9]{12}:role/[A-Za-z0-9+=,.@_/-]{1,512}$"
ACCOUNT = "[a-z0-9-]{1,32}:[0-9]{12}"  # region and account of an ARN


@dataclass(frozen=True)
class Aws:
    """The keys of fleet.aws."""

    share_fleet_of: Annotated[
        str | None, Key(backends=ON_AWS, pattern=NAME, examples=["phase-1"])
    ] = None
    """The name of the config with the machines, bucket or queue to use. Only that config creates,
    changes and removes them. Null: this config has its own."""
    region: Annotated[
        str | None,
        Key(
            backends=["ssh", "slurm", "ec2", "parallelcluster", "batch", "sagemaker"],
            pattern=REGION + "$",
            maxLength=32,
            examples=["us-east-1"],
        ),
    ] = None
    """The AWS region. Null: AWS_REGION or AWS_DEFAULT_REGION on your machine, or your profile's
    region."""
    zones: Annotated[
        tuple[str, ...],
        Key(
            backends=MAKERS,
            maxItems=16,
            items={"pattern": REGION + "(-[a-z]{2,5}-[0-9])?[a-z]$", "maxLength": 40},
            examples=[["us-east-1a", "us-east-1b"]],
        ),
    ] = ()
    """The availability zones to try, in this order, until one has room for all nodes. Empty: every
    zone of the region that offers the type. A ParallelCluster cluster has a queue in each of these
    zones, and Slurm starts a job in one with room; empty: only one zone."""
    vpc: Annotated[
        str | None,
        Key(backends=MAKERS, pattern="^vpc-[0-9a-f]{8,17}$", examples=["vpc-0123456789abcdef0"]),
    ] = None
    """Your VPC. Null: a VPC is created with a public and a private subnet."""
    subnets: Annotated[
        tuple[str, ...],
        Key(
            backends=MAKERS,
            maxItems=16,
            items={"pattern": SUBNET},
            examples=[["subnet-0123456789abcdef0"]],
        ),
    ] = ()
    """The subnets of your VPC for the nodes, one per zone, with a route to the Internet or to the
    endpoints of S3 and SSM. Empty: a network is created with a public and a private subnet and
    NAT."""
    allow_ssh_from: Annotated[
        tuple[str, ...],
        Key(
            maxItems=50,
            items={"pattern": r"^[0-9]{1,3}(\.[0-9]{1,3}){3}/[0-9]{1,2}$"},
            examples=[["203.0.113.7/32"]],
        ),
    ] = ()
    """The address ranges that may connect over SSH. Empty: none; nodes are reached through SSM
    Session Manager."""
    bastion_type: Annotated[str | None, Key(pattern=INSTANCE_TYPE, examples=["c7i.xlarge"])] = None
    """The EC2 type of a head node with a public address, through which the nodes are reached. Null:
    no head node is created."""
    key_pair: Annotated[
        str | None,
        Key(pattern="^[A-Za-z0-9][A-Za-z0-9 ._:()#,@+=&;{}!$*-]{0,254}$", examples=["my-key"]),
    ] = None
    """Your EC2 key pair. Null: one is created from the public half of fleet.ssh.key."""
    capacity: Annotated[str, Key(backends=MAKERS, enum=CAPACITIES)] = "on-demand"
    """How nodes are bought: on-demand, spot, from your capacity reservation, or from a capacity
    block (block)."""
    reservation: Annotated[
        str | None, Key(backends=MAKERS, pattern=RESERVATION, examples=["cr-0123456789abcdef0"])
    ] = None
    """The capacity reservation for the nodes, or the reservation of the capacity block."""
    block_hours: Annotated[
        float | None, Key(backends=["ec2"], unit="hours", minimum=1, maximum=4367)
    ] = None
    """The duration of the capacity block that make setup buys (capacity block, reservation null).
    It lists the offers, and buys one with YES=1 within budget.max_usd. Null: reservation names the
    block."""
    ami: Annotated[
        str | None,
        Key(backends=MAKERS, pattern="^ami-[0-9a-f]{8,17}$", examples=["ami-0123456789abcdef0"]),
    ] = None
    """The machine image of the nodes. Null: AWS's newest Deep Learning image for the platform when
    the fleet is created, from the SSM parameter in docker/platforms.lock.yaml."""
    volume_gib: Annotated[int, Key(backends=MAKERS, unit="GiB", minimum=100, maximum=16_384)] = 300
    """The size of each node's root volume (gp3, encrypted)."""
    bucket: Annotated[
        str | None,
        Key(backends=ON_AWS, pattern="^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", examples=["my-bucket"]),
    ] = None
    """Your S3 bucket for data and checkpoints. Null: a private, encrypted bucket is created; make
    clean deletes it only with PURGE=1."""

    @property
    def ssm_only(self) -> bool:
        """Returns whether no port is open to the outside, so SSH goes through SSM Session
        Manager.
        """
        return not self.allow_ssh_from


@dataclass(frozen=True)
class BatchConfig:
    """The keys of fleet.batch."""

    queue: Annotated[str | None, Key(pattern=QUEUE, maxLength=256, examples=["training"])] = None
    """The job queue, by name or ARN. Null: the queue of the stack that `make setup` creates."""
    job_role: Annotated[
        str | None,
        Key(pattern=ROLE, maxLength=2048, examples=["arn:aws:iam::123456789012:role/train"]),
    ] = None
    """The role of the containers, which reads and writes the bucket. Null: the stack's role."""
    execution_role: Annotated[
        str | None,
        Key(
            pattern=ROLE,
            maxLength=2048,
            examples=["arn:aws:iam::123456789012:role/train-execution"],
        ),
    ] = None
    """The role with which Batch pulls the image, reads secrets and writes logs. Null: the stack's
    role."""
    attempts: Annotated[int, Key(unit="attempts", minimum=1, maximum=10)] = 3
    """How often Batch itself starts a job that lost a machine, or whose verdict allows another
    attempt. A failure that the same program would repeat is never retried."""
    timeout_hours: Annotated[float | None, Key(unit="hours", minimum=0.02, maximum=8760)] = None
    """Batch ends an attempt after this time. Null: no limit."""
    shared_memory_gib: Annotated[int | None, Key(unit="GiB", minimum=1, maximum=4096)] = None
    """Size of /dev/shm in the containers. Null: a quarter of the node's memory, at most 64."""
    share: Annotated[
        str | None, Key(pattern="^[A-Za-z0-9]{1,255}$", maxLength=255, examples=["research"])
    ] = None
    """The share identifier of a queue with a fair-share policy. Null: none."""
    priority: Annotated[int | None, Key(unit="", minimum=0, maximum=9999)] = None
    """Scheduling priority within the share. Null: the queue's priority."""
    consumable_resources: Annotated[
        tuple[str, ...],
        Key(
            maxItems=5,
            items={"pattern": "^[A-Za-z0-9_-]{1,128}=[1-9][0-9]{0,8}$", "maxLength": 160},
            examples=[["licence=1"]],
        ),
    ] = ()
    """Licences and other consumable resources of Batch that each node uses while it runs, as
    `name=quantity`."""


@dataclass(frozen=True)
class SageMakerConfig:
    """The keys of fleet.sagemaker."""

    role: Annotated[
        str | None,
        Key(pattern=ROLE, maxLength=2048, examples=["arn:aws:iam::123456789012:role/train"]),
    ] = None
    """The role of the training job. Null: the stack's role."""
    input_mode: Annotated[str | None, Key(enum=["stream", "file", "fastfile", "fsx"])] = None
    """How nodes read the dataset: stream (ranges from S3 into a cache on the node), file (SageMaker
    copies it to each node before the start), fastfile (SageMaker mounts the prefix), fsx
    (fleet.sagemaker.file_system). Null: file if the copy takes less than a minute, else stream;
    `make plan` shows the reason."""
    file_system: Annotated[
        str | None,
        Key(
            pattern="^fs-[0-9a-f]{8,17}:/[A-Za-z0-9._/-]{1,1024}$",
            maxLength=1100,
            examples=["fs-0123456789abcdef0:/fsx/sets"],
        ),
    ] = None
    """An FSx for Lustre file system linked to the bucket, as `fs-id:/mount_name/folder`, for
    input_mode fsx."""
    volume_gib: Annotated[int | None, Key(unit="GiB", minimum=1, maximum=16_384)] = None
    """The disk size of each node. Null: twice the dataset if it is copied, at least 100. Types with
    local disks use those instead."""
    warm_pool_minutes: Annotated[int, Key(unit="minutes", minimum=0, maximum=360)] = 0
    """How long the machines are kept for the next job after a job ends, at full price. It needs the
    warm-pool quota of the type. 0: they are released at once."""
    max_hours: Annotated[float, Key(unit="hours", minimum=0.02, maximum=672)] = 120
    """SageMaker stops the job after this time. The quota is 120 hours by default, 672 at most."""
    wait_hours: Annotated[float | None, Key(unit="hours", minimum=0.02, maximum=672)] = None
    """With fleet.spot: the maximum duration of the job, including the wait for machines. Null:
    twice max_hours, at most 672."""
    retries: Annotated[int, Key(unit="attempts", minimum=0, maximum=30)] = 3
    """How often SageMaker itself restarts the job after an InternalServerError, such as a failed
    machine."""
    subnets: Annotated[
        tuple[str, ...],
        Key(
            maxItems=16,
            items={"pattern": SUBNET, "maxLength": 32},
            examples=[["subnet-0123456789abcdef0"]],
        ),
    ] = ()
    """Subnets of a VPC for the nodes. The VPC needs a gateway endpoint for S3. Empty: SageMaker's
    network."""
    security_groups: Annotated[
        tuple[str, ...],
        Key(
            maxItems=5,
            items={"pattern": "^sg-[0-9a-f]{8,17}$", "maxLength": 32},
            examples=[["sg-0123456789abcdef0"]],
        ),
    ] = ()
    """Security groups for the nodes in fleet.sagemaker.subnets. For EFA, they must allow all
    traffic within the group."""
    encrypt_traffic: bool = False
    """Whether to encrypt traffic between nodes. It slows multi-node training; EFA traffic is not
    encrypted."""
    health_check: bool = False
    """Whether SageMaker checks the machines and their network before the job starts
    (InfraCheckConfig), which takes minutes."""
    remote_debug: bool = False
    """Whether you can open a shell in the job's containers: `aws ssm start-session --target
    sagemaker-training-job:<job>_algo-1` (RemoteDebugConfig)."""
    kms_key: Annotated[
        str | None,
        Key(pattern="^[A-Za-z0-9:/_-]{1,2048}$", maxLength=2048, examples=["alias/training"]),
    ] = None
    """The KMS key of the nodes' disks and of SageMaker's uploads. Null: AWS's key."""
    training_plan: Annotated[
        str | None,
        Key(
            pattern=f"^arn:aws[a-z-]*:sagemaker:{ACCOUNT}:training-plan/[A-Za-z0-9-]{{1,128}}$",
            maxLength=2048,
            examples=["arn:aws:sagemaker:us-east-1:123456789012:training-plan/spring"],
        ),
    ] = None
    """The training plan (reserved capacity) for the job."""
    plan_hours: Annotated[float | None, Key(unit="hours", minimum=1, maximum=4367)] = None
    """The duration of the training plan that make setup buys (training_plan null). It lists the
    offers, and buys one with YES=1 within budget.max_usd. Null: no plan is bought."""


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
    """Nodes that are kept even if no job runs. They cost money."""
    max: Annotated[int | None, Key(unit="nodes", minimum=1, maximum=4096)] = None
    """The maximum number of nodes that jobs may start. Null: fleet.nodes."""
    capacity: Annotated[str | None, Key(enum=CAPACITIES)] = None
    """How the nodes are bought. Null: fleet.aws.capacity."""
    reservation: Annotated[
        str | None, Key(pattern=RESERVATION, maxLength=20, examples=["cr-0123456789abcdef0"])
    ] = None
    """The capacity reservation, or the reservation of the capacity block. Null:
    fleet.aws.reservation."""


@dataclass(frozen=True)
class ParallelCluster:
    """The keys of fleet.slurm.parallelcluster."""

    name: Annotated[
        str | None, Key(pattern="^[A-Za-z][A-Za-z0-9-]{0,59}$", maxLength=60, examples=["trn1-16"])
    ] = None
    """The cluster's name. Null: the run's name, adapted to the rules for cluster names."""
    os: Annotated[str, Key(enum=["ubuntu2204", "ubuntu2404", "alinux2023", "rhel9", "rocky9"])] = (
        "ubuntu2404"
    )
    """The operating system of the head and the nodes."""
    head_subnet: Annotated[
        str | None, Key(pattern=SUBNET, maxLength=24, examples=["subnet-0123456789abcdef0"])
    ] = None
    """The subnet of the head node, which needs a public address. Null: the public subnet of the
    created network, or else the subnets of the nodes, fleet.aws.subnets. The nodes' subnets are
    private, because nodes with several interfaces get no public address."""
    queues: Annotated[
        tuple[Queue, ...],
        Key(maxItems=50, examples=[[{"name": "queue-0", "max": 8}, {"name": "queue-1", "max": 8}]]),
    ] = ()
    """The queues, each a partition of Slurm, as {name, instance_type, min, max, capacity,
    reservation}. Empty: one queue, compute1, of fleet.instance_type with up to fleet.nodes
    nodes."""
    buckets: Annotated[
        tuple[str, ...],
        Key(
            maxItems=50,
            items={"pattern": "^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", "maxLength": 63},
            examples=[["my-corpora"]],
        ),
    ] = ()
    """S3 buckets that the head and the nodes read and write, in addition to fleet.aws.bucket."""
    database_uri: Annotated[
        str | None,
        Key(
            pattern="^[A-Za-z0-9.-]+(:[0-9]{1,5})?$",
            maxLength=300,
            examples=["slurm.cluster-x.us-west-2.rds.amazonaws.com:3306"],
        ),
    ] = None
    """The MySQL server for Slurm's accounting. Null: Slurm keeps no accounting, and sacct shows
    nothing."""
    database_user: Annotated[
        str | None, Key(pattern="^[A-Za-z0-9_-]+$", maxLength=64, examples=["clusteradmin"])
    ] = None
    """The user of the MySQL server."""
    database_secret: Annotated[
        str | None,
        Key(
            pattern=f"^arn:aws[a-z-]*:secretsmanager:{ACCOUNT}:secret:[A-Za-z0-9/_+=.@-]+$",
            maxLength=600,
            examples=["arn:aws:secretsmanager:us-west-2:123456789012:secret:slurm-AbCdEf"],
        ),
    ] = None
    """The secret in Secrets Manager with the password of the MySQL server."""


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
    """The partition, or several with commas. Null: the cluster's default."""
    account: Annotated[str | None, Key(pattern=WORD, maxLength=255, examples=["vision"])] = None
    """The account to charge. Null: your default account."""
    qos: Annotated[str | None, Key(pattern=WORD, maxLength=255, examples=["long"])] = None
    """The quality of service. Null: the account's default."""
    time_limit_minutes: Annotated[int | None, Key(unit="minutes", minimum=1, maximum=525_600)] = (
        None
    )
    """The time limit of one start of a job. The job then saves and is queued again until
    train.steps are done. Null: the partition's limit."""
    warn_before_seconds: Annotated[int, Key(unit="s", minimum=10, maximum=65_535)] = 300
    """The time before the limit at which a job must save and stop: long enough for a step and a
    checkpoint."""
    constraint: Annotated[
        str | None,
        Key(pattern=r"^[A-Za-z0-9_.:=&|*()\[\]-]+$", maxLength=255, examples=["h100&nvme"]),
    ] = None
    """Features that nodes must have, in the syntax of sbatch --constraint."""
    reservation: Annotated[str | None, Key(pattern=WORD, maxLength=255, examples=["team-week"])] = (
        None
    )
    """The reservation to run in."""
    gres: Annotated[
        str | None, Key(pattern="^[A-Za-z0-9_.:=,-]+$", maxLength=255, examples=["gpu:8"])
    ] = None
    """Generic resources of each node. Null: all that a node has if fleet.exclusive is true."""
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
    """Further sbatch options that a site requires, each as one word, `--name=value` or `--name`,
    for job.sbatch. Options that other keys set are refused."""
    container_runtime: Annotated[str | None, Key(enum=["pyxis", "apptainer"])] = None
    """The program that starts fleet.container on a node: pyxis (srun --container-image) or
    apptainer. Null: jobs run in the nodes' environment, without fleet.container."""
    requeue: bool = True
    """Whether a job that lost a node, was preempted or reached its time limit is requeued
    automatically and resumes from its last checkpoint."""
    preflight: bool = False
    """Whether the nodes of a job run the preflight in their own allocation before the ranks start.
    It checks each node and the links between them, which takes about a minute. The next attempt
    excludes a node that failed."""
    create: Annotated[str | None, Key(enum=["parallelcluster"])] = None
    """The program that creates the cluster: parallelcluster (AWS ParallelCluster). Null: the
    cluster already exists."""
    parallelcluster: Annotated[ParallelCluster, Key(backends=["parallelcluster"])]
    """The cluster that `make setup` creates with AWS ParallelCluster if fleet.slurm.create is set.
    Region, node subnets, head type, key pair, image, disks and bucket come from fleet.aws, and the
    file system from fleet.fsx."""
