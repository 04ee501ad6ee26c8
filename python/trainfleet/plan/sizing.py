"""Sizes a fleet: estimates training time and cost at many node counts, and picks the size that
meets the user's limits. Also compares node types and tariffs by sizing a fleet of each for the same
number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log, log2
from statistics import NormalDist

from ..config import Config
from ..config.goodput import foresee
from ..config.layout_search import KEYS, Choice, choose, ranked
from ..config.limits import format_of
from ..config.sizes import count_parameters, flops_per_token
from ..hardware.accelerators import Accelerator
from ..hardware.node_types import NodeType, Tariff
from ..trust.errors import ConfigError, Problem
from .estimate import Bill, spread_of

DAY = 86400.0
LARGEST = 10_000  # nodes
MOST_TOKENS = 1e16  # over 250 times the tokens of Qwen3 (arXiv:2505.09388)
KNEE = 1.1  # maximum cost per token at the knee, relative to the lowest one
# compute-optimal tokens per parameter (Hoffmann et al. 2022, arXiv:2203.15556)
CHINCHILLA = 20


@dataclass(frozen=True)
class Wish:
    """The user's limits. None means no limit."""

    days: float | None = None
    usd: float | None = None
    tokens: float | None = None


@dataclass(frozen=True)
class Size:
    """Fleet size with its best layout, its predicted throughput, MFU and goodput, and the tokens,
    days and US dollars of the whole training run. `spread` is the prediction's uncertainty
    (`spread_of`).
    """

    nodes: int
    choice: Choice
    tokens_per_second: float
    mfu: float
    goodput: float
    tokens: float
    days: float
    usd: float | None
    spread: float

    @property
    def each(self) -> float:
        """Returns the cost per token for comparing sizes, in US dollars, or in node-days if
        machines are free.
        """
        return (self.usd or self.nodes * self.days) / self.tokens

    @property
    def usd_per_billion(self) -> float | None:
        return self.usd / self.tokens * 1e9 if self.usd is not None else None


def sizes(config: Config, wish: Wish, bill: Bill | None) -> list[Size]:
    """Returns a size for each node count that fits the model, smallest first.

    Without TOKENS, USD determines the number of tokens, capped by DAYS. Without USD either,
    train.steps does.

    Raises:
        ConfigError: the device is unknown, or USD is set and the price is unknown.
    """
    device = _sizable(config, wish, bill)
    require_possible(config, wish)
    found = [
        size for nodes in _counts(config) if (size := size_of(config, nodes, wish, bill, device))
    ]
    if not found and wish.usd is not None and bill and bill.whole(1, 0.0) >= wish.usd:
        what = (
            f"${wish.usd:,.0f}: set-up and idle time of one node already cost "
            f"${bill.whole(1, 0.0):,.0f}"
        )
        raise ConfigError.of("USD", what, next="raise USD, or lower fleet.idle_minutes")
    if not found:
        what = (
            f"no number of nodes up to {LARGEST:,} holds the model and divides "
            "train.global_batch_size"
        )
        raise ConfigError.of(
            "train.parallelism",
            what,
            next="set a larger train.global_batch_size, or a smaller model",
        )
    return found


def _sizable(config: Config, wish: Wish, bill: Bill | None) -> Accelerator:
    """Returns the ranks' device. Raises the ConfigErrors that `sizes` documents."""
    device = config.fleet.rank_device
    if device is None:
        kind = config.fleet.node_type
        what = (
            f"{kind.name} has no accelerator"
            if kind
            else "without a type, there are no nodes to count"
        )
        asks = (
            "DAYS, USD and TOKENS size a fleet of GPU or Trainium nodes (fleet.accelerator, "
            "for your own machines)"
        )
        words = " ".join(f"{key.upper()}={value:g}" for key, value in vars(wish).items() if value)
        typed = f"make plan {words} SET='fleet.backend=slurm fleet.instance_type=p5.48xlarge'"
        then = f"{typed}; for only this machine: make plan"
        raise ConfigError.of("fleet.instance_type", f"{what}: {asks}", next=then)
    if wish.usd is not None and (bill is None or bill.is_free):
        name = config.fleet.node_type.name if config.fleet.node_type else "this machine"
        what = (
            f"{name} has no list price (set fleet.accelerator.usd_per_hour), so USD "
            "can't be converted to a number of nodes"
        )
        raise ConfigError.of("USD", what, next="make plan DAYS=... TOKENS=...")
    return device


