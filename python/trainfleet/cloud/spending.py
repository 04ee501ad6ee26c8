"""What a fleet costs, by resource and from set-up to teardown: nodes, volumes, file system, NAT, addresses, head.

One computation for every backend on AWS: rows say what an hour costs, stages.py says which hours nobody trains in, and `bill`
makes of both what plans show and budgets count with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..config import Config
from ..config.types import Fsx
from ..plan.bill import Bill, BillStage
from .instances import HEAD_GIB, capacity_of
from .prices import GIB_MONTH, NAT_GB, TABLE, Prices, by_table, of
from .stages import Times
from .template_storage import has_file_system


@dataclass(frozen=True)
class CostRow:
    """One resource: how many of it, what it is, US dollars an hour for all of them (None: unknown), and the source.

    `shared`: it is paid for while there are no nodes, too.
    """

    name: str
    count: int
    what: str
    usd: float | None
    source: str
    shared: bool = True


def hourly(found: Iterable[CostRow]) -> float | None:
    """US dollars an hour for all; None where one price is not known."""
    costs = [row.usd for row in found]
    return None if None in costs else sum(filter(None, costs))


def bill(found: Iterable[CostRow], times: Times, nodes: int) -> Bill | None:
    """What a run on so many nodes costs from set-up to teardown; None where one price is not known."""
    found = list(found)
    own, rest = hourly(row for row in found if not row.shared), hourly(row for row in found if row.shared)
    return None if own is None or rest is None else Bill(own / nodes, rest, times.before, times.after, times.lingers)


def deployment(fsx: Fsx) -> str:
    """The kind of file system, as prices have it."""
    return "SCRATCH_2" if fsx.type == "scratch" else f"PERSISTENT_2-{fsx.throughput}"


def rows(config: Config, prices: Prices | None = None, zone: str = "") -> Iterator[CostRow]:
    """Everything of the ec2 backend that costs money by the hour."""
    fleet, aws, count = config.fleet, config.fleet.aws, config.fleet.nodes
    capacity, prices = capacity_of(config), prices or by_table()
    each = prices.instance(fleet.instance_type or "", capacity, zone)
    yield CostRow("nodes", count, f"{fleet.instance_type}, {capacity}", each.times(count), each.source, shared=False)
    yield volumes(count, aws.volume_gib)
    if has_file_system(config):
        yield file_system(fleet.fsx)
    yield from network(config, 2 if aws.head else 1)
    if aws.head:
        yield head(aws.head, HEAD_GIB, prices)


def volumes(count: int, size: int) -> CostRow:
    """The nodes' own disks, of so many GiB each."""
    return CostRow("volumes", count, f"{size:,} GiB gp3", of("volume", "gp3", size * count), TABLE, shared=False)


def file_system(fsx: Fsx) -> CostRow:
    """FSx for Lustre."""
    kind = deployment(fsx)
    what = f"FSx for Lustre, {fsx.size_gib:,} GiB {kind.replace('-', ', ')}"
    return CostRow("file system", 1, what, of("fsx", kind, fsx.size_gib), TABLE)


def head(name: str, size: int, prices: Prices) -> CostRow:
    """The head machine with its disk of so many GiB."""
    price, disk = prices.instance(name), of("volume", "gp3", size) or 0.0
    return CostRow("head", 1, name, None if price.usd is None else price.usd + disk, price.source)


def network(config: Config, addresses: int) -> Iterator[CostRow]:
    """The network of the stack, where it makes one."""
    if not config.fleet.aws.vpc:
        yield CostRow("NAT", 1, f"NAT gateway; ${NAT_GB} for each GB through it, and S3 goes around it", of("nat", "", 1), TABLE)
        yield CostRow("addresses", addresses, "public IPv4", of("address", "", addresses), TABLE)


def describe(found: Iterable[CostRow], hours: float | None) -> Iterator[str]:
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


def _length(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 2 else f"{hours * 60:,.0f} min" if hours * 60 >= 1 else "under a minute"


def describe_whole(bill: Bill | None, nodes: int, hours: float | None) -> Iterator[str]:
    """The second table of `make plan`: dollars from set-up to teardown by stage, and where each stage's minutes come from."""
    if bill is None:
        return
    yield from ("", "dollars from set-up to teardown")
    stages = [("paid ahead", bill.paid * nodes, bill.paid_for)] if bill.paid else []

    def add(found: Iterable[BillStage], when: str) -> None:
        stages.extend((f"{when}: {one.name}", bill.of([one], nodes), f"{_length(one.minutes / 60)}, {one.why}") for one in found)

    add(bill.before, "set-up")
    if hours is not None:
        stages.append(("training", hours * bill.hour(nodes), f"{_length(hours)}, as estimated above"))
    add(bill.after, "after it")
    width = max(len(name) for name, *_ in stages)
    for name, usd, why in stages:
        yield f"  {name:{width}}  {usd:>10,.2f}  {why}"
    whole = bill.whole(nodes, hours or 0.0)
    what = "and training, of unknown length" if hours is None else "which budget.max_usd limits"
    yield f"  {'all':{width}}  {whole:>10,.2f}  {what}"
    if bill.rest:
        yield f"  then ${bill.rest:,.2f} an hour for what stays beside the nodes, until make clean"
    yield "  not in it: tokenizing, traffic, requests, and what waits for capacity"
