"""Tables of time and cost for a range of node counts, of the best layouts for one node count, and
of instance types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import exp

from ..config import Config
from ..config.layout_search import Choice
from ..plan import sizing
from ..plan.estimate import Bill
from ..plan.plan import degrees
from ..plan.sizing import DAY, SURE, Bid, Size, Wish, best, cost, remark, shown
from .history import duration, percent, table
from .proposal import PARTS, hung, rough, span

ALTERNATIVES = 5  # maximum layouts to show
EACH = "per billion tokens"
LAYOUTS = ("", "layout", "micro-batch", "recompute", "memory", "per step", "cost", "limited by")
SIZES = ("", "nodes", "tokens/s", "MFU", "goodput", "time", "four of five", "cost", EACH, "layout")
LEFT = ("layout", "recompute", "limited by")
MOST = 12  # maximum rows in the table of machines
LATE = 0.05  # minimum chance of meeting DAYS for a fleet to appear in that table
COLUMNS = ("", "machine", "nodes", "terms", "four of five", "in time", "cost", EACH, "layout")
TEXTS = ("machine", "terms", "layout")


def describe_layouts(config: Config, choices: Sequence[Choice], bill: Bill | None) -> Iterator[str]:
    """Yields a table of the best layouts for this fleet, fastest first. The config's layout is
    marked.
    """
    if not choices:
        return
    yield from ("", "layouts, fastest first")
    yield from indented(table(LAYOUTS, [_layout(config, choice, bill) for choice in choices], LEFT))


def describe_sizes(
    config: Config, found: Sequence[Size], chosen: Size, wish: Wish
) -> Iterator[str]:
    """Yields the table of node counts, followed by the recommended size."""
    yield from (
        "",
        f"sizes: {rough(chosen.tokens)} tokens of {config.model.preset or config.model.family}",
    )
    knee, sure = sizing.knee(found), sizing.surely(found, wish)
    marks = [(knee, "k"), (chosen, "*")]
    rows = shown(found, knee, chosen, *([sure] if sure else []))
    yield from indented(table(SIZES, [_size(size, marks) for size in rows], LEFT))
    yield "  k: the knee, the fastest fleet with a cost per token at most 10 % above the lowest"
    yield from ("", f"answer: {_told(chosen)}", f"        {remark(config, chosen.tokens)}")
    if chosen is not knee and wish == Wish(tokens=wish.tokens):
        yield f"        the knee is {_told(knee)}"
    if sure is chosen:
        yield "        finishes in time with 90 % confidence"
    elif sizing.is_dated(wish):
        yield (
            "        finishes in time with 50 % confidence; with 90 %: "
            f"{_told(sure) if sure else 'no fleet of these sizes'}"
        )


def _told(size: Size) -> str:
    return f"NODES={size.nodes}: {rough(size.tokens)} tokens in {timed(size)}"


def timed(size: Size) -> str:
    """Returns the predicted time, and the cost in US dollars if it is known."""
    return likely(size) + (f" for about ${rough(size.usd)}" if size.usd is not None else "")


def likely(size: Size) -> str:
    """Returns the range of run times that is predicted to cover four of five such runs."""
    return span(size.days * DAY / exp(size.spread), size.days * DAY * exp(size.spread))


def indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _layout(config: Config, choice: Choice, bill: Bill | None) -> tuple[str, ...]:
    train = choice.config.train
    hours = choice.seconds * train.steps / 3600
    dollars = bill.whole(config.fleet.nodes, hours) if bill and not bill.is_free else None
    limit = choice.step.limit()
    return (
        "*" if train == config.train else "",
        degrees(choice.config),
        str(train.micro_batch_size),
        str(train.recomputation),
        f"{choice.bytes / 2**30:.1f} GiB",
        f"{choice.seconds:.3g} s",
        f"${rough(dollars)}" if dollars is not None else "",
        PARTS.get(limit, limit),
    )


def _size(size: Size, marks: Sequence[tuple[Size, str]]) -> tuple[str, ...]:
    each = f"${rough(size.usd_per_billion)}" if size.usd_per_billion is not None else ""
    return (
        "".join(mark for one, mark in marks if one is size),
        f"{size.nodes:,}",
        rough(size.tokens_per_second),
        percent(size.mfu),
        f"{size.goodput:.1%}",
        duration(size.days * DAY),
        likely(size),
        f"${rough(size.usd)}" if size.usd is not None else "",
        each,
        degrees(size.choice.config),
    )


def describe_machines(
    config: Config, found: Sequence[Bid], absent: Mapping[str, str], wish: Wish
) -> Iterator[str]:
    """Yields the candidate fleets, cheapest first, the reason why each other type is absent, and
    the recommendation.
    """
    ranked, chosen = sorted(found, key=cost), best(found)
    likely_late = (bid for bid in ranked if bid.chance is not None and bid.chance < LATE)
    late = [bid for bid in likely_late if bid is not chosen]
    rows = [bid for bid in ranked if bid not in late]
    tokens = rough(chosen.size.tokens)
    yield from ("", f"machines: {tokens} tokens of {config.model.preset or config.model.family}")
    yield from indented(table(COLUMNS, [_bid(bid, chosen) for bid in rows[:MOST]], TEXTS))
    yield from _notes(rows, late, absent)
    block = " in a capacity block (fleet.aws.block_hours)" * (chosen.tariff.terms == "block")
    size = chosen.size
    yield from ("", f"answer: {size.nodes:,} x {chosen.name}{block}: {timed(size)}")
    if chosen.chance is not None:
        unsure = "; no other machine has a better one" if chosen.chance < SURE else ""
        yield f"        has a {chosen.chance:.0%} chance of meeting DAYS={wish.days:g}{unsure}"


def _notes(rows: Sequence[Bid], late: Sequence[Bid], absent: Mapping[str, str]) -> Iterator[str]:
    yield "  ~: predicted from related devices, because no comparable run on it has been published"
    for what, bids in (("more expensive", rows[MOST:]), ("too slow for DAYS", late)):
        named = [f"{bid.name} {bid.tariff.terms} {_each(bid)}" for bid in bids]
        yield from [hung(f"  {what}: ", ", ".join(named))] if named else []
    yield from (hung(f"  {name}: ", why) for name, why in absent.items())
    sources = dict.fromkeys(bid.tariff.source for bid in rows[:MOST])
    yield hung("  prices: ", f"machines only; {'; '.join(sources)}")
    yield "  spot: not compared, because EC2 publishes no list of spot prices"


def _bid(bid: Bid, chosen: Bid) -> tuple[str, ...]:
    size = bid.size
    return (
        "*" * (bid is chosen) + "~" * (not bid.fitted),
        bid.name,
        f"{size.nodes:,}",
        bid.tariff.terms,
        likely(size),
        "" if bid.chance is None else percent(bid.chance),
        f"${rough(size.usd or 0.0)}",
        _each(bid),
        degrees(size.choice.config),
    )


def _each(bid: Bid) -> str:
    return f"${rough(bid.size.usd_per_billion or 0.0)}"
