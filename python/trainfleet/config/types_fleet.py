"""Config keys of the fleet: its nodes, access to them, their devices and their storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ..hardware import node_types
from ..hardware.accelerators import Accelerator
from .key import S3, Key, Texts, span
from .types_backends import ACCOUNT, Aws, BatchConfig, SageMakerConfig, SlurmConfig

# backends that reach the nodes or the head over SSH
BY_SSH = ("ssh", "ec2", "slurm", "parallelcluster")
MOUNTS = ("ssh", "ec2", "parallelcluster", "batch")  # backends that mount an FSx file system
PATH = r"(/(?!\.\.?(/|$))[A-Za-z0-9._@%+=:,~-]+)+/?$"
REPOSITORY = "[a-z0-9][a-z0-9._-]*(:[0-9]{1,5})?(/[a-z0-9][a-z0-9._-]*)*"
IMAGE = f"^{REPOSITORY}(:[A-Za-z0-9_][A-Za-z0-9._-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?$"
SECRET = f"arn:aws[a-z-]*:(secretsmanager|ssm):{ACCOUNT}:(secret:|parameter/)[A-Za-z0-9/_+=.@:-]"
AN_ARN = "HF_TOKEN=arn:aws:secretsmanager:us-east-1:123456789012:secret:hf-AbCdEf"


@dataclass(frozen=True)
class SshConfig:
    """Keys of fleet.ssh."""

    user: Annotated[str | None, Key("ubuntu", pattern="^[A-Za-z_][A-Za-z0-9._-]{0,62}$")] = None
    """Login user on the hosts. Defaults to the user in fleet.ssh.config, or to your local user
    name."""
    key: Annotated[str | None, Key("~/.ssh/fleet", minLength=1, maxLength=4096)] = None
    """Private key file. Defaults to your SSH agent and the standard keys in ~/.ssh."""
    jump: Annotated[str | None, Key("ubuntu@bastion.example", minLength=1, maxLength=400)] = None
    """Jump host for nodes that this machine can't reach directly, as `user@address:port`. Null
    means a direct connection."""
    known_hosts: Annotated[str | None, Key(minLength=1, maxLength=4096)] = None
    """File of known host keys. Defaults to the fleet's .fleet/known_hosts and your
    ~/.ssh/known_hosts."""
    fingerprints: Annotated[
        Texts, Key(maxItems=10_000, items={"pattern": "^SHA256:[A-Za-z0-9+/]{43}$"})
    ] = ()
    """Fingerprints of host keys to accept on first contact, as `SHA256:...`. To print one on a
    host, run `ssh-keygen -l -f /etc/ssh/ssh_host_ed25519_key.pub`. trainfleet asks you before it
    accepts any other new key."""
    config: Annotated[str | None, Key("~/.ssh/config", minLength=1, maxLength=4096)] = None
    """OpenSSH client config file to read (HostName, User, Port, IdentityFile, ProxyJump). A
    ProxyCommand runs only if the file is in your ~/.ssh, and never during `make plan`. Match exec
    is refused. Null means that no file is read."""


@dataclass(frozen=True)
class Fsx:
    """Keys of fleet.fsx."""

    dns_name: Annotated[
        str | None,
        Key(
            "fs-0123456789abcdef0.fsx.us-east-1.amazonaws.com",
            backends=MOUNTS,
            pattern="^[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$",
        ),
    ] = None
    """DNS name of an existing file system to mount. If null and fleet.fsx creates no file system,
    the shared folder must already exist on the nodes."""
    mount_name: Annotated[str | None, Key("fsx", backends=MOUNTS, pattern="^[a-z0-9]{1,8}$")] = None
    """Mount name of the file system, as shown in the console or by `aws fsx
    describe-file-systems`."""
    mount_point: Annotated[str, Key("/fsx", backends=MOUNTS, pattern="^" + PATH)] = "/fsx"
    """Mount point on the nodes. fleet.shared_folder must be inside it."""
    size_gib: Annotated[int, span("GiB", 1200, 10_000_000)] = 1200
    """Size of the file system to create: 1200 or a multiple of 2400. With EFA, only the sizes in
    AWS's table are allowed."""
    type: Annotated[str, Key(enum=["scratch", "persistent"])] = "scratch"
    """Deployment type of the file system to create. `scratch` keeps one copy of the data, which
    suits files that are also in S3. With `persistent`, AWS replaces failed disks."""
    throughput: Annotated[int, Key(unit="MB/s per TiB", enum=[125, 250, 500, 1000])] = 250
    """Throughput per TiB of a persistent file system. A scratch file system always provides 200."""
    efa: bool = False
    """Whether nodes access a persistent file system over EFA. Setup configures the client, and
    checks the EFA counters to verify that data uses EFA. Instance types without EFA support in FSx
    are refused. EFA also determines the minimum size."""
    s3_import: Annotated[str | None, Key("s3://my-bucket/corpus", pattern=S3, maxLength=1024)] = (
        None
    )
    """S3 prefix whose objects appear as files in <fleet.fsx.mount_point>/linked. Each object is
    loaded when it is first read. Null means none."""
    s3_export: bool = True
    """Whether runs and datasets on the file system are exported to the bucket as they change
    (s3://<bucket>/<name>/runs and /data)."""


