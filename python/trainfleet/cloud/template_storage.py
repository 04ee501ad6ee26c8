"""Places the data: the bucket, the FSx for Lustre file system with its links to S3, the log group;
and estimates how nodes read their tokens: from FSx, streamed from S3, or copied to each node's
disks first.

Rates: S3 gives one request about 85 to 90 MB/s and a prefix 5,500 GET per second (S3's user guide,
"Best practices design patterns"); a reader has eight of them in flight (data/shards.py). Tokens
need little of that: one is two bytes, or four. So the time to the first batch decides, and how
often the data crosses the network again.

Sizes that FSx takes: FSx for Lustre's user guide, "Managing storage capacity", and
CreateFileSystem's StorageCapacity (read 2026-11-22).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ..config import Config
from ..config.types import Fsx
from ..hardware import node_types
from ..trust.untrusted_input import show
from .template_inputs import Inputs, bucket_of, slug
from .template_parts import Resource, Resources, attribute, ref, resource, subnet

LUSTRE = "2.15"  # the newest; without it CloudFormation makes 2.10, which has no links to S3
# keys of a new file system
MADE = ("size_gib", "type", "throughput", "efa", "s3_import", "s3_export")
SCRATCH_THROUGHPUT = 200  # MB/s per TiB of SCRATCH_2, without bursts
# GiB: with EFA the size is a multiple of this, by MB/s per TiB
EFA_STEPS = {125: 38400, 250: 19200, 500: 9600, 1000: 4800}
STEP = 2400  # GiB
# data is never deleted with its stack
KEPT = {"DeletionPolicy": "RetainExceptOnCreate", "UpdateReplacePolicy": "Retain"}
LOG_DAYS, PART_DAYS = 30, 7


def makes_file_system(config: Config) -> bool:
    """Tells whether a file system is made: the shared folder is at its mount point, and the config
    names no existing one.
    """
    fleet = config.fleet
    return not fleet.fsx.dns_name and f"{fleet.shared_folder}/".startswith(
        f"{fleet.fsx.mount_point.rstrip('/')}/"
    )


def has_file_system(config: Config) -> bool:
    """Tells whether a file system is made for the fleet. The config that the head gets names it and
    the hosts.
    """
    return makes_file_system(config) or bool(config.fleet.hosts and config.fleet.fsx.dns_name)


def throughput(fsx: Fsx) -> float:
    """Returns the throughput of the complete file system in bytes/s."""
    return (
        (fsx.throughput if fsx.type == "persistent" else SCRATCH_THROUGHPUT)
        * 1e6
        * fsx.size_gib
        / 1024
    )


def refuse_size(fsx: Fsx) -> Iterator[tuple[str, str]]:
    """Refuses sizes that FSx would not make: (key, message)."""
    size = fsx.size_gib
    if fsx.type == "scratch" and fsx.throughput != Fsx.throughput:
        works = f"set {Fsx.throughput}, or fleet.fsx.type persistent"
        yield (
            "fleet.fsx.throughput",
            f"{fsx.throughput}: scratch file systems have {SCRATCH_THROUGHPUT} MB/s per TiB; "
            f"{works}",
        )
    if fsx.efa and fsx.type == "scratch":
        yield (
            "fleet.fsx.efa",
            "true: scratch file systems have no EFA; set fleet.fsx.type persistent",
        )
    elif fsx.efa and size % (step := EFA_STEPS[fsx.throughput]):
        comes = f"with EFA and {fsx.throughput} MB/s per TiB it must be a multiple of {step}"
        yield "fleet.fsx.size_gib", f"{size}: {comes}; set {_near(size, step)}"
    elif not fsx.efa and size != STEP // 2 and size % STEP:
        yield (
            "fleet.fsx.size_gib",
            f"{size}: it must be 1200 or a multiple of {STEP}; set {_near(size, STEP)}",
        )


def refuse_unmade(fsx: Fsx) -> Iterator[tuple[str, str]]:
    """Refuses keys of a new file system if the config makes none: (key, message)."""
    for name in MADE:
        if (value := getattr(fsx, name)) != getattr(Fsx, name):
            yield (
                f"fleet.fsx.{name}",
                f"{show(value)}: only for a new file system, but this config makes none; remove it",
            )


def _near(size: int, step: int) -> int:
    return max(step, round(size / step) * step)


def bucket(config: Config, inputs: Inputs) -> Resources:
    """Makes the private, encrypted bucket; nothing if the config names one, or an earlier one was
    kept.
    """
    if config.fleet.aws.bucket or inputs.has_bucket:
        return {}
    parts = {
        "Id": "parts",
        "Status": "Enabled",
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": PART_DAYS},
    }
    encryption = {"ServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}
    shut = dict.fromkeys(
        ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets"), True
    )
    name = bucket_of(config, inputs)
    made = resource(
        "AWS::S3::Bucket",
        BucketName=name,
        BucketEncryption={"ServerSideEncryptionConfiguration": [encryption]},
        PublicAccessBlockConfiguration=shut,
        OwnershipControls={"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]},
        LifecycleConfiguration={"Rules": [parts]},
    )
    arn = f"arn:{inputs.partition}:s3:::{name}"
    deny = {"Effect": "Deny", "Principal": "*", "Action": "s3:*", "Resource": [arn, f"{arn}/*"],
            "Condition": {"Bool": {"aws:SecureTransport": "false"}}}  # fmt: skip
    policy = {"Version": "2012-10-17", "Statement": [deny]}
    return {
        "Bucket": made | KEPT,
        "BucketPolicy": resource(
            "AWS::S3::BucketPolicy", Bucket=ref("Bucket"), PolicyDocument=policy
        )
        | KEPT,
    }


def file_system(config: Config, inputs: Inputs) -> Resources:
    """Makes the file system and its links, if the config asks for one."""
    if not makes_file_system(config):
        return {}
    fsx = config.fleet.fsx
    lustre: dict[str, Any] = {"DeploymentType": "SCRATCH_2", "DataCompressionType": "LZ4"}
    if fsx.type == "persistent":
        lustre |= {"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": fsx.throughput}
        lustre |= (
            {"EfaEnabled": True, "MetadataConfiguration": {"Mode": "AUTOMATIC"}} if fsx.efa else {}
        )
    made = resource(
        "AWS::FSx::FileSystem",
        FileSystemType="LUSTRE",
        FileSystemTypeVersion=LUSTRE,
        StorageType="SSD",
        StorageCapacity=fsx.size_gib,
        SubnetIds=[subnet(inputs)],
        SecurityGroupIds=[attribute("Wall", "GroupId")],
        LustreConfiguration=lustre,
    )
    return {"FileSystem": made | KEPT, **dict(_links(config, inputs))}


def _links(config: Config, inputs: Inputs) -> Iterator[tuple[str, Resource]]:
    """Yields the file system's data repository associations: what it loads from S3 on a read, and
    what it writes there.
    """
    fsx, changes = config.fleet.fsx, {"Events": ["NEW", "CHANGED", "DELETED"]}
    if fsx.s3_import:
        yield (
            "LinkedIn",
            _link("/linked", fsx.s3_import, AutoImportPolicy=changes)
            | {"DeletionPolicy": "Delete"},
        )
    if fsx.s3_export:
        inside = PurePosixPath(config.fleet.shared_folder or "").relative_to(
            fsx.mount_point.rstrip("/")
        )
        after = [] if config.fleet.aws.bucket or inputs.has_bucket else ["BucketPolicy"]
        for name in ("runs", "data"):
            to = f"s3://{bucket_of(config, inputs)}/{slug(config.fleet_name)}/{name}"
            path = f"/{inside}/{name}".replace("/./", "/")
            yield (
                f"Export{name.title()}",
                _link(path, to, AutoExportPolicy=changes) | ({"DependsOn": after} if after else {}),
            )


def _link(path: str, address: str, **policy: Any) -> Resource:
    return resource(
        "AWS::FSx::DataRepositoryAssociation",
        FileSystemId=ref("FileSystem"),
        FileSystemPath=path,
        DataRepositoryPath=address,
        BatchImportMetaDataOnCreate="AutoImportPolicy" in policy,
        S3=policy,
    )


def log_group(config: Config) -> str:
    """Returns the name of the stack's log group, to which nodes send their log
    (storage/cloudwatch.py).
    """
    return f"/trainfleet/{slug(config.fleet_name)}"


def logs(config: Config) -> Resources:
    """Makes the nodes' log group."""
    return {
        "Log": resource(
            "AWS::Logs::LogGroup", LogGroupName=log_group(config), RetentionInDays=LOG_DAYS
        )
    }


