"""Builds CreateTrainingJob requests and selects how nodes read the dataset. Pure.

Sources: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html. For
the input modes: https://docs.aws.amazon.com/sagemaker/latest/dg/model-access-training-data.html and
the AWS article that docs/start/sagemaker.md follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..cloud.capacity import PLAN_TYPES
from ..cloud.template_inputs import own_tags, pairs
from ..config.types import Config, Refusals, SageMakerConfig
from ..node.placements import SAGEMAKER as PLACEMENT
from ..plan.job import Job
from ..run.run_folder import MOUNTED
from ..trust.errors import BackendError
from ..trust.secrets import PREFIX
from .node_script import Body, entrypoint_words, environment, form

GIB = 2**30
CHANNEL = "/opt/ml/input/data/dataset"  # where SageMaker mounts the dataset's input channel
# Assumed throughput of copying from S3 to a node's disk in File mode, in bytes/s. A few hundred GB
# take minutes at this rate.
COPIES = 1.0e9
PATIENCE = 60.0  # maximum seconds for accelerators to wait for a copy, unless input_mode is set
LEAST_DISK, MOST_DISK = 100, 16384  # minimum and maximum disk size in GiB
LONGEST = 672  # maximum hours: 28 days, SageMaker's limit
# maximum characters of an argument, and of an environment variable's value
WORDS, VALUES = 256, 512


@dataclass(frozen=True)
class Input:
    """Input mode, which determines how nodes read the dataset.

    `mode` is a value of fleet.sagemaker.input_mode, and `seconds` is the time to the first batch.
    """

    mode: str
    seconds: float
    why: str


def input_of(config: Config, size: int | None) -> Input:
    """Selects the input mode for a dataset of `size` bytes.

    A `size` of None means that the size is unknown or the dataset does not exist yet.
    """
    asked, copying = config.fleet.sagemaker.input_mode, (size or 0) / COPIES
    modes = {
        "stream": (2.0, "each node caches ranges from S3 and prefetches the next ones"),
        "file": (
            copying,
            f"SageMaker copies the dataset to each node first: about {copying:.0f} s",
        ),
        "fastfile": (5.0, "SageMaker mounts the prefix; ranks read the files from S3 on demand"),
        "fsx": (
            5.0,
            "SageMaker mounts the file system; files that are only in S3 load on first read",
        ),
    }
    if asked:
        return Input(asked, *modes[asked])
    if size is None:
        return Input("stream", 2.0, "the dataset's size is unknown, so nodes stream it")
    if copying < PATIENCE:
        why = (
            f"SageMaker copies {size / 1e9:.1f} GB to each node in about {copying:.0f} s; ranks "
            "then read it locally"
        )
        return Input("file", copying, why)
    why = (
        f"copying {size / 1e9:,.0f} GB to each node would take {copying / 60:.0f} min, so nodes "
        "stream it"
    )
    return Input("stream", 2.0, why)


def refuse(config: Config) -> Refusals:
    """Yields (key, message) for each invalid combination of fleet.sagemaker keys."""
    own, row = config.fleet.sagemaker, config.fleet.node_type
    if row and not row.owned and not row.sagemaker:
        yield (
            "fleet.instance_type",
            f"{row.name}: SageMaker does not offer this type; use trn2.48xlarge",
        )
    yield from _refuse_network(own)
    region = (own.kms_key or "").split(":")[3:4]
    if region and config.fleet.aws.region not in (None, *region):
        what = (
            f"{own.kms_key} is a key of {region[0]}, but jobs run in {config.fleet.aws.region}; "
            "use a key in that region"
        )
        yield "fleet.sagemaker.kms_key", what
    yield from _refuse_waiting(config)
    yield from _refuse_plan(config)
    if own.encrypt_traffic and row and row.efa and config.fleet.nodes > 1:
        yield (
            "fleet.sagemaker.encrypt_traffic",
            f"true: the network of {row.name} already encrypts EFA traffic, and this setting "
            "disables EFA; set false",
        )


def _refuse_network(own: SageMakerConfig) -> Refusals:
    """Yields an error for each file system or VPC setting that is unused, or needs another one."""
    if own.input_mode == "fsx" and not own.file_system:
        yield (
            "fleet.sagemaker.file_system",
            "is missing: input_mode fsx needs it; set for example fs-0123456789abcdef0:/fsx/sets",
        )
    if own.file_system and own.input_mode != "fsx":
        what = (
            f"{own.file_system}: fleet.sagemaker.input_mode {own.input_mode or 'null'} does not "
            "use it; set input_mode fsx, or remove it"
        )
        yield "fleet.sagemaker.file_system", what
    if own.file_system and not own.subnets:
        yield (
            "fleet.sagemaker.subnets",
            "are missing: FSx file systems are reachable only from a VPC",
        )
    if bool(own.subnets) != bool(own.security_groups):
        missing = "security_groups" if own.subnets else "subnets"
        yield f"fleet.sagemaker.{missing}", "are missing: set both subnets and security_groups"


def _refuse_waiting(config: Config) -> Refusals:
    """Yields an error for each time limit that contradicts the kind of capacity."""
    own, spot = config.fleet.sagemaker, config.fleet.spot
    if own.wait_hours is not None and not spot:
        yield (
            "fleet.sagemaker.wait_hours",
            "applies only to fleet.spot; on-demand jobs use max_hours",
        )
    if own.wait_hours is not None and own.wait_hours < own.max_hours:
        yield (
            "fleet.sagemaker.wait_hours",
            f"{own.wait_hours:g} is less than max_hours ({own.max_hours:g}); it includes "
            "the run time, so set it to at least max_hours",
        )
    unused = {
        "a training plan, which keeps its machines": own.training_plan or own.plan_hours,
        "fleet.spot, because warm pools are on-demand": spot,
    }
    for capacity, used in unused.items():
        if used and own.warm_pool_minutes:
            yield "fleet.sagemaker.warm_pool_minutes", f"does not apply to {capacity}; set 0"


def _refuse_plan(config: Config) -> Refusals:
    """Yields an error for each setting that contradicts a training plan, bought or to be bought."""
    own, kind = config.fleet.sagemaker, config.fleet.instance_type
    reserved = "is reserved capacity, not spot; set fleet.spot: false"
    if own.training_plan and config.fleet.spot:
        yield "fleet.sagemaker.training_plan", reserved
    if own.plan_hours is None:
        return
    unsold = f"AWS sells no training plan for ml.{kind}; use one of {', '.join(PLAN_TYPES)}"
    obstacles = {
        "fleet.sagemaker.training_plan already names a plan; set null": own.training_plan,
        f"a training plan {reserved}": config.fleet.spot,
        unsold: kind not in PLAN_TYPES,
    }
    for why, applies in obstacles.items():
        if applies:
            yield "fleet.sagemaker.plan_hours", f"{own.plan_hours:g}: {why}"


def body(
    config: Config, job: Job, image: str, references: Mapping[str, str], role: str, size: int | None
) -> Body:
    """Returns the CreateTrainingJob request body, without the job name and the attempt's
    environment.

    `references` maps each secret to the address of its value. `size` is the dataset size in bytes.

    Raises:
        BackendError: SageMaker does not accept an argument or a value.
    """
    channel = input_of(config, size) if job.torchrun else Input("stream", 0.0, "")
    disk = disk_gib(config, size if job.torchrun else None)
    body: Body = form(
        "training job",
        IMAGE=image,
        MODE="FastFile" if channel.mode == "fastfile" else "File",
        ARGUMENTS=_carried(entrypoint_words(job, PLACEMENT)),
        ROLE=role,
        INPUTS=_inputs(config, channel.mode),
        FOLDER=(config.fleet.shared_folder or "").rstrip("/"),
        VARIABLES=_variables(config, job, references, channel.mode),
        TAGS=pairs(own_tags(config.fleet_name)),
        NODES=job.nodes,
        DISK=disk,
        **_machines(config),
    )
    return body


def _machines(config: Config) -> Body:
    """Returns the values that all of the config's training jobs share."""
    own, row, spot = config.fleet.sagemaker, config.fleet.node_type, config.fleet.spot
    wait = min(LONGEST, own.wait_hours or 2 * own.max_hours)
    return {
        "ENCRYPTION": own.kms_key,
        # NVMe disks encrypt with their own keys, so VolumeKmsKeyId is valid only for other machines
        "OF_DISKS": None if row and row.nvme_gb else own.kms_key,
        "MACHINE": config.fleet.instance_type or "",
        "WARM": 60 * own.warm_pool_minutes or None,
        "PLAN": own.training_plan,
        "RUNNING": round(own.max_hours * 3600),
        "WAITING": round(wait * 3600) if spot else None,
        "SPOT": spot,
        "ENCRYPTED": own.encrypt_traffic,
        "CHECKED": own.health_check or None,
        "DEBUGGED": own.remote_debug or None,
        "SUBNETS": own.subnets or None,
        "GROUPS": own.security_groups or None,
        "RETRIES": own.retries or None,
    }


