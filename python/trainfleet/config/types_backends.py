"""Config keys of backends: AWS machines that trainfleet creates, AWS Batch, SageMaker and Slurm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .key import NAME, Key, Texts, span

MAKERS = ("ec2", "parallelcluster", "batch")  # backends that create machines from fleet.aws
ON_AWS = (*MAKERS, "sagemaker")
CAPACITIES = ("on-demand", "spot", "reservation", "block")
SUBNET = "^subnet-[0-9a-f]{8,17}$"
RESERVATION = "^cr-[0-9a-f]{8,17}$"
INSTANCE_TYPE = r"^[a-z0-9-]{1,24}\.[a-z0-9-]{1,24}$"
REGION = "^[a-z]{2,4}(-[a-z]{2,4})?-(central|north|south|(north|south)?(east|west))-[0-9]{1,2}"
QUEUE = "^(arn:aws[a-z-]*:batch:[a-z0-9-]+:[0-9]{12}:job-queue/)?[A-Za-z0-9][A-Za-z0-9_-]{0,127}$"
ROLE = "^arn:aws[a-z-]*:iam::[0-9]{12}:role/[A-Za-z0-9+=,.@_/-]{1,512}$"
ACCOUNT = "[a-z0-9-]{1,32}:[0-9]{12}"  # region and account ID in an ARN


@dataclass(frozen=True)
class Aws:
    """Keys of fleet.aws."""

    share_fleet_of: Annotated[str | None, Key("phase-1", backends=ON_AWS, pattern=NAME)] = None
    """Name of another config whose machines, bucket or queue this run uses. Only that config
    creates, changes and removes them. If null, nothing is shared."""
    region: Annotated[
        str | None,
        Key(
            "us-east-1",
            backends=["ssh", "slurm", "ec2", "parallelcluster", "batch", "sagemaker"],
            pattern=REGION + "$",
            maxLength=32,
        ),
    ] = None
    """AWS region. Defaults to AWS_REGION or AWS_DEFAULT_REGION on your machine, or to your
    profile's region."""
    zones: Annotated[
        Texts,
        Key(
            ["us-east-1a", "us-east-1b"],
            backends=MAKERS,
            maxItems=16,
            items={"pattern": REGION + "(-[a-z]{2,5}-[0-9])?[a-z]$", "maxLength": 40},
        ),
    ] = ()
    """Availability zones to try, in this order, until one has capacity for all nodes. If empty,
    every zone of the region that offers the instance type is tried. A ParallelCluster cluster has a
    queue in each of these zones, and Slurm starts a job in a zone with capacity. If empty, such a
    cluster uses a single zone."""
    vpc: Annotated[
        str | None,
        Key("vpc-0123456789abcdef0", backends=MAKERS, pattern="^vpc-[0-9a-f]{8,17}$"),
    ] = None
    """ID of your VPC. If null, a VPC with a public and a private subnet is created."""
    subnets: Annotated[
        Texts,
        Key(["subnet-0123456789abcdef0"], backends=MAKERS, maxItems=16, items={"pattern": SUBNET}),
    ] = ()
    """Subnets of your VPC for the nodes, one per zone. Each needs a route to the Internet or to S3
    and SSM endpoints. If empty, a network with a public subnet, a private subnet and NAT is
    created."""
    allow_ssh_from: Annotated[
        Texts,
        Key(
            ["203.0.113.7/32"],
            maxItems=50,
            items={"pattern": r"^[0-9]{1,3}(\.[0-9]{1,3}){3}/[0-9]{1,2}$"},
        ),
    ] = ()
    """Address ranges that may connect over SSH. If empty, no address may, and the nodes are reached
    through SSM Session Manager."""
    bastion_type: Annotated[str | None, Key("c7i.xlarge", pattern=INSTANCE_TYPE)] = None
    """EC2 instance type of a head node with a public address, through which the nodes are reached.
    If null, no head node is created."""
    key_pair: Annotated[
        str | None,
        Key("my-key", pattern="^[A-Za-z0-9][A-Za-z0-9 ._:()#,@+=&;{}!$*-]{0,254}$"),
    ] = None
    """Name of your EC2 key pair. If null, a key pair is created from the public half of
    fleet.ssh.key."""
    capacity: Annotated[str, Key(backends=MAKERS, enum=CAPACITIES)] = "on-demand"
    """Purchase option for nodes: on-demand, spot, reservation (your capacity reservation) or block
    (a capacity block)."""
    reservation: Annotated[
        str | None, Key("cr-0123456789abcdef0", backends=MAKERS, pattern=RESERVATION)
    ] = None
    """ID of the capacity reservation for the nodes, or of the capacity block's reservation."""
    block_hours: Annotated[
        float | None, Key(backends=["ec2"], unit="hours", minimum=1, maximum=4367)
    ] = None
    """Duration of the capacity block that `make setup` buys if capacity is block and reservation is
    null. Setup lists the offers, and with YES=1 buys one within budget.max_usd. If null,
    reservation names an existing block."""
    ami: Annotated[
        str | None,
        Key("ami-0123456789abcdef0", backends=MAKERS, pattern="^ami-[0-9a-f]{8,17}$"),
    ] = None
    """Machine image of the nodes. Defaults to the newest AWS Deep Learning AMI for the platform
    when the fleet is created, from the SSM parameter in docker/platforms.lock.yaml."""
    volume_gib: Annotated[int, Key(backends=MAKERS, unit="GiB", minimum=100, maximum=16_384)] = 300
    """Size of each node's root volume (gp3, encrypted)."""
    bucket: Annotated[
        str | None,
        Key("my-bucket", backends=ON_AWS, pattern="^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$"),
    ] = None
    """Your S3 bucket for data and checkpoints. If null, a private, encrypted bucket is created,
    which `make clean` deletes only with PURGE=1."""

    @property
    def ssm_only(self) -> bool:
        """Returns whether SSH goes through SSM Session Manager, because no port is open to the
        outside.
        """
        return not self.allow_ssh_from


