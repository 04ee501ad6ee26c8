"""Builds the template's storage: bucket, FSx for Lustre file system with S3 links, and log group.
Also estimates the ways in which nodes can read tokens: from FSx, streamed from S3, or copied to
local disks first.

Rates: one S3 request transfers about 85 to 90 MB/s, and a prefix allows 5,500 GET requests per
second (S3 user guide, "Best practices design patterns"). A reader has eight requests in flight
(data/shards.py). A token has only two or four bytes, so throughput is rarely the bottleneck. The
time to the first batch matters more, and how often data is transferred again.

Sizes that FSx accepts: FSx for Lustre user guide, "Managing storage capacity", and
CreateFileSystem's StorageCapacity (read 2026-11-22).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ..config.types import Config, Fsx, Refusals
from ..hardware import node_types
from ..trust.untrusted_input import show
from .calls import Json
from .template_inputs import Inputs, bucket_of, slug
from .template_parts import Resource, Resources, fixed, subnet

# fleet.fsx keys that apply only to a new file system
MADE = ("size_gib", "type", "throughput", "efa", "s3_import", "s3_export")
SCRATCH_THROUGHPUT = 200  # MB/s per TiB for SCRATCH_2, without bursts
# MB/s per TiB → GiB that the size must be a multiple of, with EFA
EFA_STEPS = {125: 38400, 250: 19200, 500: 9600, 1000: 4800}
STEP = 2400  # GiB that the size must be a multiple of, without EFA
LOG_DAYS = 30  # days until log events expire


def makes_file_system(config: Config) -> bool:
    """Returns whether the stack creates a file system: the shared folder is inside the mount point,
    and the config names no existing file system.
    """
    fleet, folder = config.fleet, f"{config.fleet.shared_folder}/"
    return not fleet.fsx.dns_name and folder.startswith(f"{fleet.fsx.mount_point.rstrip('/')}/")


def has_file_system(config: Config) -> bool:
    """Returns whether the fleet uses the stack's file system. On the head, the config names that
    file system and the hosts.
    """
    return makes_file_system(config) or bool(config.fleet.hosts and config.fleet.fsx.dns_name)


def throughput(fsx: Fsx) -> float:
    """Returns the file system's throughput in bytes/s."""
    each = fsx.throughput if fsx.type == "persistent" else SCRATCH_THROUGHPUT
    return each * 1e6 * fsx.size_gib / 1024


def refuse_size(fsx: Fsx) -> Refusals:
    """Yields (key, message) for sizes and settings that FSx does not offer."""
    size = fsx.size_gib
    if fsx.type == "scratch" and fsx.throughput != Fsx.throughput:
        have = f"scratch file systems have {SCRATCH_THROUGHPUT} MB/s per TiB"
        works = f"set {Fsx.throughput}, or fleet.fsx.type persistent"
        yield "fleet.fsx.throughput", f"{fsx.throughput}: {have}; {works}"
    if fsx.efa and fsx.type == "scratch":
        why = "scratch file systems have no EFA"
        yield "fleet.fsx.efa", f"true: {why}; set fleet.fsx.type persistent"
    elif fsx.efa and size % (step := EFA_STEPS[fsx.throughput]):
        must = f"with EFA and {fsx.throughput} MB/s per TiB it must be a multiple of {step}"
        yield "fleet.fsx.size_gib", f"{size}: {must}; set {_near(size, step)}"
    elif not fsx.efa and size != STEP // 2 and size % STEP:
        must = f"it must be 1200 or a multiple of {STEP}"
        yield "fleet.fsx.size_gib", f"{size}: {must}; set {_near(size, STEP)}"


def refuse_unmade(fsx: Fsx) -> Refusals:
    """Yields (key, message) for keys that apply only to a new file system, if the stack creates
    none.
    """
    why = "only for a new file system, but this config makes none; remove it"
    for name in MADE:
        if (value := getattr(fsx, name)) != getattr(Fsx, name):
            yield f"fleet.fsx.{name}", f"{show(value)}: {why}"


def _near(size: int, step: int) -> int:
    return max(step, round(size / step) * step)


def bucket(config: Config, inputs: Inputs) -> Resources:
    """Builds the private, encrypted bucket. Returns {} if the config names a bucket, or if an
    earlier one was kept.
    """
    if config.fleet.aws.bucket or inputs.has_bucket:
        return {}
    name = bucket_of(config, inputs)
    return fixed("bucket", BUCKET=name, ARN=f"arn:{inputs.partition}:s3:::{name}")


def file_system(config: Config, inputs: Inputs) -> Resources:
    """Builds the file system and its links, or {} if the stack creates none."""
    if not makes_file_system(config):
        return {}
    fsx = config.fleet.fsx
    lustre: Json = {"DeploymentType": "SCRATCH_2", "DataCompressionType": "LZ4"}
    if fsx.type == "persistent":
        lustre |= {"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": fsx.throughput}
        if fsx.efa:
            lustre |= {"EfaEnabled": True, "MetadataConfiguration": {"Mode": "AUTOMATIC"}}
    made = fixed("file system")
    made["FileSystem"]["Properties"] |= {
        "StorageCapacity": fsx.size_gib,
        "SubnetIds": [subnet(inputs)],
        "LustreConfiguration": lustre,
    }
    return made | dict(_links(config, inputs))


