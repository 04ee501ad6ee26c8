"""How many nodes, how long, how much: what a model's training takes over numbers of nodes, and the
one that meets a wish.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..config import Config
from ..config.goodput import foresee
from ..config.layout_search import KEYS, Choice, choose, ranked
from ..config.precision import format_of
from ..config.sizes import count_parameters, flops_per_token
from ..hardware.accelerators import Accelerator
from ..trust.errors import ConfigError, Problem
from .bill import Bill
from .estimate import LIKELY

DAY = 86400.0
LARGEST = 10_000  # nodes
KNEE = 1.1  # times the least cost of a token, which the knee of the table may cost
# tokens per parameter with which a given compute is spent best (Hoffmann et al. 2022,
# arXiv:2203.15556)
CHINCHILLA = 20


@dataclass(frozen=True)
class Wish:
    """What was asked for; None: left open."""

    days: float | None = None
    usd: float | None = None
    tokens: float | None = None


@dataclass(frozen=True)
class Size:
    """A fleet's size: its best layout, what it trains per second, the useful share of time, and
    what a training takes on it.
    """

    nodes: int
    choice: Choice
    tokens_per_second: float
    mfu: float
    goodput: float
    tokens: float
    days: float
    usd: float | None

    @property
    def each(self) -> float:
        """US dollars of a token, of free machines its node-days: what sizes are compared by."""
        return (self.usd or self.nodes * self.days) / self.tokens

    @property
    def usd_per_billion(self) -> float | None:
        return self.usd / self.tokens * 1e9 if self.usd is not None else None


def sizes(config: Config, wish: Wish, bill: Bill | None) -> list[Size]:
    """What the training takes at each number of nodes that holds the model, the fewest first.

    Without TOKENS it is as long as USD and DAYS allow, and without USD too as long as train.steps
    says.

    Raises:
        ConfigError: nobody knows the device, or its price where USD is asked.
    """
    device = config.fleet.rank_device
    if device is None:
        kind = config.fleet.node_type
        what = (
            f"{kind.name} has no accelerator"
            if kind
            else "without a type there is nothing to count nodes of"
        )
        asks = (
            "DAYS, USD and TOKENS size a fleet of GPU or Trainium nodes (fleet.accelerator, "
            "of machines of yours)"
        )
        typed = (
            "make plan DAYS=7 TOKENS=1e10 SET='fleet.backend=slurm fleet.instance_type=p5.48xlarge'"
        )
        then = f"{typed}; of this machine: make plan"
        raise ConfigError.of("fleet.instance_type", f"{what}: {asks}", next=then)
    if wish.usd is not None and (bill is None or bill.is_free):
        name = config.fleet.node_type.name if config.fleet.node_type else "this machine"
        what = (
            f"no list price of {name} (fleet.accelerator.usd_per_hour says one), so USD can't "
            "be turned into nodes"
        )
        raise ConfigError.of("USD", what, next="make plan DAYS=... TOKENS=...")
    found = [
        size for nodes in _counts(config) if (size := _size(config, nodes, wish, bill, device))
    ]
    if not found and wish.usd is not None and bill and bill.whole(1, 0.0) >= wish.usd:
        what = (
            f"${wish.usd:,.0f}: set-up and idle time of one node alone cost "
            f"${bill.whole(1, 0.0):,.0f}"
        )
        raise ConfigError.of("USD", what, next="more USD, or a smaller fleet.idle_minutes")
    if not found:
        what = (
            f"no number of nodes up to {LARGEST:,} holds the model and divides train.global_batch"
        )
        raise ConfigError.of(
            "train.layout", what, next="a larger train.global_batch, or a smaller model"
        )
    return found


def answer(found: Sequence[Size], wish: Wish, fleet: int | None = None) -> Size:
    """The size that meets the wish.

    TOKENS alone asks about the `fleet` of that many nodes, or about the knee where it does not hold
    the model. DAYS takes the cheapest in time, USD with TOKENS the fastest, USD without TOKENS the
    most tokens.

    Raises:
        ConfigError: none does; by how much, and what would.
    """
    if wish.days is None and wish.usd is None:
        return next((size for size in found if size.nodes == fleet), knee(found))
    meets = [size for size in found if _in_time(size, wish) and _within(size, wish)]
    if not meets:
        raise _unmet(found, wish)
    if wish.tokens is None and wish.usd is not None:
        return max(meets, key=lambda size: size.tokens)
    if wish.days is not None:
        # of what is free, the least use
        return min(meets, key=lambda size: (size.usd or size.nodes * size.days, size.days))
    return min(meets, key=lambda size: size.days)


def knee(found: Sequence[Size]) -> Size:
    """The fastest size whose token costs at most 10 % more than the cheapest's (of machines without
    a price, in node-days).
    """
    least = min(size.each for size in found)
    return max(
        (size for size in found if size.each <= KNEE * least),
        key=lambda size: size.tokens_per_second * size.goodput,
    )


def surely(found: Sequence[Size], wish: Wish) -> Size | None:
    """The answer that is in time with 90 % confidence; None where DAYS and TOKENS are not both
    asked, or no size is.

    Four of five runs take `1 - LIKELY` to `1 + LIKELY` times what is foretold, so that one of ten
    takes longer.
    """
    if wish.days is None or wish.tokens is None:
        return None
    try:
        return answer(found, replace(wish, days=wish.days / (1 + LIKELY)))
    except ConfigError:
        return None


def shown(found: Sequence[Size], *chosen: Size) -> list[Size]:
    """The sizes for a table: powers of two, and the chosen ones."""
    return [size for size in found if size.nodes & (size.nodes - 1) == 0 or size in chosen]


def remark(config: Config, tokens: float) -> str:
    """How many tokens a parameter gets, beside what spends a given compute best."""
    ratio = tokens / count_parameters(config.model)
    return (
        f"{ratio:,.3g} tokens per parameter; {CHINCHILLA} make the best model of a given "
        "compute, more a better small one"
    )


def _counts(config: Config) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12 ...: powers of two and what lies between, and the fleet's own number."""
    powers = [2**power for power in range(LARGEST.bit_length())]
    counts = {count for power in powers for count in (power, power + power // 2)} | {
        config.fleet.nodes
    }
    yield from sorted(count for count in counts if count <= LARGEST)


def _size(
    config: Config, nodes: int, wish: Wish, bill: Bill | None, device: Accelerator
) -> Size | None:
    around = bill.whole(nodes, 0.0) if bill else 0.0
    if wish.tokens is None and wish.usd is not None and around >= wish.usd:
        return None
    choices = ranked(replace(config, fleet=replace(config.fleet, nodes=nodes)), set(KEYS), device)
    if not choices:
        return None
    choice, train = choose(choices), config.train
    useful = foresee(choice.config, choice.seconds).share
    rate = train.global_batch * train.sequence_length / choice.seconds
    dollars = bill.hour(nodes) * 24 if bill else None  # a day
    tokens = _tokens(
        config, replace(wish, usd=wish.usd and wish.usd - around), rate * useful, dollars
    )
    days = tokens / (rate * useful) / DAY
    peak = device.peak(format_of(choice.config)) * choice.config.world_size
    mfu = rate * flops_per_token(config.model, train.sequence_length) / peak
    return Size(
        nodes,
        choice,
        rate,
        mfu,
        useful,
        tokens,
        days,
        None if dollars is None else around + days * dollars,
    )


def _tokens(config: Config, wish: Wish, rate: float, dollars: float | None) -> float:
    if wish.tokens is not None:
        return wish.tokens
    if wish.usd is not None and dollars:
        return rate * DAY * min(wish.days or math.inf, wish.usd / dollars)
    return float(config.train.steps * config.train.global_batch * config.train.sequence_length)


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
            else "; more need a larger train.global_batch, which they divide"
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
        problems.append(Problem(0, "DAYS", "", f"not within USD too: {both}"))
    return ConfigError(problems, next="fewer TOKENS, or what can be met")


def _days(days: float | None) -> str:
    return f"{days:g} day{'' if days == 1 else 's'}"


def _nodes(size: Size) -> str:
    return f"{size.nodes:,} node{'s' if size.nodes > 1 else ''}"


def _dollars(size: Size) -> float:
    return math.inf if size.usd is None else size.usd


def _up(value: float) -> str:
    """Rounded up to three digits, so that what is offered can be met."""
    digits = 10 ** (math.floor(math.log10(value)) - 2) if value > 0 else 1
    return f"{math.ceil(value / digits) * digits:.12g}"
