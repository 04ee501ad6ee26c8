"""What a job of AWS Batch or SageMaker costs an hour, by resource: machines as long as the job, a network as the stack."""

from __future__ import annotations

from collections.abc import Iterator

from ..config import Config
from .instances import capacity_of
from .prices import OF_SAGEMAKER, TABLE, Prices, of
from .spending import Row, network


def of_batch(config: Config, prices: Prices) -> Iterator[Row]:
    """Instances of the account with their volumes, and what the stack has beside them where it makes one."""
    fleet, count = config.fleet, config.fleet.nodes
    each, size = prices.instance(fleet.instance_type or "", capacity_of(config)), fleet.aws.volume_gib
    yield Row("nodes", count, fleet.instance_type or "", each.times(count), each.source)
    yield Row("volumes", count, f"{size:,} GiB gp3", of("volume", "gp3", size * count), TABLE)
    if not fleet.batch.queue:
        yield from network(config, 1)


def of_sagemaker(config: Config, prices: Prices, volume: int) -> Iterator[Row]:
    """SageMaker's machines, with `volume` GiB of disk each."""
    fleet, count = config.fleet, config.fleet.nodes
    each = prices.training(fleet.instance_type or "", bool(fleet.sagemaker.training_plan))
    how = ", managed spot: less than this" if fleet.spot else ""
    what = f"ml.{fleet.instance_type}{how}"
    yield Row("nodes", count, what, each.times(count), each.source)
    yield Row("volumes", count, f"{volume:,} GiB", of("training volume", "", volume * count), OF_SAGEMAKER)
