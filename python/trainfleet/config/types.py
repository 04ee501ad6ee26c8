"""The config as frozen dataclasses: one for each object of schema/config.schema.json, field for key (a test keeps them equal).

`load` builds them once, at the edge; after it nothing is None that training needs (see derive.py for what was filled in).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import hardware
from ..accelerators import Accelerator


@dataclass(frozen=True)
class Ssh:
    user: str | None
    key: str | None
    jump: str | None
    known_hosts: str | None
    fingerprints: tuple[str, ...]
    config: str | None


@dataclass(frozen=True)
class Fsx:
    dns_name: str | None
    mount_name: str | None
    folder: str
    size_gib: int = 1200
    type: str = "scratch"
    throughput: int = 250
    efa: bool = False
    link: str | None = None
    export: bool = True


@dataclass(frozen=True)
class Aws:
    name: str | None = None
    region: str | None = None
    zones: tuple[str, ...] = ()
    vpc: str | None = None
    subnets: tuple[str, ...] = ()
    ssh_from: tuple[str, ...] = ()
    head: str | None = None
    key_pair: str | None = None
    capacity: str = "on-demand"
    reservation: str | None = None
    block_hours: float | None = None
    image: str | None = None
    volume_gib: int = 300
    bucket: str | None = None

    @property
    def ssm_only(self) -> bool:
        """Whether no port is open to the outside: SSH goes through SSM Session Manager."""
        return not self.ssh_from


@dataclass(frozen=True)
class Batch:
    queue: str | None
    job_role: str | None
    execution_role: str | None
    attempts: int
    timeout_hours: float | None
    shared_memory_gib: int | None
    share: str | None
    priority: int | None
    consumable_resources: tuple[str, ...]


@dataclass(frozen=True)
class SageMaker:
    role: str | None
    input_mode: str | None
    file_system: str | None
    volume_gib: int | None
    warm_pool_minutes: int
    max_hours: float
    wait_hours: float | None
    retries: int
    subnets: tuple[str, ...]
    security_groups: tuple[str, ...]
    encrypt_traffic: bool
    health_check: bool
    remote_debug: bool
    kms_key: str | None
    training_plan: str | None


@dataclass(frozen=True)
class Queue:
    """One entry of fleet.slurm.parallelcluster.queues."""

    name: str
    instance_type: str | None = None
    min: int = 0
    max: int | None = None
    capacity: str | None = None
    reservation: str | None = None


@dataclass(frozen=True)
class ParallelCluster:
    name: str | None
    os: str
    head_subnet: str | None
    queues: tuple[Queue, ...]
    buckets: tuple[str, ...]
    database_uri: str | None
    database_user: str | None
    database_secret: str | None


@dataclass(frozen=True)
class Slurm:
    partition: str | None
    account: str | None
    qos: str | None
    time_limit: int | None
    notice: int
    constraint: str | None
    reservation: str | None
    gres: str | None
    container: str | None
    requeue: bool
    gate: bool
    create: str | None
    parallelcluster: ParallelCluster


@dataclass(frozen=True)
class Devices:
    """fleet.accelerator: what accelerates each of the machines that somebody owns, and what joins them."""

    name: str | None = None
    per_node: int | None = None
    memory_gib: float | None = None
    network: str | None = None
    network_gbps: float | None = None
    usd_per_hour: float | None = None

    @property
    def node_type(self) -> hardware.NodeType | None:
        """The kind of nodes that it says; None where it says too little, or names what the table lacks."""
        if self.name is None or self.per_node is None:
            return None
        return hardware.own_machine(self.name, self.per_node, self.memory_gib, self.network, self.network_gbps, self.usd_per_hour)


@dataclass(frozen=True)
class Fleet:
    backend: str
    nodes: int
    instance_type: str | None
    ranks_per_node: int
    port: int | None
    hosts: tuple[str, ...]
    nodes_min: int | None
    secrets: tuple[str, ...]
    shared_folder: str | None
    python: str | None
    stack: str
    docker: bool
    exclusive: bool
    slow: str
    spot: bool
    ssh: Ssh
    fsx: Fsx
    secret_arns: tuple[str, ...]
    batch: Batch
    sagemaker: SageMaker
    slurm: Slurm
    expires_hours: float | None = None
    idle_minutes: int | None = 120
    aws: Aws = Aws()
    image: str = "none"
    base_image: str | None = None
    accelerator: Devices | None = None

    @property
    def device(self) -> str:
        """The kind of device that a rank opens: nothing else is taken in its place."""
        return hardware.device_of(self.stack)

    @property
    def is_told(self) -> bool:
        """Whether the config says what kind of nodes these are, be it known or not; else they are as this machine."""
        return self.instance_type is not None or self.accelerator is not None

    @property
    def node_type(self) -> hardware.NodeType | None:
        """The kind of its nodes: an EC2 type, or what fleet.accelerator says; None where it is not told, or not known."""
        if self.instance_type is not None:
            return hardware.instance(self.instance_type)
        return self.accelerator.node_type if self.accelerator else None

    @property
    def rank_device(self) -> Accelerator | None:
        """What a rank has to compute on; None for a CPU, or a device that the table lacks."""
        row = self.node_type
        if self.is_told or self.device == "cpu":
            return row.accelerator if row else None
        return hardware.local_accelerator()

    @property
    def on_local_cpus(self) -> bool:
        """Whether its ranks would compute on this machine's CPUs, as far as is known."""
        return not self.is_told and (self.device == "cpu" or not hardware.local_accelerators())


