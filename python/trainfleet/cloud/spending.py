"""What a fleet costs an hour, by resource: nodes, their volumes, the file system, NAT, addresses, the head node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..config import Config
from ..config.types import Fsx
from .instances import HEAD_GIB, capacity_of
from .prices import GIB_MONTH, NAT_GB, TABLE, Prices, by_table, of
from .storage import makes_file_system


@dataclass(frozen=True)
class Row:
    """One resource: how many of it, what it is, US dollars an hour for all of them (None: unknown), and the source."""

    name: str
    count: int
    what: str
    usd: float | None
    source: str


def hourly(found: Iterable[Row]) -> float | None:
    """US dollars an hour for all; None where one price is not known."""
    costs = [row.usd for row in found]
    return None if None in costs else sum(filter(None, costs))


def node_hour(config: Config) -> float | None:
    """US dollars for an hour of a node, with its part of what all nodes share: what the budget counts with."""
    whole = hourly(rows(config))
    return None if whole is None else whole / config.fleet.nodes


def deployment(fsx: Fsx) -> str:
    """The kind of file system, as prices have it."""
    return "SCRATCH_2" if fsx.type == "scratch" else f"PERSISTENT_2-{fsx.throughput}"


def rows(config: Config, prices: Prices | None = None, zone: str = "") -> Iterator[Row]:
    """Everything that costs money by the hour."""
    fleet, aws, count = config.fleet, config.fleet.aws, config.fleet.nodes
    capacity, prices = capacity_of(config), prices or by_table()
    each = prices.instance(fleet.instance_type or "", capacity, zone)
    yield Row("nodes", count, f"{fleet.instance_type}, {capacity}", each.times(count), each.source)
    yield Row("volumes", count, f"{aws.volume_gib:,} GiB gp3", of("volume", "gp3", aws.volume_gib * count), TABLE)
    if makes_file_system(config) or (fleet.hosts and fleet.fsx.dns_name):  # which stands in the config that the head is handed
        kind = deployment(fleet.fsx)
        what = f"FSx for Lustre, {fleet.fsx.size_gib:,} GiB {kind.replace('-', ', ')}"
        yield Row("file system", 1, what, of("fsx", kind, fleet.fsx.size_gib), TABLE)
    yield from network(config, 2 if aws.head else 1)
    if aws.head:
        head, disk = prices.instance(aws.head), of("volume", "gp3", HEAD_GIB) or 0.0
        yield Row("head", 1, aws.head, None if head.usd is None else head.usd + disk, head.source)


def network(config: Config, addresses: int) -> Iterator[Row]:
    """The network of the stack, where it makes one."""
    if not config.fleet.aws.vpc:
        yield Row("NAT", 1, f"NAT gateway; ${NAT_GB} for each GB through it, and S3 goes around it", of("nat", "", 1), TABLE)
        yield Row("addresses", addresses, "public IPv4", of("address", "", addresses), TABLE)


def describe(found: Iterable[Row], hours: float | None) -> Iterator[str]:
    """The table that `make plan` prints: dollars an hour by resource, all together, for the run's hours, and who says so."""
    found = list(found)
    width, whole = max(len(row.name) for row in found), hourly(found)
    for row in found:
        price = "unknown" if row.usd is None else f"{row.usd:,.2f}"
        yield f"  {row.name:{width}}  {price:>10}  {row.count} x {row.what}"
    if whole is None:
        yield f"  {'all':{width}}  {'unknown':>10}  no list price for {', '.join(row.what for row in found if row.usd is None)}"
    else:
        span = "an hour" if hours is None else f"about ${whole * hours:,.2f} in {hours:,.1f} h"
        yield f"  {'all':{width}}  {whole:>10,.2f}  {span}"
    for source in dict.fromkeys(row.source for row in found):
        yield f"  {source}: {', '.join(row.name for row in found if row.source == source)}"
    yield f"  S3: ${GIB_MONTH['bucket']} a GiB and month for what is stored; requests beside it"
