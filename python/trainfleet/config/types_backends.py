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
    """The name of the config on whose machines this one trains, in whose bucket or through whose
    queue. That config alone makes, changes and removes them. Null: this one has its own."""
    region: Annotated[
        str | None,
        Key(
            backends=["ssh", "slurm", "ec2", "parallelcluster", "batch", "sagemaker"],
            pattern=REGION + "$",
            maxLength=32,
            examples=["us-east-1"],
        ),
    ] = None
    """The region. Null: AWS_REGION or AWS_DEFAULT_REGION on your machine, or your profile's."""
    zones: Annotated[
        tuple[str, ...],
        Key(
            backends=MAKERS,
            maxItems=16,
            items={"pattern": REGION + "(-[a-z]{2,5}-[0-9])?[a-z]$", "maxLength": 40},
            examples=[["us-east-1a", "us-east-1b"]],
        ),
    ] = ()
    """The availability zones that are tried, in this order, until one has room for all nodes.
    Empty: every zone of the region that offers the type."""
    vpc: Annotated[
        str | None,
        Key(backends=MAKERS, pattern="^vpc-[0-9a-f]{8,17}$", examples=["vpc-0123456789abcdef0"]),
    ] = None
    """A VPC of yours. Null: one is made, with a public and a private subnet."""
    subnets: Annotated[
        tuple[str, ...],
        Key(
            backends=MAKERS,
            maxItems=16,
            items={"pattern": SUBNET},
            examples=[["subnet-0123456789abcdef0"]],
        ),
    ] = ()
    """The subnets of your VPC for nodes, one a zone, with a way to the Internet or to the endpoints
    of S3 and SSM. Empty: a network is made, with a public and a private subnet and NAT."""
    allow_ssh_from: Annotated[
        tuple[str, ...],
        Key(
            maxItems=50,
            items={"pattern": r"^[0-9]{1,3}(\.[0-9]{1,3}){3}/[0-9]{1,2}$"},
            examples=[["203.0.113.7/32"]],
        ),
    ] = ()
    """The addresses from which SSH is let in. Empty: none; nodes are reached through SSM Session
    Manager."""
    bastion_type: Annotated[str | None, Key(pattern=INSTANCE_TYPE, examples=["c7i.xlarge"])] = None
    """The EC2 type of a head node with a public address, through which the nodes are reached. Null:
    none is made."""
    key_pair: Annotated[
        str | None,
        Key(pattern="^[A-Za-z0-9][A-Za-z0-9 ._:()#,@+=&;{}!$*-]{0,254}$", examples=["my-key"]),
    ] = None
    """An EC2 key pair of yours. Null: one is made of the public half of fleet.ssh.key."""
    capacity: Annotated[str, Key(backends=MAKERS, enum=CAPACITIES)] = "on-demand"
    """How nodes are bought: on-demand, spot, in a capacity reservation of yours, or in a capacity
    block (block)."""
    reservation: Annotated[
        str | None, Key(backends=MAKERS, pattern=RESERVATION, examples=["cr-0123456789abcdef0"])
    ] = None
    """The capacity reservation, or that of the capacity block, from which the nodes are taken."""
    block_hours: Annotated[
        float | None, Key(backends=["ec2"], unit="hours", minimum=1, maximum=4367)
    ] = None
    """For how long make setup buys a capacity block (capacity block, reservation null): it lists
    the offers, and buys one with YES=1 within budget.max_usd. Null: reservation names one."""
    ami: Annotated[
        str | None,
        Key(backends=MAKERS, pattern="^ami-[0-9a-f]{8,17}$", examples=["ami-0123456789abcdef0"]),
    ] = None
    """The machine image of the nodes. Null: AWS's newest Deep Learning image for the platform, as
    its SSM parameter in docker/platforms.lock.yaml names it when the fleet is made."""
    volume_gib: Annotated[int, Key(backends=MAKERS, unit="GiB", minimum=100, maximum=16_384)] = 300
    """The size of each node's root volume (gp3, encrypted)."""
    bucket: Annotated[
        str | None,
        Key(backends=ON_AWS, pattern="^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", examples=["my-bucket"]),
    ] = None
    """An S3 bucket of yours for data and checkpoints. Null: one is made, private and encrypted,
    which make clean keeps until PURGE=1."""

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
    """The job queue, by name or ARN. Null: the one of the stack that `make setup` makes."""
    job_role: Annotated[
        str | None,
        Key(pattern=ROLE, maxLength=2048, examples=["arn:aws:iam::123456789012:role/train"]),
    ] = None
    """The role of the containers: it reads and writes the bucket. Null: the stack's."""
    execution_role: Annotated[
        str | None,
        Key(
            pattern=ROLE,
            maxLength=2048,
            examples=["arn:aws:iam::123456789012:role/train-execution"],
        ),
    ] = None
    """The role by which Batch pulls the image, reads secrets and writes logs. Null: the stack's."""
    attempts: Annotated[int, Key(unit="attempts", minimum=1, maximum=10)] = 3
    """How often Batch itself starts a job that lost a machine, or whose verdict says that another
    attempt may go well. A failure that the same program would repeat is never retried."""
    timeout_hours: Annotated[float | None, Key(unit="hours", minimum=0.02, maximum=8760)] = None
    """Batch ends an attempt after this long. Null: never."""
    shared_memory_gib: Annotated[int | None, Key(unit="GiB", minimum=1, maximum=4096)] = None
    """Size of /dev/shm in the containers. Null: a quarter of the node's memory, at most 64."""
    share: Annotated[
        str | None, Key(pattern="^[A-Za-z0-9]{1,255}$", maxLength=255, examples=["research"])
    ] = None
    """The share identifier of a queue with a fair-share policy. Null: none."""
    priority: Annotated[int | None, Key(unit="", minimum=0, maximum=9999)] = None
    """Scheduling priority within the share. Null: the queue's."""
    consumable_resources: Annotated[
        tuple[str, ...],
        Key(
            maxItems=5,
            items={"pattern": "^[A-Za-z0-9_-]{1,128}=[1-9][0-9]{0,8}$", "maxLength": 160},
            examples=[["licence=1"]],
        ),
    ] = ()
    """What else each node holds while it runs, as `name=quantity`: licences and other consumable
    resources of Batch."""


