"""Computes a fleet's cost: per hour for each resource, and for a run from setup to teardown.

All AWS backends share this computation. A CostRow is a resource's cost per hour. A BillStage is a
stage of setup or teardown in which machines cost money but no training runs. Spending.bill combines
both for plans and budgets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..config.derive import tokenizing
from ..config.tables import read_table
from ..config.types import Config, Fsx, Queue
from ..plan.estimate import Bill, BillStage
from .prices import GB, GIB_MONTH, OF_SAGEMAKER, TABLE, Price, Prices, by_table, of
from .template import HEAD_GIB, builds_first, capacity_of
from .template_storage import has_file_system, makes_file_system

STAGES = {
    key: BillStage(**row)
    for key, row in read_table(Path(__file__).with_name("stages.yaml")).items()
}
UNLIMITED = (STAGES["until clean"],), math.inf


@dataclass(frozen=True)
class CostRow:
    """The cost of one resource: count, description, total US dollars per hour (None: unknown), and
    the source of the price.

    `shared`: whether it also costs money while there are no nodes.
    """

    name: str
    count: int
    what: str
    usd: float | None
    source: str
    shared: bool = True


@dataclass(frozen=True)
class Spending:
    """The cost of a backend's machines: per hour, and by stage before and after training.

    `lingers`: hours that nodes are still billed after a launch has ended.
    """

    rows: tuple[CostRow, ...]
    before: tuple[BillStage, ...]
    after: tuple[BillStage, ...]
    lingers: float

    def bill(self, nodes: int) -> Bill | None:
        """Returns the cost of a run on that many nodes, or None if a price is unknown."""
        own = hourly(row for row in self.rows if not row.shared)
        rest = hourly(row for row in self.rows if row.shared)
        if own is None or rest is None:
            return None
        return Bill(own / nodes, rest, self.before, self.after, self.lingers)


def of_ec2(config: Config, prices: Prices | None = None, zone: str = "") -> Spending:
    """Prices a stack of EC2 instances, which are billed from their creation."""
    fleet, kind, first = config.fleet, config.fleet.node_type, builds_first(config)
    before = {
        "file system": has_file_system(config),
        "builder": first,
        "stack": True,
        "host keys": True,
        fleet.device: fleet.device in STAGES,
        "efa": kind and kind.efa and fleet.nodes > 1,
        "python": not fleet.python and not first,
        "start": True,
    }
    rows = tuple(_ec2_rows(config, prices or by_table(), zone))
    stages = tuple(STAGES[key] for key, is_there in before.items() if is_there)
    return Spending(rows, stages, *_idle(config))


def of_batch(config: Config, prices: Prices) -> Spending:
    """Prices AWS Batch, which launches machines for a job and terminates them minutes after it
    ends.
    """
    rows = list(_batch_nodes(config, prices))
    before, idle = ["boot", "image", "start"], STAGES["idle"]
    if not config.fleet.batch.queue:
        rows += network(config, 1)
        before.insert(0, "shared stack")
    stages = tuple(STAGES[key] for key in before)
    return Spending(tuple(rows), stages, (idle,), idle.minutes / 60)


def of_tokenizing(config: Config, prices: Prices) -> list[str]:
    """Returns plan lines that compare the price of data.tokenize_instance_type with the fleet's."""
    if config.data.tokenize_instance_type is None:
        return []
    cheap, own = (hourly(_batch_nodes(one, prices)) for one in (tokenizing(config), config))
    fleet = f"{config.fleet.nodes} x {config.fleet.instance_type}"
    instead = "" if own is None else f" instead of {fleet} for ${own:,.2f}"
    price = "at an unknown price" if cheap is None else f"for ${cheap:,.2f} an hour"
    machine = f"1 x {config.data.tokenize_instance_type} {price}{instead}"
    return ["", "tokenizing", f"  {machine}; it starts with the job and ends with it"]