@dataclass(frozen=True)
class BatchConfig:
    """Keys of fleet.batch."""

    queue: Annotated[str | None, Key("training", pattern=QUEUE, maxLength=256)] = None
    """Job queue, by name or ARN. Defaults to the queue that `make setup` creates."""
    job_role: Annotated[
        str | None,
        Key("arn:aws:iam::123456789012:role/train", pattern=ROLE, maxLength=2048),
    ] = None
    """IAM role of the containers, which reads and writes the bucket. Defaults to the role that
    `make setup` creates."""
    execution_role: Annotated[
        str | None,
        Key("arn:aws:iam::123456789012:role/train-execution", pattern=ROLE, maxLength=2048),
    ] = None
    """IAM role with which Batch pulls the image, reads secrets and writes logs. Defaults to the
    role that `make setup` creates."""
    attempts: Annotated[int, span("attempts", 1, 10)] = 3
    """Maximum number of attempts per job. Batch retries a job if it lost a machine or if its
    verdict allows another attempt. A failure that would recur is never retried."""
    timeout_hours: Annotated[float | None, span("hours", 0.02, 8760)] = None
    """Time limit per attempt, after which Batch ends the attempt. Null means no limit."""
    shared_memory_gib: Annotated[int | None, span("GiB", 1, 4096)] = None
    """Size of /dev/shm in the containers. Defaults to a quarter of the node's memory, up to 64."""
    share: Annotated[str | None, Key("research", pattern="^[A-Za-z0-9]{1,255}$", maxLength=255)] = (
        None
    )
    """Share identifier for a queue with a fair-share policy. Null means none."""
    priority: Annotated[int | None, span("", 0, 9999)] = None
    """Scheduling priority within the share. Defaults to the queue's priority."""
    consumable_resources: Annotated[
        Texts,
        Key(
            ["licence=1"],
            maxItems=5,
            items={"pattern": "^[A-Za-z0-9_-]{1,128}=[1-9][0-9]{0,8}$", "maxLength": 160},
        ),
    ] = ()
    """Consumable resources in Batch, such as licences, that each node uses while it runs, as
    `name=quantity`."""


