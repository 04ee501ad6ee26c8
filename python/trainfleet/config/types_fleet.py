"""The keys of the fleet: its nodes, access to them, their devices and their storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..hardware import node_types
from ..hardware.accelerators import Accelerator
from .key import S3, Key
from .types_backends import ACCOUNT, Aws, BatchConfig, SageMakerConfig, SlurmConfig

BY_SSH = ("ssh", "ec2", "slurm", "parallelcluster")  # backends with SSH to the nodes or the head
MOUNTS = ("ssh", "ec2", "parallelcluster", "batch")  # backends that mount an FSx file system
PATH = r"(/(?!\.\.?(/|$))[A-Za-z0-9._@%+=:,~-]+)+/?$"
REPOSITORY = "[a-z0-9][a-z0-9._-]*(:[0-9]{1,5})?(/[a-z0-9][a-z0-9._-]*)*"
IMAGE = f"^{REPOSITORY}(:[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?$"
SECRET = f"arn:aws[a-z-]*:(secretsmanager|ssm):{ACCOUNT}:(secret:|parameter/)[A-Za-z0-9/_+=.@:-]"
AN_ARN = "HF_TOKEN=arn:aws:secretsmanager:us-east-1:123456789012:secret:hf-AbCdEf"


@dataclass(frozen=True)
class SshConfig:
    """The keys of fleet.ssh."""

    user: Annotated[
        str | None, Key(pattern="^[A-Za-z_][A-Za-z0-9._-]{0,62}$", examples=["ubuntu"])
    ] = None
    """The user on the hosts. Null: the user in fleet.ssh.config, or your local user name."""
    key: Annotated[str | None, Key(minLength=1, maxLength=4096, examples=["~/.ssh/fleet"])] = None
    """The private key file. Null: your SSH agent and the default keys in ~/.ssh."""
    jump: Annotated[
        str | None, Key(minLength=1, maxLength=400, examples=["ubuntu@bastion.example"])
    ] = None
    """The jump host, as `user@address:port`, if this machine can't reach the nodes directly. Null:
    none."""
    known_hosts: Annotated[str | None, Key(minLength=1, maxLength=4096)] = None
    """The file of known host keys. Null: the fleet's file, .fleet/known_hosts, and your
    ~/.ssh/known_hosts."""
    fingerprints: Annotated[
        tuple[str, ...], Key(maxItems=10_000, items={"pattern": "^SHA256:[A-Za-z0-9+/]{43}$"})
    ] = ()
    """Host keys to accept at first contact, as `SHA256:...` (ssh-keygen -l -f
    /etc/ssh/ssh_host_ed25519_key.pub). trainfleet asks you about any other new key."""
    config: Annotated[str | None, Key(minLength=1, maxLength=4096, examples=["~/.ssh/config"])] = (
        None
    )
    """The OpenSSH client configuration to use (HostName, User, Port, IdentityFile, ProxyJump). A
    ProxyCommand runs only from a file in your ~/.ssh, and never in `make plan`; Match exec is
    refused. Null: no configuration is read."""


@dataclass(frozen=True)
class Fsx:
    """The keys of fleet.fsx."""

    dns_name: Annotated[
        str | None,
        Key(
            backends=MOUNTS,
            pattern="^[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$",
            examples=["fs-0123456789abcdef0.fsx.us-east-1.amazonaws.com"],
        ),
    ] = None
    """The DNS name of the file system. Null: nothing is mounted; the shared folder already
    exists."""
    mount_name: Annotated[
        str | None, Key(backends=MOUNTS, pattern="^[a-z0-9]{1,8}$", examples=["fsx"])
    ] = None
    """The mount name of the file system, from the console or `aws fsx describe-file-systems`."""
    mount_point: Annotated[str, Key(backends=MOUNTS, pattern="^" + PATH, examples=["/fsx"])] = (
        "/fsx"
    )
    """The mount point; fleet.shared_folder is inside it."""
    size_gib: Annotated[int, Key(unit="GiB", minimum=1200, maximum=10_000_000)] = 1200
    """The size of the created file system: 1200, or a multiple of 2400; with EFA, a size in AWS's
    table."""
    type: Annotated[str, Key(enum=["scratch", "persistent"])] = "scratch"
    """The type of the created file system: scratch (one copy of the data, for files that are also
    in S3), or persistent (AWS replaces a failed disk)."""
    throughput: Annotated[int, Key(unit="MB/s per TiB", enum=[125, 250, 500, 1000])] = 250
    """Throughput per TiB of a persistent file system; scratch has 200."""
    efa: bool = False
    """Whether nodes access a persistent file system over EFA. Setup configures the client and
    verifies by its counters that data uses EFA. It is refused for instance types for which FSx does
    not offer it, and sets the minimum size."""
    s3_import: Annotated[
        str | None, Key(pattern=S3, maxLength=1024, examples=["s3://my-bucket/corpus"])
    ] = None
    """An S3 prefix with objects that appear as files in <fleet.fsx.mount_point>/linked, loaded at
    the first read. Null: none."""
    s3_export: bool = True
    """Whether runs and datasets on the file system are also written to the bucket as they change
    (s3://<bucket>/<name>/runs and /data)."""


@dataclass(frozen=True)
class Devices:
    """The keys of fleet.accelerator, which describe the user's own machines."""

    name: Annotated[str | None, Key(maxLength=80, examples=["h100", "rtx-4090"])] = None
    """The accelerator: v100, t4, a10, a10g, a40, a100, l4, l40, l40s, h100, h200, gh200, b200,
    b300, gb200, rtx-3090, rtx-4090, rtx-5090, rtx-a6000, rtx-6000-ada or rtx-pro-6000; with -pcie
    or -nvl for those cards. The name in nvidia-smi works too. Null: from fleet.slurm.gres or this
    machine."""
    per_node: Annotated[int | None, Key(unit="devices", minimum=1, maximum=256)] = None
    """Accelerators per node. Null: from fleet.slurm.gres, else fleet.ranks_per_node, else the usual
    number."""
    memory_gib: Annotated[float | None, Key(unit="GiB", exclusiveMinimum=0, maximum=4096)] = None
    """The memory of each accelerator, as in its name (an A100 has 40 or 80). Null: the smallest
    available size."""
    network: Annotated[str | None, Key(enum=["efa", "infiniband", "roce", "ethernet"])] = None
    """The network between nodes: efa, infiniband, roce (RDMA over Ethernet) or ethernet (TCP). It
    determines NCCL's variables. Null: unknown; NCCL uses the fastest network it finds, and a plan
    assumes a plain network."""
    network_gbps: Annotated[
        float | None, Key(unit="Gbit/s", exclusiveMinimum=0, maximum=100_000)
    ] = None
    """The bandwidth of all cards of a node together to other nodes. A launch is refused if its
    nodes are far below it. Null: the usual bandwidth; nodes are not checked against it."""
    usd_per_hour: Annotated[float | None, Key(unit="US dollars", minimum=0, maximum=100_000)] = None
    """The price of a node per hour, for the estimate and budget.max_usd. Null: no cost; with
    fleet.instance_type, its list price."""

    @property
    def node_type(self) -> node_types.NodeType | None:
        """Returns the node type; None if the keys are incomplete, or the table does not have it."""
        if self.name is None or self.per_node is None:
            return None
        return node_types.own_machine(
            self.name,
            self.per_node,
            self.memory_gib,
            self.network,
            self.network_gbps,
            self.usd_per_hour,
        )


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The keys of fleet."""

    backend: Annotated[str, Key(enum=["local", "ssh", "ec2", "slurm", "batch", "sagemaker"])] = (
        "local"
    )
    """The backend that runs the jobs: local (this machine), ssh (your hosts), ec2 (instances
    created for the run), slurm, batch (AWS Batch), sagemaker, or the name of a backend in another
    installed package."""
    nodes: Annotated[int, Key(unit="nodes", minimum=1, maximum=16_384)] = 2
    """The number of nodes. On the local backend, these are simulated on this machine, each with its
    own torchrun. `NODES=` sets it for one command."""
    instance_type: Annotated[str | None, Key(maxLength=64, examples=["trn1.32xlarge"])] = None
    """The EC2 type of every node. It determines cores, accelerators, memory, EFA and price. Null:
    this machine (local), or your own machines, described by fleet.accelerator."""
    accelerator: Annotated[
        Devices | None,
        Key(
            type=["object", "string"],
            pattern=r"^\s*([0-9]{1,4} ?[xX×*] ?)?\S.*$",
            maxLength=80,
            examples=["h100", "8xH100"],
        ),
    ] = None
    """The accelerators of machines without an EC2 type (ssh, slurm, local): a name, `8xH100`, or
    the keys below. `make doctor` inspects the nodes and prints the keys to set. Null: those of
    fleet.instance_type or of a typed fleet.slurm.gres (`gpu:h100:8`), else this machine's (local),
    else none."""
    ranks_per_node: Annotated[int, Key(default=None, unit="ranks", minimum=1, maximum=256)]
    """Processes on each node. Null: one per accelerator, or one on a node without accelerators; one
    per core if a trial on this machine found that faster."""
    rendezvous_port: Annotated[int | None, Key(minimum=1024, maximum=65_535)] = None
    """The rendezvous port on the first node. Null: a free port on this machine."""
    hosts: Annotated[
        tuple[str, ...],
        Key(
            backends=BY_SSH,
            maxItems=10_000,
            items={"minLength": 1, "maxLength": 400},
            examples=[["gpu-[01-08].example", "spare=10.0.0.9"]],
        ),
    ] = ()
    """The machines of the ssh backend, each as `address`, `name=address` or `address:port`;
    `gpu-[01-08].example` means eight and, as in Slurm, `node[01,03-05]` means four. The first is
    the head, which runs the rendezvous."""
    min_nodes: Annotated[int | None, Key(unit="nodes", minimum=1, maximum=16_384)] = None
    """The minimum number of nodes to continue training if a node is lost and there is no spare.
    Null: fleet.nodes, so the run waits for a spare."""
    secrets: Annotated[
        tuple[str, ...],
        Key(
            writeOnly=True,
            maxItems=100,
            items={
                "writeOnly": True,
                "examples": ["HF_TOKEN"],
                "pattern": "^[A-Za-z_][A-Za-z0-9_]*$",
                "maxLength": 128,
            },
            examples=[["HF_TOKEN"]],
        ),
    ] = ()
    """Environment variables that the nodes need, such as HF_TOKEN. Their values are read on your
    machine, sent to the ranks through stdin, and never written to a file, command line or log."""
    shared_folder: Annotated[
        str | None,
        Key(pattern="^(s3:/)?" + PATH, examples=["/fsx/trainfleet", "s3://my-bucket/trainfleet"]),
    ] = None
    """A folder that every node sees (FSx for Lustre, NFS), with code, environment, data/ and runs/.
    The ssh backend needs one. If nodes share no disk: s3://bucket/prefix, with runs/ for all
    machines below it."""
    python: Annotated[
        str | None, Key(backends=BY_SSH, pattern="^" + PATH, examples=["/opt/pytorch/bin/python"])
    ] = None
    """The Python on the nodes with torch. Null: `make setup` builds an environment in the shared
    folder from requirements.lock."""
    platform: Annotated[
        str, Key(default=None, enum=["cpu", "cuda", "cuda-volta", "neuron", "neuron-xla"])
    ]
    """The pinned versions in docker/platforms.lock.yaml that the nodes must have. Null: those of
    the instance type or accelerator, else cpu."""
    install_docker: Annotated[bool, Key(backends=["ssh", "ec2"])] = False
    """Whether `make setup` installs Docker on the nodes (and NVIDIA's container toolkit on GPU
    nodes)."""
    container: Annotated[
        str,
        Key(
            pattern=IMAGE,
            maxLength=512,
            examples=[
                "none",
                "build",
                "123456789012.dkr.ecr.us-east-1.amazonaws.com/trainfleet:cuda-0123456789abcdef",
            ],
        ),
    ] = "none"
    """The container image of jobs: none (the nodes' environment); build (`make push` builds it from
    docker/ for fleet.platform and pushes it to ECR, tagged by its content); or an existing image,
    as registry/name:tag or with @sha256:... AWS Batch and SageMaker need an image; the local
    backend does not support one."""
    container_base: Annotated[
        str | None,
        Key(pattern=IMAGE, maxLength=512, examples=["mirror.example:5000/library/ubuntu:noble"]),
    ] = None
    """The base image of `make build`, for a mirror or a machine without Internet access. Null: the
    platform's image in docker/platforms.lock.yaml, by its digest."""
    exclusive: Annotated[bool, Key(backends=BY_SSH)] = True
    """Whether a launch refuses hosts with another active trainfleet run. If false, runs share
    hosts, each with its own fleet.rendezvous_port."""
    on_slow_node: Annotated[str, Key(enum=["warn", "replace"])] = "warn"
    """What to do if a node's links are far worse than the others' and the run has slowed down: warn
    (an event, in status and report), or replace (if there is a spare, the run continues from its
    last checkpoint without the node)."""
    spot: Annotated[bool, Key(backends=["ssh", "ec2", "slurm", "parallelcluster", "sagemaker"])] = (
        False
    )
    """Whether the nodes are EC2 spot instances (as with fleet.aws.capacity: spot). Each node polls
    for its interruption notice every 5 s. After a notice, all ranks save and stop, and the same
    command resumes."""
    ssh: Annotated[SshConfig, Key(backends=BY_SSH)]
    """How to reach the hosts."""
    fsx: Annotated[Fsx, Key(backends=["ec2", "parallelcluster"])]
    """The FSx for Lustre file system of fleet.shared_folder, mounted by `make setup`. Backends that
    create machines also create the file system if dns_name is null and fleet.shared_folder is
    inside fleet.fsx.mount_point."""
    max_lifetime_hours: Annotated[
        float | None, Key(backends=["ec2"], unit="hours", exclusiveMinimum=0, maximum=8760)
    ] = None
    """Nodes created on AWS for the run save and stop this long after their creation, so that a
    forgotten fleet ends. Null: never."""
    idle_minutes: Annotated[
        int | None,
        Key(backends=["ec2", "parallelcluster"], unit="minutes", minimum=10, maximum=100_000),
    ] = 120
    """Nodes created on AWS for the run stop after this long without a job or a login. Null:
    never."""
    aws: Annotated[Aws, Key(backends=["ec2", "parallelcluster"])]
    """The machines that AWS's backends (ec2, batch, sagemaker) create, and their location."""
    secret_arns: Annotated[
        tuple[str, ...],
        Key(
            backends=["batch", "sagemaker"],
            writeOnly=True,
            maxItems=100,
            items={
                "writeOnly": True,
                "examples": [AN_ARN],
                "pattern": f"^[A-Za-z_][A-Za-z0-9_]{{0,127}}={SECRET}{{1,1024}}$",
                "maxLength": 2048,
            },
            examples=[[AN_ARN]],
        ),
    ] = ()
    """Secrets for AWS Batch and SageMaker, as `NAME=arn` of a secret in Secrets Manager or a
    parameter of SSM. For a name in fleet.secrets without an ARN, the value is read on your machine
    and kept in SSM as a SecureString until `make clean`."""
    batch: Annotated[BatchConfig, Key(backends=["batch"])]
    """The settings of AWS Batch, for the batch backend."""
    sagemaker: Annotated[SageMakerConfig, Key(backends=["sagemaker"])]
    """The settings of SageMaker, for the sagemaker backend."""
    slurm: Annotated[SlurmConfig, Key(backends=["slurm", "parallelcluster"])]
    """The resources that jobs of the slurm backend request. Run `make` on a machine with sbatch, in
    a folder that every node sees; or elsewhere, with that machine as the only entry of
    fleet.hosts."""
    options: Annotated[
        tuple[str, ...],
        Key(
            maxItems=100,
            items={
                "examples": ["queue=gpu"],
                "pattern": r"^[a-z][a-z0-9_]*=[^\u0000-\u001f\u007f]*$",
                "maxLength": 4096,
            },
            examples=[["queue=gpu", "priority=5"]],
        ),
    ] = ()
    """Settings of a backend in another package (`fleet.backend` names it;
    docs/how-to/own-backend.md), each as `name=value`. That backend checks them."""

    @property
    def device(self) -> str:
        """Returns the kind of device that a rank opens. There is no fallback to another kind."""
        return node_types.device_of(self.platform)

    @property
    def is_told(self) -> bool:
        """Returns whether the config names the node type, known or not. Otherwise the nodes are
        like this machine.
        """
        return self.instance_type is not None or self.accelerator is not None

    @property
    def node_type(self) -> node_types.NodeType | None:
        """Returns the node type from instance_type or accelerator; None if it is not given or not
        known.
        """
        if self.instance_type is not None:
            return node_types.instance(self.instance_type)
        return self.accelerator.node_type if self.accelerator else None

    @property
    def rank_device(self) -> Accelerator | None:
        """Returns a rank's device; `None` for a CPU, or a device that is not in the table."""
        row = self.node_type
        if self.is_told or self.device == "cpu":
            return row.accelerator if row else None
        return node_types.local_accelerator()

    @property
    def on_local_cpus(self) -> bool:
        """Returns whether the ranks would probably compute on this machine's CPUs."""
        return not self.is_told and (self.device == "cpu" or not node_types.local_accelerators())