def of_sagemaker(config: Config, prices: Prices, volume: int) -> Spending:
    """Prices SageMaker, which bills from the start of the image download, and for a warm pool.

    `volume`: disk size per node, in GiB.
    """
    fleet, count = config.fleet, config.fleet.nodes
    each = prices.training(fleet.instance_type or "", bool(fleet.sagemaker.training_plan))
    how = ", managed spot costs less than this" if fleet.spot else ""
    nodes = _nodes(count, f"ml.{fleet.instance_type}{how}", each)
    price = of("training volume", "", volume * count)
    disks = CostRow("volumes", count, f"{volume:,} GiB", price, OF_SAGEMAKER, shared=False)
    warm = fleet.sagemaker.warm_pool_minutes or 0
    kept = (BillStage("warm pool", warm, "fleet.sagemaker.warm_pool_minutes"),) if warm else ()
    before = STAGES["image"], STAGES["start"]
    return Spending((nodes, disks), before, (STAGES["upload"], *kept), warm / 60)


def of_cluster(
    config: Config, prices: Prices, queue: Queue, others: Sequence[Queue], machine: tuple[str, int]
) -> Spending:
    """Prices ParallelCluster, which launches the nodes of the job's queue and terminates idle ones.

    `others`: queues that may keep nodes running. `machine`: the head's instance type, and its disk
    in GiB.
    """
    static = queue.min > 0  # the job's nodes always run
    made = ["cluster"] if config.fleet.python else ["cluster", "python"]
    before = [replace(STAGES[key], nodes=static) for key in made]
    before += [STAGES["cluster nodes"], STAGES["start"]]
    rows = tuple(_cluster_rows(config, prices, queue, others, machine))
    return Spending(rows, tuple(before), *(UNLIMITED if static else _idle(config)))


def hourly(found: Iterable[CostRow]) -> float | None:
    """Returns the sum in US dollars per hour, or None if a price is unknown."""
    costs = [row.usd for row in found]
    return None if None in costs else sum(filter(None, costs))


def deployment(fsx: Fsx) -> str:
    """Returns the file system's deployment type, as spelled in prices.yaml."""
    return "SCRATCH_2" if fsx.type == "scratch" else f"PERSISTENT_2-{fsx.throughput}"


def _ec2_rows(config: Config, prices: Prices, zone: str) -> Iterator[CostRow]:
    fleet, aws, count = config.fleet, config.fleet.aws, config.fleet.nodes
    capacity = capacity_of(config)
    each = prices.instance(fleet.instance_type or "", capacity, zone)
    yield _nodes(count, f"{fleet.instance_type}, {capacity}", each)
    yield volumes(count, aws.volume_gib)
    if has_file_system(config):
        yield file_system(fleet.fsx)
    yield from network(config, 2 if aws.bastion_type else 1)
    if aws.bastion_type:
        yield head(aws.bastion_type, HEAD_GIB, prices)


def _batch_nodes(config: Config, prices: Prices) -> Iterator[CostRow]:
    fleet, count = config.fleet, config.fleet.nodes
    each = prices.instance(fleet.instance_type or "", capacity_of(config))
    yield _nodes(count, fleet.instance_type or "", each)
    yield volumes(count, fleet.aws.volume_gib)


def _cluster_rows(
    config: Config, prices: Prices, queue: Queue, others: Sequence[Queue], machine: tuple[str, int]
) -> Iterator[CostRow]:
    fleet, count = config.fleet, config.fleet.nodes
    each = prices.instance(queue.instance_type or "", queue.capacity or "on-demand")
    yield _nodes(count, f"{queue.instance_type}, {queue.capacity}", each)
    yield volumes(count, fleet.aws.volume_gib)
    for other in (other for other in others if other.min):
        kept = prices.instance(other.instance_type or "", other.capacity or "on-demand")
        what = f"{other.instance_type}, always running, in the queue {other.name}"
        yield CostRow("other nodes", other.min, what, kept.times(other.min), kept.source)
    if makes_file_system(config):
        yield file_system(fleet.fsx)
    if not fleet.aws.subnets:
        yield from network(config, 2)
    yield head(*machine, prices)


def _idle(config: Config) -> tuple[tuple[BillStage, ...], float]:
    """Returns the stages after training, and the hours for which idle nodes are billed."""
    minutes = config.fleet.idle_minutes
    if minutes is None:
        return UNLIMITED
    return (BillStage("idle nodes", minutes, "fleet.idle_minutes"),), minutes / 60


def _nodes(count: int, what: str, each: Price) -> CostRow:
    """Returns the nodes' cost row. `each`: the price of one node."""
    return CostRow("nodes", count, what, each.times(count), each.source, shared=False)