# bytes/s of one GET; bytes/s of a node; GETs per second of a prefix
REQUEST, AT_ONCE, PREFIX = (87e6, 8, 5500)
PIECE = 16e6  # bytes of one GET
WINDOW = 1024  # MiB (data.shuffle_window_mib) if a dataset is in S3
SMALL_VOCABULARY = 65_536  # tokens that two bytes can distinguish
COPY_PAYS = 60.0  # seconds that a copy before the first batch may take
COPY = "NVMe copy"


@dataclass(frozen=True)
class DataAccess:
    """A way to read: the seconds to its first batch, its rate in bytes/s (of all nodes), and its
    preparation.
    """

    name: str
    seconds: float
    rate: float
    needs: str


def volume(config: Config) -> float:
    """Returns the bytes of tokens that the run reads."""
    train = config.train
    return float(train.steps * train.global_batch_size * (train.sequence_length + 1)) * _width(
        config
    )


def _width(config: Config) -> int:
    return 2 if config.model.vocab_size <= SMALL_VOCABULARY else 4


def node_rate(config: Config) -> float:
    """Returns a node's rate from S3, in bytes/s."""
    row = config.fleet.node_type
    return min(REQUEST * AT_ONCE, (row.network_gbps if row else 10) / 8 * 1e9)