@dataclass(frozen=True)
class Devices:
    """Keys of fleet.accelerator, which describe your own machines."""

    name: Annotated[str | None, Key("h100", "rtx-4090", maxLength=80)] = None
    """Accelerator model: v100, t4, a10, a10g, a40, a100, l4, l40, l40s, h100, h200, gh200, b200,
    b300, gb200, rtx-3090, rtx-4090, rtx-5090, rtx-a6000, rtx-6000-ada or rtx-pro-6000. Append -pcie
    or -nvl for those variants. The name that nvidia-smi prints also works. Defaults to the model in
    fleet.slurm.gres, or to this machine's."""
    per_node: Annotated[int | None, span("devices", 1, 256)] = None
    """Number of accelerators per node. Defaults to the number in fleet.slurm.gres, then to
    fleet.ranks_per_node, then to the usual number for the model."""
    memory_gib: Annotated[float | None, Key(unit="GiB", exclusiveMinimum=0, maximum=4096)] = None
    """Nominal memory per accelerator, such as 40 or 80 for an A100. Defaults to the smallest size
    available."""
    network: Annotated[str | None, Key(enum=["efa", "infiniband", "roce", "ethernet"])] = None
    """Network between nodes: efa, infiniband, roce (RDMA over Ethernet) or ethernet (TCP). It
    determines NCCL's environment variables. If null, NCCL uses the fastest network it finds, and
    plans assume a network without RDMA."""
    network_gbps: Annotated[
        float | None, Key(unit="Gbit/s", exclusiveMinimum=0, maximum=100_000)
    ] = None
    """Total network bandwidth of a node, over all its network cards. A launch is refused if the
    measured bandwidth is far lower. Defaults to the usual bandwidth for such nodes, which is not
    enforced."""
    usd_per_hour: Annotated[float | None, span("US dollars", 0, 100_000)] = None
    """Price per node and hour, for cost estimates and budget.max_usd. Defaults to the list price of
    fleet.instance_type, or to no cost."""

    @property
    def node_type(self) -> node_types.NodeType | None:
        """Returns the node type, or None if keys are missing or the accelerator is not in the
        table.
        """
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
    """Keys of fleet."""

    backend: Annotated[str, Key(enum=["local", "ssh", "ec2", "slurm", "batch", "sagemaker"])] = (
        "local"
    )
    """Backend that runs the jobs: local (this machine), ssh (your hosts), ec2 (instances created
    for the run), slurm, batch (AWS Batch), sagemaker, or the name of a backend from another
    installed package."""
    nodes: Annotated[int, span("nodes", 1, 16_384)] = 2
    """Number of nodes. The local backend simulates nodes on this machine, each with a separate
    torchrun. `NODES=` overrides this key for one command."""
    instance_type: Annotated[str | None, Key("trn1.32xlarge", maxLength=64)] = None
    """EC2 instance type of every node. It determines cores, accelerators, memory, EFA and price. If
    null, the local backend uses this machine, and fleet.accelerator describes the machines of other
    backends."""
    accelerator: Annotated[
        Devices | None,
        Key(
            "h100",
            "8xH100",
            type=["object", "string"],
            pattern=r"^\s*([0-9]{1,4} ?[xX×*] ?)?\S.*$",
            maxLength=80,
        ),
    ] = None
    """Accelerators of machines without an EC2 instance type (ssh, slurm, local): a model, a count
    and model such as `8xH100`, or the keys below. `make doctor` inspects the nodes and prints the
    keys to set. Defaults to those of fleet.instance_type or of a typed fleet.slurm.gres
    (`gpu:h100:8`). Otherwise the local backend uses this machine's, and other backends assume
    none."""
    ranks_per_node: Annotated[int, Key(default=None, unit="ranks", minimum=1, maximum=256)]
    """Number of processes per node. Defaults to one per accelerator. Without accelerators, defaults
    to one, or to one per core if a trial on this machine showed that to be faster."""
    rendezvous_port: Annotated[int | None, Key(minimum=1024, maximum=65_535)] = None
    """Rendezvous port on the first node. If null, it is chosen automatically (a free port on the
    local backend)."""
    hosts: Annotated[
        Texts,
        Key(
            ["gpu-[01-08].example", "spare=10.0.0.9"],
            backends=BY_SSH,
            maxItems=10_000,
            items={"minLength": 1, "maxLength": 400},
        ),
    ] = ()
    """Hosts of the ssh backend, each as `address`, `name=address` or `address:port`. Ranges expand
    as in Slurm: `gpu-[01-08].example` means eight hosts, and `node[01,03-05]` means four. The first
    host is the head, which runs the rendezvous."""
    min_nodes: Annotated[int | None, span("nodes", 1, 16_384)] = None
    """Minimum number of nodes to continue training with if a node is lost and no spare is
    available. Defaults to fleet.nodes, so that the run waits for a spare."""
    secrets: Annotated[
        Texts,
        Key(
            ["HF_TOKEN"],
            writeOnly=True,
            maxItems=100,
            items={
                "writeOnly": True,
                "examples": ["HF_TOKEN"],
                "pattern": "^[A-Za-z_][A-Za-z0-9_]*$",
                "maxLength": 128,
            },
        ),
    ] = ()
    """Names of secret environment variables that the nodes need, such as HF_TOKEN. Their values are
    read on your machine and sent to the ranks through stdin. They are never written to a file,
    command line or log."""
    shared_folder: Annotated[
        str | None,
        Key("/fsx/trainfleet", "s3://my-bucket/trainfleet", pattern="^(s3:/)?" + PATH),
    ] = None
    """Folder that every node can access (FSx for Lustre, NFS), with code, environment, data/ and
    runs/. The ssh backend requires one. If the nodes share no disk, use s3://bucket/prefix, which
    stores the runs/ of all machines."""
    python: Annotated[
        str | None, Key("/opt/pytorch/bin/python", backends=BY_SSH, pattern="^" + PATH)
    ] = None
    """Path of a Python with torch on the nodes. If null, `make setup` builds an environment in the
    shared folder from requirements.lock."""
    platform: Annotated[
        str, Key(default=None, enum=["cpu", "cuda", "cuda-volta", "neuron", "neuron-xla"])
    ]
    """Entry in docker/platforms.lock.yaml with the pinned versions that the nodes must have.
    Defaults to the platform of the instance type or accelerator, or to cpu."""
    install_docker: Annotated[bool, Key(backends=["ssh", "ec2"])] = False
    """Whether `make setup` installs Docker on the nodes, and NVIDIA's container toolkit on GPU
    nodes."""
    container: Annotated[
        str,
        Key(
            "none",
            "build",
            "123456789012.dkr.ecr.us-east-1.amazonaws.com/trainfleet:cuda-0123456789abcdef",
            pattern=IMAGE,
            maxLength=512,
        ),
    ] = "none"
    """Container image for jobs. `none` runs jobs in the nodes' environment. `build` uses an image
    that `make push` builds from docker/ for fleet.platform and pushes to ECR, tagged by its
    content. Any other value names an existing image, as registry/name:tag or with @sha256:... AWS
    Batch and SageMaker require an image. The local backend does not support images."""
    container_base: Annotated[
        str | None,
        Key("mirror.example:5000/library/ubuntu:noble", pattern=IMAGE, maxLength=512),
    ] = None
    """Base image for `make build`, for use with a mirror or without Internet access. Defaults to
    the platform's image in docker/platforms.lock.yaml, pinned by digest."""
    exclusive: Annotated[bool, Key(backends=BY_SSH)] = True
    """Whether a launch refuses hosts with another active trainfleet run. If false, runs can share
    hosts, and each run needs a different fleet.rendezvous_port."""
    on_slow_node: Annotated[str, Key(enum=["warn", "replace"])] = "warn"
    """What to do if a node's links are far slower than the others' and the run has slowed down.
    `warn` records an event, which status and report show. `replace` continues the run from its last
    checkpoint without the node, if a spare is available."""
    spot: Annotated[bool, Key(backends=["ssh", "ec2", "slurm", "parallelcluster", "sagemaker"])] = (
        False
    )
    """Whether the nodes are EC2 spot instances, as with fleet.aws.capacity: spot. Each node polls
    for its interruption notice every 5 s. After a notice, all ranks save and stop, and running the
    same command again resumes the run."""
    ssh: Annotated[SshConfig, Key(backends=BY_SSH)]
    """SSH access to the hosts."""
    fsx: Annotated[Fsx, Key(backends=["ec2", "parallelcluster"])]
    """FSx for Lustre file system for fleet.shared_folder, which `make setup` mounts. Backends that
    create machines also create the file system if dns_name is null and fleet.shared_folder is
    inside fleet.fsx.mount_point."""
    max_lifetime_hours: Annotated[
        float | None, Key(backends=["ec2"], unit="hours", exclusiveMinimum=0, maximum=8760)
    ] = None
    """Maximum lifetime of nodes that were created on AWS for the run. They then save and stop, so
    that a forgotten fleet does not run forever. Null means no limit."""
    idle_minutes: Annotated[
        int | None,
        Key(backends=["ec2", "parallelcluster"], unit="minutes", minimum=10, maximum=100_000),
    ] = 120
    """Idle time, without a job or login, after which nodes that were created on AWS for the run
    stop. Null means never."""
    aws: Annotated[Aws, Key(backends=["ec2", "parallelcluster"])]
    """Region, network, capacity, image and storage of the machines that the AWS backends (ec2,
    batch, sagemaker) create."""
    secret_arns: Annotated[
        Texts,
        Key(
            [AN_ARN],
            backends=["batch", "sagemaker"],
            writeOnly=True,
            maxItems=100,
            items={
                "writeOnly": True,
                "examples": [AN_ARN],
                "pattern": f"^[A-Za-z_][A-Za-z0-9_]{{0,127}}={SECRET}{{1,1024}}$",
                "maxLength": 2048,
            },
        ),
    ] = ()
    """Secrets for AWS Batch and SageMaker, as `NAME=arn` of a Secrets Manager secret or an SSM
    parameter. If a name in fleet.secrets has no ARN here, its value is read on your machine and
    stored in SSM as a SecureString until `make clean`."""
    batch: Annotated[BatchConfig, Key(backends=["batch"])]
    """AWS Batch settings, for the batch backend."""
    sagemaker: Annotated[SageMakerConfig, Key(backends=["sagemaker"])]
    """SageMaker settings, for the sagemaker backend."""
    slurm: Annotated[SlurmConfig, Key(backends=["slurm", "parallelcluster"])]
    """Resources that jobs of the slurm backend request. Run `make` on a machine with sbatch, in a
    folder that every node can access. To run `make` elsewhere, set that machine as the only entry
    of fleet.hosts."""
    options: Annotated[
        Texts,
        Key(
            ["queue=gpu", "priority=5"],
            maxItems=100,
            items={
                "examples": ["queue=gpu"],
                "pattern": r"^[a-z][a-z0-9_]*=[^\u0000-\u001f\u007f]*$",
                "maxLength": 4096,
            },
        ),
    ] = ()
    """Settings for a backend from another package, each as `name=value`. fleet.backend names the
    backend, which also validates its settings (docs/how-to/own-backend.md)."""

    @property
    def device(self) -> str:
        """Returns the device type that each rank uses. Ranks never fall back to another type."""
        return node_types.device_of(self.platform)

    @property
    def is_told(self) -> bool:
        """Returns whether the config specifies a node type, even an unknown one. Otherwise the
        nodes are assumed to be like this machine.
        """
        return self.instance_type is not None or self.accelerator is not None

    @property
    def node_type(self) -> node_types.NodeType | None:
        """Returns the node type from instance_type or accelerator, or None if it is unset or
        unknown.
        """
        if self.instance_type is not None:
            return node_types.instance(self.instance_type)
        return self.accelerator.node_type if self.accelerator else None

    @property
    def rank_device(self) -> Accelerator | None:
        """Returns each rank's accelerator, or None for a CPU or an unknown device."""
        row = self.node_type
        if self.is_told or self.device == "cpu":
            return row.accelerator if row else None
        return node_types.local_accelerator()

    @property
    def on_local_cpus(self) -> bool:
        """Returns whether the ranks would probably run on this machine's CPUs."""
        return not self.is_told and (self.device == "cpu" or not node_types.local_accelerators())