@dataclass(frozen=True)
class SageMakerConfig:
    """Keys of fleet.sagemaker."""

    role: Annotated[
        str | None,
        Key("arn:aws:iam::123456789012:role/train", pattern=ROLE, maxLength=2048),
    ] = None
    """IAM role of the training job. Defaults to the role that `make setup` creates."""
    input_mode: Annotated[str | None, Key(enum=["stream", "file", "fastfile", "fsx"])] = None
    """How nodes read the dataset: stream (reads ranges from S3 into a cache on the node), file
    (SageMaker copies the dataset to each node before the start), fastfile (SageMaker mounts the
    prefix) or fsx (fleet.sagemaker.file_system). Defaults to file if the copy takes less than a
    minute, otherwise to stream. `make plan` shows the reason."""
    file_system: Annotated[
        str | None,
        Key(
            "fs-0123456789abcdef0:/fsx/sets",
            pattern="^fs-[0-9a-f]{8,17}:/[A-Za-z0-9._/-]{1,1024}$",
            maxLength=1100,
        ),
    ] = None
    """FSx for Lustre file system that is linked to the bucket, as `fs-id:/mount_name/folder`. Used
    if input_mode is fsx."""
    volume_gib: Annotated[int | None, span("GiB", 1, 16_384)] = None
    """Disk size per node. Defaults to twice the dataset's size if the dataset is copied, but at
    least 100. Instance types with local disks use those instead."""
    warm_pool_minutes: Annotated[int, span("minutes", 0, 360)] = 0
    """How long machines are kept after a job for the next one, at full price. This requires the
    warm pool quota of the instance type. 0 releases them immediately."""
    max_hours: Annotated[float, span("hours", 0.02, 672)] = 120
    """Time limit after which SageMaker stops the job. The default quota is 120 hours, and the
    maximum is 672 hours."""
    wait_hours: Annotated[float | None, span("hours", 0.02, 672)] = None
    """Maximum duration of a spot job, including the wait for machines (see fleet.spot). Defaults to
    twice max_hours, up to 672."""
    retries: Annotated[int, span("attempts", 0, 30)] = 3
    """Maximum number of times that SageMaker restarts the job after an InternalServerError, such as
    a failed machine."""
    subnets: Annotated[
        Texts,
        Key(["subnet-0123456789abcdef0"], maxItems=16, items={"pattern": SUBNET, "maxLength": 32}),
    ] = ()
    """VPC subnets for the nodes. The VPC needs an S3 gateway endpoint. If empty, the job runs in
    SageMaker's network."""
    security_groups: Annotated[
        Texts,
        Key(
            ["sg-0123456789abcdef0"],
            maxItems=5,
            items={"pattern": "^sg-[0-9a-f]{8,17}$", "maxLength": 32},
        ),
    ] = ()
    """Security groups for the nodes in fleet.sagemaker.subnets. For EFA, they must allow all
    traffic within the group."""
    encrypt_traffic: bool = False
    """Whether to encrypt traffic between nodes. This slows down multi-node training and does not
    cover EFA traffic."""
    health_check: bool = False
    """Whether SageMaker checks the machines and their network before the job starts
    (InfraCheckConfig). The check takes minutes."""
    remote_debug: bool = False
    """Whether you can open a shell in the job's containers (RemoteDebugConfig). To open one, run
    `aws ssm start-session --target sagemaker-training-job:<job>_algo-1`."""
    kms_key: Annotated[
        str | None,
        Key("alias/training", pattern="^[A-Za-z0-9:/_-]{1,2048}$", maxLength=2048),
    ] = None
    """KMS key for the nodes' disks and SageMaker's uploads. Defaults to AWS's key."""
    training_plan: Annotated[
        str | None,
        Key(
            "arn:aws:sagemaker:us-east-1:123456789012:training-plan/spring",
            pattern=f"^arn:aws[a-z-]*:sagemaker:{ACCOUNT}:training-plan/[A-Za-z0-9-]{{1,128}}$",
            maxLength=2048,
        ),
    ] = None
    """ARN of the training plan (reserved capacity) for the job."""
    plan_hours: Annotated[float | None, span("hours", 1, 4367)] = None
    """Duration of the training plan that `make setup` buys if training_plan is null. Setup lists
    the offers, and with YES=1 buys one within budget.max_usd. If null, no plan is bought."""