@dataclass(frozen=True)
class SageMakerConfig:
    """The keys of fleet.sagemaker."""

    role: Annotated[
        str | None,
        Key(pattern=ROLE, maxLength=2048, examples=["arn:aws:iam::123456789012:role/train"]),
    ] = None
    """The role of the training job. Null: the stack's."""
    input_mode: Annotated[str | None, Key(enum=["stream", "file", "fastfile", "fsx"])] = None
    """How nodes get the dataset: stream (ranges from S3 into a cache on the node), file (SageMaker
    copies it to each node before the start), fastfile (SageMaker mounts the prefix), fsx
    (fleet.sagemaker.file_system). Null: file when it is so small that copying it takes under a
    minute, else stream; `make plan` says why."""
    file_system: Annotated[
        str | None,
        Key(
            pattern="^fs-[0-9a-f]{8,17}:/[A-Za-z0-9._/-]{1,1024}$",
            maxLength=1100,
            examples=["fs-0123456789abcdef0:/fsx/sets"],
        ),
    ] = None
    """An FSx for Lustre file system that is linked to the bucket, as `fs-id:/mount_name/folder`,
    for input_mode fsx."""
    volume_gib: Annotated[int | None, Key(unit="GiB", minimum=1, maximum=16_384)] = None
    """The disk of each node. Null: twice the dataset where it is copied, at least 100. Types with
    local disks use those instead."""
    warm_pool_minutes: Annotated[int, Key(unit="minutes", minimum=0, maximum=360)] = 0
    """How long the machines are kept for the next job after one ends, at full price; needs the
    warm-pool quota of the type. 0: they are released at once."""
    max_hours: Annotated[float, Key(unit="hours", minimum=0.02, maximum=672)] = 120
    """SageMaker stops the job after this long. The quota is 120 hours by default, 672 at most."""
    wait_hours: Annotated[float | None, Key(unit="hours", minimum=0.02, maximum=672)] = None
    """With fleet.spot: how long the job may take in all, waiting for machines included. Null: twice
    max_hours, at most 672."""
    retries: Annotated[int, Key(unit="attempts", minimum=0, maximum=30)] = 3
    """How often SageMaker itself starts the job again after an InternalServerError, such as a
    machine that failed."""
    subnets: Annotated[
        tuple[str, ...],
        Key(
            maxItems=16,
            items={"pattern": SUBNET, "maxLength": 32},
            examples=[["subnet-0123456789abcdef0"]],
        ),
    ] = ()
    """Subnets of a VPC for the nodes; it needs a gateway endpoint for S3. Empty: SageMaker's own
    network."""
    security_groups: Annotated[
        tuple[str, ...],
        Key(
            maxItems=5,
            items={"pattern": "^sg-[0-9a-f]{8,17}$", "maxLength": 32},
            examples=[["sg-0123456789abcdef0"]],
        ),
    ] = ()
    """Security groups for the nodes in fleet.sagemaker.subnets: open to themselves, for EFA."""
    encrypt_traffic: bool = False
    """Whether traffic between nodes is encrypted. It slows multi-node training; EFA traffic is not
    encrypted."""
    health_check: bool = False
    """Whether SageMaker examines the machines and their network before the job begins
    (InfraCheckConfig), which takes minutes."""
    remote_debug: bool = False
    """Whether a shell can be opened in the job's containers: `aws ssm start-session --target
    sagemaker-training-job:<job>_algo-1` (RemoteDebugConfig)."""
    kms_key: Annotated[
        str | None,
        Key(pattern="^[A-Za-z0-9:/_-]{1,2048}$", maxLength=2048, examples=["alias/training"]),
    ] = None
    """The KMS key of the nodes' disks and of what SageMaker uploads. Null: AWS's own."""
    training_plan: Annotated[
        str | None,
        Key(
            pattern=f"^arn:aws[a-z-]*:sagemaker:{ACCOUNT}:training-plan/[A-Za-z0-9-]{{1,128}}$",
            maxLength=2048,
            examples=["arn:aws:sagemaker:us-east-1:123456789012:training-plan/spring"],
        ),
    ] = None
    """The training plan (reserved capacity) on which the job runs."""
    plan_hours: Annotated[float | None, Key(unit="hours", minimum=1, maximum=4367)] = None
    """For how long make setup buys a training plan (training_plan null): it lists the offers, and
    buys one with YES=1 within budget.max_usd. Null: none is bought."""


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
