"""What jobs of AWS Batch, SageMaker and a ParallelCluster cost an hour: nodes as long as the job, the rest as the stack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..config import Config
from ..config.tokenizing import tokenizing
from ..config.types import Queue
from .instances import capacity_of
from .prices import OF_SAGEMAKER, Prices, of
from .spending import CostRow, file_system, head, hourly, network, volumes
from .template_storage import makes_file_system


def of_batch(config: Config, prices: Prices, shared: bool = True) -> Iterator[CostRow]:
    """Instances of the account with their volumes; `shared`: and what the stack has beside them where it makes one."""
    fleet, count = config.fleet, config.fleet.nodes
    each, size = prices.instance(fleet.instance_type or "", capacity_of(config)), fleet.aws.volume_gib
    yield CostRow("nodes", count, fleet.instance_type or "", each.times(count), each.source, shared=False)
    yield volumes(count, size)
    if shared and not fleet.batch.queue:
        yield from network(config, 1)


def of_tokenizing(config: Config, prices: Prices) -> list[str]:
    """What data.instance_type's machine costs an hour, and what the fleet's own would, as lines of a plan."""
    if config.data.instance_type is None:
        return []
    cheap, own = (hourly(of_batch(one, prices, shared=False)) for one in (tokenizing(config), config))
    instead = "" if own is None else f", and not {config.fleet.nodes} x {config.fleet.instance_type} for ${own:,.2f}"
    price = "at a price that is not known" if cheap is None else f"for ${cheap:,.2f} an hour"
    return ["", "tokenizing", f"  1 x {config.data.instance_type} {price}{instead}; it comes with the job and goes with it"]


def of_sagemaker(config: Config, prices: Prices, volume: int) -> Iterator[CostRow]:
    """SageMaker's machines, with `volume` GiB of disk each."""
    fleet, count = config.fleet, config.fleet.nodes
    each = prices.training(fleet.instance_type or "", bool(fleet.sagemaker.training_plan))
    how = ", managed spot: less than this" if fleet.spot else ""
    what = f"ml.{fleet.instance_type}{how}"
    yield CostRow("nodes", count, what, each.times(count), each.source, shared=False)
    yield CostRow("volumes", count, f"{volume:,} GiB", of("training volume", "", volume * count), OF_SAGEMAKER, shared=False)


def of_cluster(
    config: Config, prices: Prices, queue: Queue, others: Sequence[Queue], machine: tuple[str, int]
) -> Iterator[CostRow]:
    """The nodes of the job's queue, those that other queues always keep, and the head: its type and the GiB of its disk."""
    fleet, count = config.fleet, config.fleet.nodes
    each = prices.instance(queue.instance_type or "", queue.capacity or "on-demand")
    yield CostRow("nodes", count, f"{queue.instance_type}, {queue.capacity}", each.times(count), each.source, shared=False)
    yield volumes(count, fleet.aws.volume_gib)
    for other in (other for other in others if other.min):
        kept = prices.instance(other.instance_type or "", other.capacity or "on-demand")
        what = f"{other.instance_type}, always there, of the queue {other.name}"
        yield CostRow("other nodes", other.min, what, kept.times(other.min), kept.source)
    if makes_file_system(config):
        yield file_system(fleet.fsx)
    if not fleet.aws.subnets:
        yield from network(config, 2)
    yield head(*machine, prices)