def ways(config: Config) -> Iterator[DataAccess]:
    """Yields every way that this fleet has."""
    fleet, row, size = config.fleet, node_types.instance(config.fleet.instance_type), volume(config)
    if makes_file_system(config):
        yield DataAccess(
            "FSx", 1.0, throughput(fleet.fsx), "no copy: make tokenize leaves the tokens there"
        )
    elif fleet.shared_folder and fleet.shared_folder.startswith("/"):
        yield DataAccess(
            "shared folder", 1.0, 0.0, "no copy: make tokenize leaves the tokens there"
        )
    window = min(size, (config.data.shuffle_window_mib or WINDOW) * 2.0**20)
    yield DataAccess(
        "S3 stream",
        window / node_rate(config),
        node_rate(config) * fleet.nodes,
        "data.tokenized_path: s3://bucket/prefix",
    )
    if row and row.nvme_gb * 1e9 > size:
        yield DataAccess(
            COPY, size / node_rate(config), 0.0, "data.tokenized_path: s3://bucket/prefix"
        )


def choose(config: Config) -> tuple[DataAccess, str]:
    """Chooses the way to the data, and says why. data.tokenized_path decides it, if the config sets
    it.
    """
    found = {way.name: way for way in ways(config)}
    stream, copy = found["S3 stream"], found.get(COPY)
    if not config.data.tokenized_path and (own := found.get("FSx") or found.get("shared folder")):
        return (
            own,
            "data.tokenized_path is null: the tokens are next to the run, and every node has them "
            "at once",
        )
    if copy and copy.seconds <= COPY_PAYS and copy.seconds <= 2 * stream.seconds:
        return copy, "each node has the complete dataset within a minute, and S3 is read only once"
    return (
        stream,
        "the first batch needs one shuffle window, and the rest arrives while the ranks compute",
    )


def copies(config: Config) -> bool:
    """Tells whether each node copies the dataset to its disks before its ranks read it
    (data/local_copy.py).
    """
    return bool(config.data.tokenized_path) and choose(config)[0].name == COPY


def _soon(seconds: float) -> str:
    return "a second" if seconds < 1.5 else f"about {seconds:,.0f} s"


def describe(config: Config, tokens_per_second: float | None) -> Iterator[str]:
    """Describes it for `make plan`: the way, the reason, the other ways, and the requests to S3."""
    chosen, why = choose(config)
    yield f"  {chosen.name}: {why}; first batch after {_soon(chosen.seconds)}"
    for way in ways(config):
        if way != chosen:
            yield f"  not {way.name}: first batch after {_soon(way.seconds)}; it needs {way.needs}"
    if tokens_per_second:
        wanted = tokens_per_second * _width(config)
        line = f"  read rate: {wanted / 1e6:,.1f} MB/s by all nodes"
        yield line + (f" of {chosen.rate / 1e6:,.0f} MB/s available" if chosen.rate else "")
        if chosen.name != "FSx" and config.data.tokenized_path:
            yield (
                f"  S3: {wanted / PIECE:,.1f} GET requests per second; one prefix allows "
                f"{PREFIX:,}, "
                "so one is enough"
            )