@dataclass(frozen=True)
class Source:
    """One entry of data.sources that is more than a path."""

    path: str
    weight: float | None = None
    text_field: str | None = None


@dataclass(frozen=True)
class Data:
    name: str
    sources: tuple[str | Source, ...]
    text_field: str
    tokenizer: str
    vocabulary_size: int
    validation_fraction: float
    store: str | None = None
    shuffle_window: int | None = None
    bad_records: str | float = "stop"
    instance_type: str | None = None

    @property
    def mixture(self) -> tuple[Source, ...]:
        """Every source in full, also those that are only a path."""
        return tuple(Source(source) if isinstance(source, str) else source for source in self.sources)

    @property
    def weights(self) -> tuple[float, ...] | None:
        """The sources' weights; None when they have none, and each counts by its tokens."""
        given = [source.weight for source in self.mixture if source.weight is not None]
        return tuple(given) if given and len(given) == len(self.sources) else None

    def text_field_of(self, source: int) -> str:
        """The field that holds the text of one source's records."""
        return self.mixture[source].text_field or self.text_field


@dataclass(frozen=True)
class Model:
    preset: str | None
    family: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    intermediate_size: int
    vocabulary_size: int
    max_sequence_length: int
    rope_theta: float
    norm_epsilon: float
    tie_embeddings: bool
    rope_scaling: float = 1.0
    dropout: float = 0.0
    head_size: int | None = None
    module: str | None = None

    @property
    def head_features(self) -> int:
        """Features of one head."""
        return self.head_size or self.hidden_size // self.heads


@dataclass(frozen=True)
class Layout:
    shard: int
    tensor: int
    pipeline: int
    context: int
    zero: int = 3
    interleave: int = 1


@dataclass(frozen=True)
class Train:
    steps: int
    global_batch: int
    micro_batch: int
    sequence_length: int
    learning_rate: float
    learning_rate_floor: float
    optimizer: str
    schedule: str
    schedule_steps: int
    schedule_power: float
    decay_steps: int
    warmup_steps: int
    weight_decay: float
    beta1: float
    beta2: float
    epsilon: float
    gradient_clip: float
    spike_sigmas: float
    skips_in_a_row: int
    precision: str
    weights: str
    seed: int
    log_every: int
    validate_every: int
    validation_sequences: int
    init_from: str | None
    recompute: str | float
    compile: bool
    profile_steps: str | None
    separate_documents: bool
    layout: Layout
    search_micro_batch: bool = False
    loggers: tuple[str, ...] = ()
    callback: str | None = None
    compile_only: bool = False


@dataclass(frozen=True)
class Checkpoint:
    every: int | str
    keep: int
    keep_every: int | None
    on_failure: str
    destination: str | None
    export: bool

    @property
    def is_off(self) -> bool:
        """Whether nothing is saved at all."""
        return self.every == "never"

    @property
    def every_steps(self) -> int:
        """0 when the clock decides."""
        return self.every if isinstance(self.every, int) else 0

    @property
    def every_seconds(self) -> float:
        """0 when the steps decide; `auto` is minutes by the time that anybody asks (goodput.py)."""
        return (
            0.0
            if isinstance(self.every, int) or self.every in ("auto", "never")
            else 60.0 * float(self.every.removesuffix("min"))
        )


@dataclass(frozen=True)
class Budget:
    max_usd: float | None


@dataclass(frozen=True)
class Config:
    name: str
    fleet: Fleet
    data: Data
    model: Model
    train: Train
    checkpoint: Checkpoint
    budget: Budget

    @property
    def fleet_name(self) -> str:
        """The name of the config whose machines these are: what is made in an account has it as its tag."""
        return self.fleet.aws.name or self.name

    @property
    def world_size(self) -> int:
        return self.fleet.nodes * self.fleet.ranks_per_node

    @property
    def data_parallel(self) -> int:
        """Ranks that see different sequences: the world over the degrees that share one."""
        layout = self.train.layout
        return self.world_size // (layout.tensor * layout.pipeline * layout.context)

    @property
    def degrees(self) -> dict[str, int]:
        """The layout as results.json and checkpoints tell it."""
        layout = self.train.layout
        return {"dp": self.data_parallel, "fsdp": layout.shard, "tp": layout.tensor, "pp": layout.pipeline, "cp": layout.context}


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by their dotted keys: `train.steps`."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