def require_possible(config: Config, wish: Wish) -> None:
    """Raises ConfigError if TOKENS is below one step, or beyond what any fleet can train on."""
    step = config.step_tokens
    if wish.tokens is None or step <= wish.tokens <= MOST_TOKENS:
        return
    bound = f"less than one step of {step:,} tokens"
    if wish.tokens > step:
        bound = f"more than {MOST_TOKENS:g}, which would take any fleet decades"
    raise ConfigError.of("TOKENS", f"{wish.tokens:g} is {bound}", next="make plan TOKENS=1e12")


def answer(found: Sequence[Size], wish: Wish, fleet: int | None = None) -> Size:
    """Returns the size that meets the limits.

    Without DAYS and USD, returns the size with `fleet` nodes, or the knee if that size is not in
    `found`. With USD but not TOKENS, returns the size that trains on the most tokens. Otherwise,
    returns the cheapest size if DAYS is set, or else the fastest.

    Raises:
        ConfigError: no size meets the limits; the message suggests the nearest attainable ones.
    """
    if wish.days is None and wish.usd is None:
        return next((size for size in found if size.nodes == fleet), knee(found))
    meets = [size for size in found if _in_time(size, wish) and _within(size, wish)]
    if not meets:
        raise _unmet(found, wish)
    if wish.tokens is None and wish.usd is not None:
        return max(meets, key=lambda size: size.tokens)
    if wish.days is not None:
        # free machines are compared by node-days
        return min(meets, key=lambda size: (size.usd or size.nodes * size.days, size.days))
    return min(meets, key=lambda size: size.days)


def knee(found: Sequence[Size]) -> Size:
    """Returns the fastest size whose cost per token is within 10 % of the lowest.

    If machines are free, cost is measured in node-days.
    """
    least = min(size.each for size in found)
    return max(
        (size for size in found if size.each <= KNEE * least),
        key=lambda size: size.tokens_per_second * size.goodput,
    )


def surely(found: Sequence[Size], wish: Wish) -> Size | None:
    """Returns the size that meets DAYS with 90 % confidence, or None if no size does or if the
    number of tokens has no deadline (`is_dated`).

    The spread is an 80 % interval, so one run in ten takes longer than its upper end.
    """
    if wish.days is None or not is_dated(wish):
        return None
    late = [replace(size, days=size.days * math.exp(size.spread)) for size in found]
    try:
        nodes = answer(late, wish).nodes
    except ConfigError:
        return None
    return next(size for size in found if size.nodes == nodes)


def is_dated(wish: Wish) -> bool:
    """Returns whether DAYS is a deadline for a fixed number of tokens.

    TOKENS fixes the number, or train.steps if USD is not set.
    """
    return wish.days is not None and (wish.tokens is not None or wish.usd is None)


def shown(found: Sequence[Size], *chosen: Size) -> list[Size]:
    """Returns the sizes to list in a table: powers of two, and the chosen sizes."""
    return [size for size in found if size.nodes & (size.nodes - 1) == 0 or size in chosen]


def remark(config: Config, tokens: float) -> str:
    """Compares the tokens per parameter with the compute-optimal ratio."""
    ratio = tokens / count_parameters(config.model)
    return (
        f"{ratio:,.3g} tokens per parameter; {CHINCHILLA} give the best model for a given "
        "compute budget, and more give a better small model"
    )