def disk_gib(config: Config, size: int | None) -> int:
    """Returns the disk size per machine in GiB: twice the amount that File mode copies.

    `size` is the dataset size in bytes.
    """
    copied = (size or 0) if input_of(config, size).mode == "file" else 0
    return config.fleet.sagemaker.volume_gib or min(
        MOST_DISK, max(LEAST_DISK, -(-2 * copied // GIB))
    )


def _inputs(config: Config, mode: str) -> list[Body] | None:
    """Returns the dataset's input channel, or None if ranks read directly from S3."""
    name, system, inputs = config.data.name, config.fleet.sagemaker.file_system or "", None
    if mode == "fsx":
        id_, _, path = system.partition(":")
        inputs = form("channel from fsx", SYSTEM=id_, FOLDER=f"{path.rstrip('/')}/{name}")
    elif mode != "stream":
        address = f"{(config.data.tokenized_path or '').rstrip('/')}/{name}/"
        read = "FastFile" if mode == "fastfile" else "File"
        inputs = form("channel from S3", ADDRESS=address, MODE=read)
    return inputs


def _carried(words: list[str]) -> list[str]:
    for word in words:
        if len(word) > WORDS or "\n" in word:
            raise BackendError(
                "SageMaker does not accept this argument",
                where=repr(word[:40]),
                why=f"an argument has at most {WORDS} characters and no line breaks",
                next="use a shorter name",
            )
    return words


def _variables(
    config: Config, job: Job, references: Mapping[str, str], mode: str
) -> dict[str, str]:
    found = environment(config, job)
    found |= {f"{PREFIX}{name}": where for name, where in references.items()}
    if mode != "stream":
        found[MOUNTED] = CHANNEL
    for name, value in found.items():
        if len(value) > VALUES:
            raise BackendError(
                "SageMaker does not accept this value",
                where=name,
                why=f"a value has at most {VALUES} characters",
                next="use a shorter s3:// prefix or fewer fleet.secrets",
            )
    return dict(sorted(found.items()))