def _links(config: Config, inputs: Inputs) -> Iterator[tuple[str, Resource]]:
    """Yields the data repository associations through which FSx imports from S3 and exports to
    it.
    """
    fsx, changes = config.fleet.fsx, {"Events": ["NEW", "CHANGED", "DELETED"]}
    if fsx.s3_import:
        linked = _link("/linked", fsx.s3_import, AutoImportPolicy=changes)
        yield "LinkedIn", linked | {"DeletionPolicy": "Delete"}
    if not fsx.s3_export:
        return
    folder, top = PurePosixPath(config.fleet.shared_folder or ""), fsx.mount_point.rstrip("/")
    is_made = not (config.fleet.aws.bucket or inputs.has_bucket)
    for name in ("runs", "data"):
        to = f"s3://{bucket_of(config, inputs)}/{slug(config.fleet_name)}/{name}"
        path = f"/{folder.relative_to(top)}/{name}".replace("/./", "/")
        linked = _link(path, to, AutoExportPolicy=changes)
        yield f"Export{name.title()}", linked | ({"DependsOn": ["BucketPolicy"]} if is_made else {})


def _link(path: str, address: str, **policy: Any) -> Resource:
    imports = "AutoImportPolicy" in policy
    return fixed("link", FOLDER=path, ADDRESS=address, IMPORTS=imports, POLICY=policy)


def log_group(config: Config) -> str:
    """Returns the stack's log group, which receives the nodes' logs (storage/cloudwatch.py)."""
    return f"/trainfleet/{slug(config.fleet_name)}"


def logs(config: Config) -> Resources:
    """Builds the nodes' log group."""
    return fixed("logs", GROUP=log_group(config), DAYS=LOG_DAYS)


# bytes/s per GET, GETs in flight per node, GETs per second per prefix
REQUEST, AT_ONCE, PREFIX = 87e6, 8, 5500
PIECE = 16e6  # bytes per GET
WINDOW = 1024  # shuffle window assumed if data.shuffle_window_mib is null, in MiB
SMALL_VOCABULARY = 65_536  # largest vocabulary whose tokens fit in two bytes
COPY_PAYS = 60.0  # maximum seconds for a copy before the first batch
COPY = "NVMe copy"


@dataclass(frozen=True)
class DataAccess:
    """A way to read tokens: seconds to the first batch, total throughput in bytes/s, and what it
    requires.
    """

    name: str
    seconds: float
    rate: float
    needs: str


def volume(config: Config) -> float:
    """Returns the size of the tokens that the run reads, in bytes."""
    train = config.train
    tokens = train.steps * train.global_batch_size * (train.sequence_length + 1)
    return float(tokens) * _width(config)


def _width(config: Config) -> int:
    return 2 if config.model.vocab_size <= SMALL_VOCABULARY else 4


def ways(config: Config) -> Iterator[DataAccess]:
    """Yields each way in which this fleet can read tokens."""
    fleet, row, size = config.fleet, node_types.instance(config.fleet.instance_type), volume(config)
    none, path = (
        "no copy: make tokenize leaves the tokens there",
        "data.tokenized_path: s3://bucket/prefix",
    )
    if makes_file_system(config):
        yield DataAccess("FSx", 1.0, throughput(fleet.fsx), none)
    elif fleet.shared_folder and fleet.shared_folder.startswith("/"):
        yield DataAccess("shared folder", 1.0, 0.0, none)
    node = fleet.node_type  # each node reads from S3 at `rate`
    rate = min(REQUEST * AT_ONCE, (node.network_gbps if node else 10) / 8 * 1e9)
    window = min(size, (config.data.shuffle_window_mib or WINDOW) * 2.0**20)
    yield DataAccess("S3 stream", window / rate, rate * fleet.nodes, path)
    if row and row.nvme_gb * 1e9 > size:
        yield DataAccess(COPY, size / rate, 0.0, path)


def choose(config: Config) -> tuple[DataAccess, str]:
    """Returns the best way to read tokens, and the reason."""
    found = {way.name: way for way in ways(config)}
    stream, copy = found["S3 stream"], found.get(COPY)
    if not config.data.tokenized_path and (own := found.get("FSx") or found.get("shared folder")):
        why = "the tokens are next to the run, and every node has them at once"
        return own, f"data.tokenized_path is null: {why}"
    if copy and copy.seconds <= min(COPY_PAYS, 2 * stream.seconds):
        return copy, "each node has the complete dataset within a minute, and S3 is read only once"
    why = "the rest arrives while the ranks compute"
    return stream, f"the first batch needs one shuffle window, and {why}"


def copies(config: Config) -> bool:
    """Returns whether each node first copies the dataset to its local disks
    (data/local_copy.py).
    """
    return bool(config.data.tokenized_path) and choose(config)[0].name == COPY


def _soon(seconds: float) -> str:
    return "a second" if seconds < 1.5 else f"about {seconds:,.0f} s"


def describe(config: Config, tokens_per_second: float | None) -> Iterator[str]:
    """Yields lines for `make plan`: how nodes read tokens and why, the alternatives, and the S3
    request rate.
    """
    chosen, why = choose(config)
    yield f"  {chosen.name}: {why}; first batch after {_soon(chosen.seconds)}"
    for way in ways(config):
        if way != chosen:
            yield f"  not {way.name}: first batch after {_soon(way.seconds)}; it needs {way.needs}"
    if tokens_per_second:
        wanted = tokens_per_second * _width(config)
        line = f"  read rate: {wanted / 1e6:,.1f} MB/s across all nodes"
        yield line + (f" of {chosen.rate / 1e6:,.0f} MB/s available" if chosen.rate else "")
        if chosen.name != "FSx" and config.data.tokenized_path:
            gets = f"{wanted / PIECE:,.1f} GET requests per second"
            yield f"  S3: {gets}; one prefix allows {PREFIX:,}, so one is enough"