def volumes(count: int, size: int) -> CostRow:
    """Returns the cost row of the nodes' disks. `size`: GiB per disk."""
    usd = of("volume", "gp3", size * count)
    return CostRow("volumes", count, f"{size:,} GiB gp3", usd, TABLE, shared=False)


def file_system(fsx: Fsx) -> CostRow:
    """Returns the cost row of FSx for Lustre."""
    kind = deployment(fsx)
    what = f"FSx for Lustre, {fsx.size_gib:,} GiB {kind.replace('-', ', ')}"
    return CostRow("file system", 1, what, of("fsx", kind, fsx.size_gib), TABLE)


def head(name: str, size: int, prices: Prices) -> CostRow:
    """Returns the head's cost row. `size`: its disk in GiB."""
    price, disk = prices.instance(name), of("volume", "gp3", size) or 0.0
    return CostRow("head", 1, name, None if price.usd is None else price.usd + disk, price.source)


def network(config: Config, addresses: int) -> Iterator[CostRow]:
    """Yields the cost rows of the stack's network, if it creates one."""
    if not config.fleet.aws.vpc:
        what = f"NAT gateway; ${GB['nat']} for each GB through it; S3 traffic bypasses it"
        yield CostRow("NAT", 1, what, of("nat", "", 1), TABLE)
        yield CostRow("addresses", addresses, "public IPv4", of("address", "", addresses), TABLE)


def describe(found: Iterable[CostRow], hours: float | None) -> Iterator[str]:
    """Yields the hourly cost table of `make plan`: each resource, the total, the run's hours, and
    the price sources.
    """
    found = list(found)
    width, whole = max(len(row.name) for row in found), hourly(found)
    for row in found:
        price = "unknown" if row.usd is None else f"{row.usd:,.2f}"
        yield f"  {row.name:{width}}  {price:>10}  {row.count} x {row.what}"
    if whole is None:
        unknown = ", ".join(row.what for row in found if row.usd is None)
        yield f"  {'all':{width}}  {'unknown':>10}  no list price for {unknown}"
    else:
        span = "an hour" if hours is None else f"about ${whole * hours:,.2f} in {hours:,.1f} h"
        yield f"  {'all':{width}}  {whole:>10,.2f}  {span}"
    for source in dict.fromkeys(row.source for row in found):
        yield f"  {source}: {', '.join(row.name for row in found if row.source == source)}"
    yield f"  S3: ${GIB_MONTH['bucket']} per GiB and month; requests cost extra"


def _length(hours: float) -> str:
    if hours >= 2:
        return f"{hours:,.1f} h"
    return f"{hours * 60:,.0f} min" if hours * 60 >= 1 else "under a minute"


def describe_whole(bill: Bill | None, nodes: int, hours: float | None) -> Iterator[str]:
    """Yields the second cost table of `make plan`: the cost of each stage from setup to teardown,
    and the source of its duration.
    """
    if bill is None:
        return
    yield from ("", "dollars from set-up to teardown")

    def rows(found: Iterable[BillStage], when: str) -> Iterator[tuple[str, float, str]]:
        for one in found:
            why = f"{_length(one.minutes / 60)}, {one.why}"
            yield f"{when}: {one.name}", bill.of([one], nodes), why

    stages = [("paid ahead", bill.paid * nodes, bill.paid_for)] if bill.paid else []
    stages += rows(bill.before, "set-up")
    if hours is not None:
        why = f"{_length(hours)}, as estimated above"
        stages.append(("training", hours * bill.hour(nodes), why))
    stages += rows(bill.after, "after it")
    width = max(len(name) for name, *_ in stages)
    for name, usd, why in stages:
        yield f"  {name:{width}}  {usd:>10,.2f}  {why}"
    whole = bill.whole(nodes, hours or 0.0)
    what = "and training, of unknown length" if hours is None else "which budget.max_usd limits"
    yield f"  {'all':{width}}  {whole:>10,.2f}  {what}"
    if bill.rest:
        yield f"  then ${bill.rest:,.2f} an hour for the remaining resources, until make clean"
    yield "  not included: tokenizing, traffic, requests, and waiting for capacity"
