"""Compares node types: sizes a fleet of each type and tariff for the same number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log, log2
from statistics import NormalDist

from ..config import Config
from ..config.precision import format_of
from ..config.sizes import flops_per_token
from ..hardware.accelerators import Accelerator
from ..hardware.node_types import NodeType, Tariff
from ..trust.errors import ConfigError
from .estimate import Bill
from .sizing import DAY, KNEE, LARGEST, Size, Wish, knee, size_of

SURE = 0.9  # chance to meet DAYS from which a fleet need not grow
# A normal distribution has four of five values within this many standard deviations.
FOUR_OF_FIVE = NormalDist().inv_cdf(0.9)


@dataclass(frozen=True)
class Bid:
    """A fleet of one node type at one tariff. `chance` is the probability of meeting DAYS, or None
    without DAYS. `fitted`: the speed of its devices is fitted to published runs.
    """

    name: str
    tariff: Tariff
    size: Size
    chance: float | None
    fitted: bool


def bids(config: Config, wish: Wish) -> list[Bid]:
    """Returns a bid for each tariff of the config's node type that meets the wish's limits, except
    DAYS. With DAYS, the fleet is the smallest with a chance of SURE, otherwise the one with the
    best chance. Without DAYS, it is the knee (sizing.py).

    Raises:
        ConfigError: the type has no known price, or none of its fleets is possible.
    """
    row, device = config.fleet.node_type, config.fleet.rank_device
    assert row and device
    if not row.tariffs:
        raise _none(row, "no price: it is not in EC2's on-demand list or its capacity block rates")
    if not (found := list(_growing(config, wish, device))):
        raise _none(row, "no tried number of nodes holds the model and divides the global batch")
    priced = [(tariff, sizes) for tariff in row.tariffs if (sizes := _within(found, tariff, wish))]
    if not priced:
        least = min((size.usd or 0.0) for size in found) * row.tariffs[-1].usd_per_hour
        raise _none(row, f"costs at least ${least:,.0f}")
    return [
        Bid(row.name, tariff, size, chance(size, wish.days), device.fitted)
        for tariff, sizes in priced
        for size in [_chosen(sizes, wish.days)]
    ]


def _none(row: NodeType, why: str) -> ConfigError:
    return ConfigError.of(row.name, why)


def chance(size: Size, days: float | None) -> float | None:
    """Returns the probability that the training ends within `days`. The logarithm of its time is
    taken as normally distributed, with four of five values within the spread.
    """
    if days is None:
        return None
    return NormalDist().cdf(log(days / size.days) * FOUR_OF_FIVE / size.spread)


def best(found: Sequence[Bid]) -> Bid:
    """Returns the cheapest bid with a chance of SURE, or else the bid with the best chance."""
    sure = [bid for bid in found if bid.chance is None or bid.chance >= SURE]
    return min(sure, key=cost) if sure else max(found, key=lambda bid: bid.chance or 0.0)


def cost(bid: Bid) -> tuple[float, float]:
    """Returns a sort key: US dollars per token, then days."""
    return bid.size.usd_per_billion or 0.0, bid.size.days


def _growing(config: Config, wish: Wish, device: Accelerator) -> Iterator[Size]:
    """Yields sizes in powers of two, at a price of $1 per node-hour, until a larger one can't be
    better.
    """
    row, least = config.fleet.node_type, 0.0
    alone = row is not None and not row.owned and not row.efa
    for power in range(_first(config, wish, device), 1 if alone else LARGEST.bit_length()):
        size = size_of(config, 2**power, Wish(tokens=wish.tokens), Bill(1.0), device)
        if size is None:
            continue
        yield size
        least = min(least or size.each, size.each)
        met = chance(size, wish.days)
        if size.each > KNEE * least if met is None else met >= SURE:
            return


def _first(config: Config, wish: Wish, device: Accelerator) -> int:
    """Returns the power of two from which a fleet could meet DAYS at its peak FLOP/s."""
    if wish.days is None or wish.tokens is None:
        return 0
    peak = device.peak(format_of(config)) * config.fleet.ranks_per_node
    flops = wish.tokens * flops_per_token(config.model, config.train.sequence_length)
    fastest = flops / (peak * wish.days * DAY)  # nodes
    return int(log2(min(LARGEST, max(1.0, fastest))))


def _within(found: Sequence[Size], tariff: Tariff, wish: Wish) -> list[Size]:
    """Returns the sizes at the tariff's price that are within its limits and USD."""
    priced = (replace(size, usd=(size.usd or 0.0) * tariff.usd_per_hour) for size in found)
    return [
        size
        for size in priced
        if size.nodes <= tariff.nodes
        and size.days <= tariff.days
        and (wish.usd is None or (size.usd or 0.0) <= wish.usd)
    ]


def _chosen(found: Sequence[Size], days: float | None) -> Size:
    """Returns the size for a bid. The last size is the only one that may have a chance of SURE."""
    return knee(found) if days is None else found[-1]
