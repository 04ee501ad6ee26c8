"""Builds CreateTrainingJob requests and selects how nodes read the dataset. Pure.

Sources: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html. For
the input modes: https://docs.aws.amazon.com/sagemaker/latest/dg/model-access-training-data.html and
the AWS article that docs/start/sagemaker.md follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..cloud.capacity import PLAN_TYPES
from ..cloud.template_inputs import own_tags, pairs
from ..config import Config
from ..node.placements import SAGEMAKER as PLACEMENT
from ..plan.job import Job
from ..run.run_folder import MOUNTED
from ..storage.s3_sync_agent import BUCKET
from ..trust.errors import BackendError
from ..trust.secrets import PREFIX
from .node_script import Body, entrypoint_words, environment

GIB = 2**30
CHANNEL = "dataset"
# Assumed throughput of copying from S3 to a node's disk in File mode, in bytes/s. A few hundred GB
# take minutes at this rate.
COPIES = 1.0e9
PATIENCE = 60.0  # maximum seconds for accelerators to wait for a copy, unless input_mode is set
LEAST_DISK, MOST_DISK = 100, 16384  # minimum and maximum disk size in GiB
LONGEST = 672  # maximum hours: 28 days, SageMaker's limit
# maximum characters of an argument, and of an environment variable's value
WORDS, VALUES = 256, 512
# regular expressions with which CloudWatch extracts the job's metrics from node logs
# (engine/record.py)
METRICS = {
    "loss": r"step [0-9,]+  loss ([0-9.]+)",
    "tokens_per_second": r"  ([0-9.]+) tokens/s",
    "validation_loss": r"  validation ([0-9.]+)",
}


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
    words = {
        "stream": Input(
            "stream",
            2.0,
            "each node caches ranges from S3 and prefetches the next ones",
        ),
        "file": Input(
            "file",
            copying,
            f"SageMaker copies the dataset to each node first: about {copying:.0f} s",
        ),
        "fastfile": Input(
            "fastfile",
            5.0,
            "SageMaker mounts the prefix; ranks read the files from S3 on demand",
        ),
        "fsx": Input(
            "fsx",
            5.0,
            "SageMaker mounts the file system; files that are only in S3 load on first read",
        ),
    }
    if asked:
        return words[asked]
    if size is None:
        return Input("stream", 2.0, "the dataset's size is unknown, so nodes stream it")
    if copying < PATIENCE:
        return Input(
            "file",
            copying,
            f"SageMaker copies {size / 1e9:.1f} GB to each node in about {copying:.0f} s; ranks "
            "then read it locally",
        )
    return Input(
        "stream",
        2.0,
        f"copying {size / 1e9:,.0f} GB to each node would take {copying / 60:.0f} min, so nodes "
        "stream it",
    )


def refuse(config: Config) -> Iterator[tuple[str, str]]:
    """Yields (key, message) for each invalid combination of fleet.sagemaker keys."""
    own, row = config.fleet.sagemaker, config.fleet.node_type
    if row and not row.owned and not row.sagemaker:
        yield (
            "fleet.instance_type",
            f"{row.name}: SageMaker does not offer this type; use trn2.48xlarge",
        )
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
    region = (own.kms_key or "").split(":")[3:4]
    if region and config.fleet.aws.region not in (None, *region):
        what = (
            f"{own.kms_key} is a key of {region[0]}, but jobs run in {config.fleet.aws.region}; "
            "use a key in that region"
        )
        yield "fleet.sagemaker.kms_key", what
    if own.wait_hours is not None and not config.fleet.spot:
        yield (
            "fleet.sagemaker.wait_hours",
            "applies only to fleet.spot; on-demand jobs use max_hours",
        )
    if own.wait_hours is not None and own.wait_hours < own.max_hours:
        yield (
            "fleet.sagemaker.wait_hours",
            f"{own.wait_hours:g} is less than max_hours {own.max_hours:g}; it includes the "
            "running time, so set more",
        )
    if own.training_plan and config.fleet.spot:
        yield (
            "fleet.sagemaker.training_plan",
            "is reserved capacity, not spot; set fleet.spot: false",
        )
    if own.plan_hours is not None:
        yield from _refuse_purchase(config)
    if (own.training_plan or own.plan_hours) and own.warm_pool_minutes:
        yield (
            "fleet.sagemaker.warm_pool_minutes",
            "does not apply to a training plan, which keeps its machines; set 0",
        )
    if own.warm_pool_minutes and config.fleet.spot:
        yield (
            "fleet.sagemaker.warm_pool_minutes",
            "does not apply to fleet.spot, because warm pools are on-demand; set 0",
        )
    if own.encrypt_traffic and row and row.efa and config.fleet.nodes > 1:
        yield (
            "fleet.sagemaker.encrypt_traffic",
            f"true: the network of {row.name} already encrypts EFA traffic, and this setting "
            "disables EFA; set false",
        )


def _refuse_purchase(config: Config) -> Iterator[tuple[str, str]]:
    """Yields an error for each setting that prevents the purchase of a training plan."""
    own = config.fleet.sagemaker
    kind = config.fleet.instance_type
    key = "fleet.sagemaker.plan_hours"
    if own.training_plan:
        yield (
            key,
            f"{own.plan_hours:g}: fleet.sagemaker.training_plan already names a plan; set null",
        )
    if config.fleet.spot:
        yield (
            key,
            f"{own.plan_hours:g}: a training plan is reserved capacity, not spot; set "
            "fleet.spot: false",
        )
    if kind not in PLAN_TYPES:
        yield (
            key,
            f"{own.plan_hours:g}: AWS sells no training plan for ml.{kind}; use one of "
            f"{', '.join(PLAN_TYPES)}",
        )


def body(
    config: Config, job: Job, image: str, references: Mapping[str, str], role: str, size: int | None
) -> Body:
    """Returns the CreateTrainingJob request body, without job name and the attempt's environment.

    `references` maps each secret to the address of its value. `size` is the dataset size in bytes.

    Raises:
        BackendError: SageMaker does not accept an argument or a value.
    """
    own, spot = config.fleet.sagemaker, config.fleet.spot
    channel = input_of(config, size) if job.torchrun else Input("stream", 0.0, "")
    variables = environment(config, job) | {
        f"{PREFIX}{name}": where for name, where in references.items()
    }
    if channel.mode != "stream":
        variables[MOUNTED] = f"/opt/ml/input/data/{CHANNEL}"
    seconds = round(own.max_hours * 3600)
    wait = min(LONGEST, own.wait_hours or 2 * own.max_hours)
    return {
        "AlgorithmSpecification": {
            "TrainingImage": image,
            "TrainingInputMode": "FastFile" if channel.mode == "fastfile" else "File",
            "ContainerArguments": _carried(entrypoint_words(job, PLACEMENT)),
            "MetricDefinitions": [
                {"Name": name, "Regex": regex} for name, regex in METRICS.items()
            ],
        },
        "RoleArn": role,
        **_inputs(config, channel),
        "OutputDataConfig": {
            "S3OutputPath": f"{variables[BUCKET].rstrip('/')}/sagemaker",
            **_key("KmsKeyId", own.kms_key),
        },
        "ResourceConfig": _machines(config, job, disk_gib(config, size if job.torchrun else None)),
        "StoppingCondition": {
            "MaxRuntimeInSeconds": seconds,
            **({"MaxWaitTimeInSeconds": round(wait * 3600)} if spot else {}),
        },
        "Environment": _held(variables),
        "EnableManagedSpotTraining": spot,
        "EnableInterContainerTrafficEncryption": own.encrypt_traffic,
        "EnableNetworkIsolation": False,
        **({"InfraCheckConfig": {"EnableInfraCheck": True}} if own.health_check else {}),
        **({"RemoteDebugConfig": {"EnableRemoteDebug": True}} if own.remote_debug else {}),
        "ProfilerConfig": {"DisableProfiler": True},
        **(
            {
                "VpcConfig": {
                    "Subnets": list(own.subnets),
                    "SecurityGroupIds": list(own.security_groups),
                }
            }
            if own.subnets
            else {}
        ),
        **({"RetryStrategy": {"MaximumRetryAttempts": own.retries}} if own.retries else {}),
        "Tags": pairs(own_tags(config.fleet_name)),
    }


def disk_gib(config: Config, size: int | None) -> int:
    """Returns the disk size per machine in GiB: twice the amount that File mode copies.

    `size` is the dataset size in bytes.
    """
    copied = (size or 0) if input_of(config, size).mode == "file" else 0
    return config.fleet.sagemaker.volume_gib or min(
        MOST_DISK, max(LEAST_DISK, -(-2 * copied // GIB))
    )


def _machines(config: Config, job: Job, disk: int) -> Body:
    own = config.fleet.sagemaker
    row = config.fleet.node_type
    # NVMe disks encrypt with their own keys, so VolumeKmsKeyId is valid only for other machines
    return {
        "InstanceType": f"ml.{config.fleet.instance_type}",
        "InstanceCount": job.nodes,
        "VolumeSizeInGB": disk,
        **({} if row and row.nvme_gb else _key("VolumeKmsKeyId", own.kms_key)),
        **(
            {"KeepAlivePeriodInSeconds": 60 * own.warm_pool_minutes}
            if own.warm_pool_minutes
            else {}
        ),
        **_key("TrainingPlanArn", own.training_plan),
    }


def _inputs(config: Config, channel: Input) -> Body:
    """Returns the dataset's input channel, or an empty body if ranks read directly from S3."""
    if channel.mode == "stream":
        return {}
    address = f"{(config.data.tokenized_path or '').rstrip('/')}/{config.data.name}/"
    source: Body = {
        "S3DataSource": {
            "S3DataType": "S3Prefix",
            "S3Uri": address,
            "S3DataDistributionType": "FullyReplicated",
        }
    }
    if channel.mode == "fsx":
        system, _, path = (config.fleet.sagemaker.file_system or "").partition(":")
        source = {
            "FileSystemDataSource": {
                "FileSystemId": system, "FileSystemType": "FSxLustre", "FileSystemAccessMode": "ro",
                "DirectoryPath": f"{path.rstrip('/')}/{config.data.name}",
            }
        }  # fmt: skip
    mode = {"file": "File", "fastfile": "FastFile", "fsx": "File"}[channel.mode]
    return {"InputDataConfig": [{"ChannelName": CHANNEL, "DataSource": source, "InputMode": mode}]}


def _key(name: str, value: str | None) -> Body:
    return {name: value} if value else {}


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


def _held(environment: Mapping[str, str]) -> dict[str, str]:
    for name, value in environment.items():
        if len(value) > VALUES:
            raise BackendError(
                "SageMaker does not accept this value",
                where=name,
                why=f"a value has at most {VALUES} characters",
                next="use a shorter s3:// prefix or fewer fleet.secrets",
            )
    return dict(sorted(environment.items()))