WORD = "^[A-Za-z0-9][A-Za-z0-9._@%+=-]*$"


@dataclass(frozen=True)
class Queue:
    """Entry in fleet.slurm.parallelcluster.queues."""

    name: Annotated[str, Key("queue-0", pattern="^[a-z][a-z0-9-]{0,24}$", maxLength=25)]
    """Partition name."""
    instance_type: Annotated[
        str | None, Key("trn1.32xlarge", pattern=INSTANCE_TYPE, maxLength=64)
    ] = None
    """EC2 instance type. Defaults to fleet.instance_type."""
    min: Annotated[int, span("nodes", 0, 4096)] = 0
    """Number of nodes that stay up, and are billed, even if no job runs."""
    max: Annotated[int | None, span("nodes", 1, 4096)] = None
    """Maximum number of nodes that jobs can start. Defaults to fleet.nodes."""
    capacity: Annotated[str | None, Key(enum=CAPACITIES)] = None
    """Purchase option for the nodes. Defaults to fleet.aws.capacity."""
    reservation: Annotated[
        str | None, Key("cr-0123456789abcdef0", pattern=RESERVATION, maxLength=20)
    ] = None
    """ID of the capacity reservation, or of the capacity block's reservation. Defaults to
    fleet.aws.reservation."""


@dataclass(frozen=True)
class ParallelCluster:
    """Keys of fleet.slurm.parallelcluster."""

    name: Annotated[
        str | None, Key("trn1-16", pattern="^[A-Za-z][A-Za-z0-9-]{0,59}$", maxLength=60)
    ] = None
    """Cluster name. Defaults to the run's name, adapted to the naming rules for clusters."""
    os: Annotated[str, Key(enum=["ubuntu2204", "ubuntu2404", "alinux2023", "rhel9", "rocky9"])] = (
        "ubuntu2404"
    )
    """Operating system of the head node and the compute nodes."""
    head_subnet: Annotated[
        str | None, Key("subnet-0123456789abcdef0", pattern=SUBNET, maxLength=24)
    ] = None
    """Subnet of the head node, which needs a public address. Defaults to the public subnet of the
    created network, or to fleet.aws.subnets. The compute nodes' subnets are private, because nodes
    with several network interfaces get no public address."""
    queues: Annotated[
        tuple[Queue, ...],
        Key([{"name": "queue-0", "max": 8}, {"name": "queue-1", "max": 8}], maxItems=50),
    ] = ()
    """Queues, each of which becomes a Slurm partition, as {name, instance_type, min, max, capacity,
    reservation}. If empty, one queue named compute1 is created, with fleet.instance_type and up to
    fleet.nodes nodes."""
    buckets: Annotated[
        Texts,
        Key(
            ["my-corpora"],
            maxItems=50,
            items={"pattern": "^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", "maxLength": 63},
        ),
    ] = ()
    """S3 buckets that all nodes can read and write, in addition to fleet.aws.bucket."""
    database_uri: Annotated[
        str | None,
        Key(
            "slurm.cluster-x.us-west-2.rds.amazonaws.com:3306",
            pattern="^[A-Za-z0-9.-]+(:[0-9]{1,5})?$",
            maxLength=300,
        ),
    ] = None
    """MySQL server for Slurm accounting. If null, Slurm does no accounting, and sacct shows
    nothing."""
    database_user: Annotated[
        str | None, Key("clusteradmin", pattern="^[A-Za-z0-9_-]+$", maxLength=64)
    ] = None
    """User name on the MySQL server."""
    database_secret: Annotated[
        str | None,
        Key(
            "arn:aws:secretsmanager:us-west-2:123456789012:secret:slurm-AbCdEf",
            pattern=f"^arn:aws[a-z-]*:secretsmanager:{ACCOUNT}:secret:[A-Za-z0-9/_+=.@-]+$",
            maxLength=600,
        ),
    ] = None
    """Secrets Manager secret with the MySQL password."""


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """Keys of fleet.slurm."""

    partition: Annotated[
        str | None,
        Key(
            "gpu",
            pattern="^[A-Za-z0-9][A-Za-z0-9._-]*(,[A-Za-z0-9][A-Za-z0-9._-]*)*$",
            maxLength=255,
        ),
    ] = None
    """Slurm partition, or several separated by commas. Defaults to the cluster's default
    partition."""
    account: Annotated[str | None, Key("vision", pattern=WORD, maxLength=255)] = None
    """Account to charge. Defaults to your default account."""
    qos: Annotated[str | None, Key("long", pattern=WORD, maxLength=255)] = None
    """Quality of service (QOS). Defaults to the account's default."""
    time_limit_minutes: Annotated[int | None, span("minutes", 1, 525_600)] = None
    """Time limit for each start of the job. Shortly before the limit, the job saves a checkpoint
    and is requeued, until it has completed train.steps. Defaults to the partition's limit."""
    warn_before_seconds: Annotated[int, span("s", 10, 65_535)] = 300
    """Time before the limit at which a job must save and stop. It must be long enough for a step
    and a checkpoint."""
    constraint: Annotated[
        str | None,
        Key("h100&nvme", pattern=r"^[A-Za-z0-9_.:=&|*()\[\]-]+$", maxLength=255),
    ] = None
    """Features that nodes must have, in the syntax of `sbatch --constraint`."""
    reservation: Annotated[str | None, Key("team-week", pattern=WORD, maxLength=255)] = None
    """Slurm reservation to run in."""
    gres: Annotated[str | None, Key("gpu:8", pattern="^[A-Za-z0-9_.:=,-]+$", maxLength=255)] = None
    """Generic resources per node. If null and fleet.exclusive is true, a job gets all of a node's
    resources."""
    options: Annotated[
        Texts,
        Key(
            ["--switches=1", "--licenses=matlab:1", "--mail-type=END"],
            maxItems=32,
            items={
                "examples": ["--switches=1"],
                "pattern": r"^--[a-z][a-z0-9-]*(=[A-Za-z0-9_.,:@%+/\[\]=-]+)?$",
                "maxLength": 255,
            },
        ),
    ] = ()
    """Further sbatch options that your site requires, for job.sbatch. Each is one word,
    `--name=value` or `--name`. Options that other keys set are refused."""
    container_runtime: Annotated[str | None, Key(enum=["pyxis", "apptainer"])] = None
    """Program that starts fleet.container on a node: pyxis (srun --container-image) or apptainer.
    If null, jobs run in the nodes' environment, without fleet.container."""
    requeue: bool = True
    """Whether a job is requeued automatically if it lost a node, was preempted or reached its time
    limit. A requeued job resumes from its last checkpoint."""
    preflight: bool = False
    """Whether each job runs the preflight on its nodes before the ranks start. The preflight checks
    each node and the links between nodes, which takes about a minute. The next attempt excludes
    nodes that failed."""
    create: Annotated[str | None, Key(enum=["parallelcluster"])] = None
    """Program that creates the cluster: parallelcluster (AWS ParallelCluster). If null, the cluster
    must already exist."""
    parallelcluster: Annotated[ParallelCluster, Key(backends=["parallelcluster"])]
    """Cluster that `make setup` creates with AWS ParallelCluster if fleet.slurm.create is set.
    Region, compute subnets, head node type, key pair, image, disks and bucket come from fleet.aws.
    The file system comes from fleet.fsx."""
