"""Estimates how nodes read their tokens: from FSx, streamed from S3, or copied to each node's disks
first.

Rates: S3 gives one request about 85 to 90 MB/s and a prefix 5,500 GET a second (S3's user guide,
"Best practices design patterns"); a reader has eight of them under way (data/shards.py). FSx:
template_storage.py. Tokens need little of that: one is two bytes, or four. So the time
to the first batch decides, and how often the data crosses the network again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..config import Config
from ..hardware import node_types
from .template_storage import makes_file_system, throughput

# bytes/s of one GET; those of a node; GETs a second of a prefix
REQUEST, AT_ONCE, PREFIX = (87e6, 8, 5500)
PIECE = 16e6  # bytes of one GET
WINDOW = 1024  # MiB (data.shuffle_window_mib) where a dataset is in S3
SMALL_VOCABULARY = 65_536  # tokens that two bytes can tell apart
COPY_PAYS = 60.0  # seconds that a copy before the first batch may take
COPY = "NVMe copy"


@dataclass(frozen=True)
class DataAccess:
    """A way to read: the seconds to its first batch, what it can move in bytes/s (of all nodes),
    and what it takes to have it.
    """

    name: str
    seconds: float
    rate: float
    needs: str


def volume(config: Config) -> float:
    """Bytes of tokens that the run reads."""
    train = config.train
    return float(train.steps * train.global_batch_size * (train.sequence_length + 1)) * _width(
        config
    )


def _width(config: Config) -> int:
    return 2 if config.model.vocab_size <= SMALL_VOCABULARY else 4


def node_rate(config: Config) -> float:
    """Returns what a node gets from S3, in bytes/s."""
    row = config.fleet.node_type
    return min(REQUEST * AT_ONCE, (row.network_gbps if row else 10) / 8 * 1e9)


def ways(config: Config) -> Iterator[DataAccess]:
    """Every way that this fleet has."""
    fleet, row, size = config.fleet, node_types.instance(config.fleet.instance_type), volume(config)
    if makes_file_system(config):
        yield DataAccess(
            "FSx", 1.0, throughput(fleet.fsx), "nothing: make tokenize leaves the tokens there"
        )
    elif fleet.shared_folder and fleet.shared_folder.startswith("/"):
        yield DataAccess(
            "shared folder", 1.0, 0.0, "nothing: make tokenize leaves the tokens there"
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
            "data.tokenized_path is null: the tokens lie beside the run, and every node has them "
            "at once",
        )
    if copy and copy.seconds <= COPY_PAYS and copy.seconds <= 2 * stream.seconds:
        return copy, "the whole dataset is on each node within a minute, and is read once from S3"
    return (
        stream,
        "the first batch needs one shuffle window, and the rest comes while the ranks compute",
    )


def copies(config: Config) -> bool:
    """Tells whether each node copies the dataset to its disks before its ranks read it
    (data/local_copy.py).
    """
    return bool(config.data.tokenized_path) and choose(config)[0].name == COPY


def _soon(seconds: float) -> str:
    return "a second" if seconds < 1.5 else f"about {seconds:,.0f} s"


def describe(config: Config, tokens_per_second: float | None) -> Iterator[str]:
    """Describes it for `make plan`: the way, why, the others, and the requests to S3."""
    chosen, why = choose(config)
    yield f"  {chosen.name}: {why}; first batch after {_soon(chosen.seconds)}"
    for way in ways(config):
        if way != chosen:
            yield f"  not {way.name}: first batch after {_soon(way.seconds)}; it takes {way.needs}"
    if tokens_per_second:
        wanted = tokens_per_second * _width(config)
        line = f"  read: {wanted / 1e6:,.1f} MB/s by all nodes"
        yield line + (f" of {chosen.rate / 1e6:,.0f} MB/s that it moves" if chosen.rate else "")
        if chosen.name != "FSx" and config.data.tokenized_path:
            yield (
                f"  S3: {wanted / PIECE:,.1f} GET a second of {PREFIX:,} that one prefix "
                "takes: one prefix is enough"
            )