def _counts(config: Config) -> Iterator[int]:
    """Yields the node counts to try: powers of two, their midpoints, and the fleet's own, as in
    1, 2, 3, 4, 6, 8, 12 ...
    """
    powers = [2**power for power in range(LARGEST.bit_length())]
    counts = {count for power in powers for count in (power, power + power // 2)} | {
        config.fleet.nodes
    }
    yield from sorted(count for count in counts if count <= LARGEST)


def size_of(
    config: Config, nodes: int, wish: Wish, bill: Bill | None, device: Accelerator
) -> Size | None:
    around = bill.whole(nodes, 0.0) if bill else 0.0
    if wish.tokens is None and wish.usd is not None and around >= wish.usd:
        return None
    choices = ranked(replace(config, fleet=replace(config.fleet, nodes=nodes)), set(KEYS), device)
    if not choices:
        return None
    choice = choose(choices)
    useful = foresee(choice.config, choice.seconds).share
    rate = config.step_tokens / choice.seconds
    dollars = bill.hour(nodes) * 24 if bill else None  # per day
    tokens = _tokens(
        config, replace(wish, usd=wish.usd and wish.usd - around), rate * useful, dollars
    )
    days = tokens / (rate * useful) / DAY
    mfu = _mfu(choice.config, rate, device)
    usd = None if dollars is None else around + days * dollars
    spread = spread_of(choice.step, device.fitted)
    return Size(nodes, choice, rate, mfu, useful, tokens, days, usd, spread)


def _mfu(config: Config, rate: float, device: Accelerator) -> float:
    peak = device.peak(format_of(config)) * config.world_size
    return rate * flops_per_token(config.model, config.train.sequence_length) / peak


def _tokens(config: Config, wish: Wish, rate: float, dollars: float | None) -> float:
    if wish.tokens is not None:
        return wish.tokens
    if wish.usd is not None and dollars:
        return rate * DAY * min(wish.days or math.inf, wish.usd / dollars)
    return float(config.train.steps * config.step_tokens)


def _in_time(size: Size, wish: Wish) -> bool:
    return wish.days is None or size.days <= wish.days * 1.0001


def _within(size: Size, wish: Wish) -> bool:
    return wish.usd is None or (size.usd is not None and size.usd <= wish.usd * 1.0001)


def _unmet(found: Sequence[Size], wish: Wish) -> ConfigError:
    fastest, cheapest = min(found, key=lambda size: size.days), min(found, key=_dollars)
    in_time, within = (
        [size for size in found if _in_time(size, wish)],
        [size for size in found if _within(size, wish)],
    )
    problems = []
    if not in_time:
        limit = (
            ""
            if fastest.nodes >= LARGEST
            else "; more nodes need a larger train.global_batch_size, which they must divide"
        )
        what = (
            f"{_days(wish.days)}: {_nodes(fastest)}, the fastest fleet, would need "
            f"{fastest.days:,.3g}{limit}"
        )
        problems.append(Problem(0, "DAYS", "", f"{what}; DAYS={_up(fastest.days)} can be met"))
    if not within:
        what = (
            f"${wish.usd:,.0f}: {_nodes(cheapest)}, the cheapest fleet, would cost "
            f"${_dollars(cheapest):,.0f}"
        )
        problems.append(Problem(0, "USD", "", f"{what}; USD={_up(_dollars(cheapest))} can be met"))
    if not problems:
        one, other = min(in_time, key=_dollars), min(within, key=lambda size: size.days)
        what = f"{_days(wish.days)} cost ${_dollars(one):,.0f} ({_nodes(one)})"
        both = f"{what}, and ${wish.usd:,.0f} take {other.days:,.3g} days ({_nodes(other)})"
        problems.append(Problem(0, "DAYS", "", f"no size meets both DAYS and USD: {both}"))
    return ConfigError(problems, next="lower TOKENS, or raise the limits as shown")


def _days(days: float | None) -> str:
    return f"{days:g} day{'' if days == 1 else 's'}"


def _nodes(size: Size) -> str:
    return f"{size.nodes:,} node{'s' if size.nodes > 1 else ''}"


def _dollars(size: Size) -> float:
    return math.inf if size.usd is None else size.usd


def _up(value: float) -> str:
    """Rounds up to three significant digits, so that the suggested limit is attainable."""
    digits = 10 ** (math.floor(math.log10(value)) - 2) if value > 0 else 1
    return f"{math.ceil(value / digits) * digits:.12g}"


SURE = 0.9  # required probability of meeting DAYS
# half-width of the 80 % interval of a normal distribution, in standard deviations
FOUR_OF_FIVE = NormalDist().inv_cdf(0.9)


@dataclass(frozen=True)
class Bid:
    """Fleet of one node type at one tariff. `chance` is the probability of meeting DAYS, or None
    without DAYS. `fitted` means that the device's speed was fitted to published runs.
    """

    name: str
    tariff: Tariff
    size: Size
    chance: float | None
    fitted: bool


def bids(config: Config, wish: Wish) -> list[Bid]:
    """Returns a bid for each of the node type's tariffs that meets all limits except DAYS.

    With DAYS, bids the smallest fleet that meets it with probability SURE, or the largest fleet
    within the limits if none does. Without DAYS, bids the knee.

    Raises:
        ConfigError: the type has no known price, or no fleet of it meets the limits.
    """
    row, device = config.fleet.node_type, config.fleet.rank_device
    assert row and device
    if not row.tariffs:
        raise _none(row, "no price: it is not in EC2's on-demand list or its capacity block rates")
    if not (found := list(_growing(config, wish, device))):
        raise _none(row, "no tried number of nodes holds the model and divides the global batch")
    priced = [
        (tariff, sizes) for tariff in row.tariffs if (sizes := _affordable(found, tariff, wish))
    ]
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
    """Returns the probability that training finishes within `days`.

    The duration is assumed to be log-normal, with the spread as its 80 % interval.
    """
    if days is None:
        return None
    return NormalDist().cdf(log(days / size.days) * FOUR_OF_FIVE / size.spread)


def best(found: Sequence[Bid]) -> Bid:
    """Returns the cheapest bid that meets DAYS with probability SURE, or else the likeliest to meet
    it.
    """
    sure = [bid for bid in found if bid.chance is None or bid.chance >= SURE]
    return min(sure, key=cost) if sure else max(found, key=lambda bid: bid.chance or 0.0)


def cost(bid: Bid) -> tuple[float, float]:
    """Returns a sort key: US dollars per token, then days."""
    return bid.size.usd_per_billion or 0.0, bid.size.days


def _growing(config: Config, wish: Wish, device: Accelerator) -> Iterator[Size]:
    """Yields power-of-two sizes, priced at $1 per node-hour.

    Stops at the first size that meets DAYS or, without DAYS, that is past the knee.
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
    """Returns the exponent of the power of two to start from. Smaller fleets can't meet DAYS even
    at peak FLOP/s.
    """
    if wish.days is None or wish.tokens is None:
        return 0
    peak = device.peak(format_of(config)) * config.fleet.ranks_per_node
    flops = wish.tokens * flops_per_token(config.model, config.train.sequence_length)
    fastest = flops / (peak * wish.days * DAY)  # nodes
    return int(log2(min(LARGEST, max(1.0, fastest))))


def _affordable(found: Sequence[Size], tariff: Tariff, wish: Wish) -> list[Size]:
    """Reprices the sizes at a tariff, and returns those within USD and the tariff's limits."""
    priced = (replace(size, usd=(size.usd or 0.0) * tariff.usd_per_hour) for size in found)
    return [
        size
        for size in priced
        if size.nodes <= tariff.nodes
        and size.days <= tariff.days
        and (wish.usd is None or (size.usd or 0.0) <= wish.usd)
    ]


def _chosen(found: Sequence[Size], days: float | None) -> Size:
    """Returns the size to bid. Only the last size can meet `days` with probability SURE."""
    return knee(found) if days is None else found[-1]
