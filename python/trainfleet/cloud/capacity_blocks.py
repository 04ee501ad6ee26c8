"""Capacity that is bought ahead: EC2's capacity blocks and SageMaker's training plans, found, priced and bought once.

A block is found again by its tags. EC2's purchase has no client token, so it is sent once and never repeated
by itself (calls.py, ONCE): where its answer is lost, what was bought is looked for until it is seen, or nothing more is done.

Sources: EC2 user guide, "Capacity Blocks for ML" (whole days up to 14, then weeks up to 182 days; instances are ended from 30
minutes before the end on); botocore's models of EC2 and SageMaker.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from ..config import Config
from ..trust.errors import BackendError, CloudError, ConfigError
from . import clock, discovery
from .calls import Calls
from .prices import by_table
from .resource_types import is_ours, tags_of
from .template_inputs import own_tags, pairs

DAY, DAYS, WEEKS = 24, 14, 26  # hours; whole days up to here, and then whole weeks
AHEAD = timedelta(weeks=8)  # how far ahead blocks are sold
SEEN_IN, AGAIN = 60.0, 5.0  # seconds until what was bought is seen
ENDS_EARLY = 0.5  # hours before a block's end from which on its instances are ended
USD = "trainfleet:usd"  # the tag of a block with its price, which EC2 tells only before it is bought
GONE = ("expired", "cancelled", "failed", "payment-failed", "unsupported", "unavailable", "cancelling")


@dataclass(frozen=True)
class Offer:
    """What could be bought: its id, when it begins and ends (unix time), US dollars for all of it, and its zone."""

    id: str
    starts: float
    ends: float
    usd: float
    zone: str

    def __str__(self) -> str:
        hours = (self.ends - self.starts) / 3600
        return f"{moment(self.starts)}  {hours:,.0f} h  ${self.usd:,.2f}  {self.zone}"


@dataclass(frozen=True)
class HeldCapacity:
    """What was bought: its id (cr-...), state in lower-case letters, when it begins and ends, and US dollars."""

    id: str
    state: str
    starts: float
    ends: float
    usd: float | None = None

    def __str__(self) -> str:
        paid = "" if self.usd is None else f", ${self.usd:,.2f}"
        return f"{self.id}: {self.state}, from {moment(self.starts)} to {moment(self.ends)}{paid}"

    @property
    def is_on(self) -> bool:
        return self.state == "active"


class Seller(Protocol):
    """Who sells capacity for a config: what is offered, what of it is ours already, and the purchase, which is sent once.

    `placed`: the config whose jobs use what is held. `by_list`: US dollars an hour of one machine by the list, on demand.
    """

    name: str

    def placed(self, config: Config, held: HeldCapacity | None) -> Config: ...
    def by_list(self) -> float | None: ...
    def offers(self, hours: int) -> list[Offer]: ...
    def held(self) -> list[HeldCapacity]: ...
    def buy(self, offer: Offer) -> None: ...


class Blocks:
    """EC2's capacity blocks."""

    name = "capacity block"

    def __init__(self, config: Config, calls: Calls) -> None:
        self.config, self.calls = config, calls

    def placed(self, config: Config, held: HeldCapacity | None) -> Config:
        """With the block as its reservation."""
        fleet = config.fleet
        return replace(config, fleet=replace(fleet, aws=replace(fleet.aws, reservation=held.id if held else None)))

    def by_list(self) -> float | None:
        return by_table().instance(self.config.fleet.instance_type or "").usd

    def offers(self, hours: int) -> list[Offer]:
        wanted = {"InstanceType": self.config.fleet.instance_type, "InstanceCount": self.config.fleet.nodes}
        until = datetime.fromtimestamp(clock.now(), UTC) + AHEAD
        rows = self.calls.pages("ec2", "DescribeCapacityBlockOfferings", "CapacityBlockOfferings", CapacityDurationHours=hours,
                                EndDateRange=until + timedelta(hours=hours), **wanted)  # fmt: skip
        zones = discovery.zones(self.config, self.calls)
        return cheapest_first(
            Offer(row["CapacityBlockOfferingId"], _time(row["StartDate"]), _time(row["EndDate"]), usd, row["AvailabilityZone"])
            for row in rows if (usd := fee(row)) is not None and row["AvailabilityZone"] in zones
        )  # fmt: skip

    def held(self) -> list[HeldCapacity]:
        rows = self.calls.pages("ec2", "DescribeCapacityReservations", "CapacityReservations")
        return [HeldCapacity(row["CapacityReservationId"], row["State"], _time(row["StartDate"]), _time(row["EndDate"]),
                     fee({"UpfrontFee": tags_of(row.get("Tags")).get(USD)}))
                for row in rows if row.get("ReservationType") == "capacity-block" and row["State"] not in GONE
                and is_ours(tags_of(row.get("Tags")), self.config.fleet_name)]  # fmt: skip

    def buy(self, offer: Offer) -> None:
        own = own_tags(self.config.fleet_name) | {USD: f"{offer.usd:.2f}"}
        tags = [{"ResourceType": "capacity-reservation", "Tags": pairs(own)}]
        self.calls("ec2", "PurchaseCapacityBlock", CapacityBlockOfferingId=offer.id, InstancePlatform="Linux/UNIX",
                   TagSpecifications=tags)  # fmt: skip


def _time(moment: datetime) -> float:
    return moment.timestamp()


def cheapest_first(offers: Iterable[Offer]) -> list[Offer]:
    """The cheapest first, of equals the one that begins first."""
    return sorted(offers, key=lambda offer: (offer.usd, offer.starts))


def fee(row: dict[str, Any]) -> float | None:
    """US dollars that an offer costs; None where it does not say, or in another currency."""
    try:
        fee = float(row["UpfrontFee"])
    except (KeyError, TypeError, ValueError):
        return None
    return fee if row.get("CurrencyCode", "USD") == "USD" and 0 < fee < 1e9 else None


def whole_hours(hours: float) -> int:
    """The shortest block that lasts so many hours until its instances are ended: days up to 14, then weeks.

    Raises:
        ConfigError: there is none so long.
    """
    days = math.ceil((hours + ENDS_EARLY) / DAY)
    if days > DAYS:
        days = 7 * math.ceil(days / 7)
    if days > 7 * WEEKS:
        raise ConfigError.of(
            "fleet.aws.capacity", f"block: the longest has {7 * WEEKS} days, this run needs {days}", next="more nodes"
        )
    return max(1, days) * DAY


def describe(offers: Sequence[Offer], limit: float | None) -> Iterator[str]:
    """The offers, the cheapest first; `limit`: US dollars that one may cost."""
    for offer in offers:
        yield f"  {offer}{'' if limit is None or offer.usd <= limit else '  over what budget.max_usd leaves'}"


def obtain(seller: Seller, hours: float, limit: float | None, may_buy: bool) -> tuple[HeldCapacity | None, list[str]]:
    """What is held, bought now if that may be, and None where nothing is; with lines for people.

    `limit`: US dollars that budget.max_usd leaves for it; without one nothing is bought.

    Raises:
        ConfigError: it may be bought, and there is no limit or nothing within it.
        BackendError: nothing is offered; or the purchase was not answered, and nothing that was bought can be seen.
    """
    if held := newest(seller):
        return held, [f"{seller.name} {held}"]
    offers = seller.offers(whole_hours(hours))
    if not offers:
        raise BackendError(f"no {seller.name} is offered", why=f"for {whole_hours(hours)} h", next="fewer nodes, or later again")
    lines = [f"{seller.name}s that are offered, the cheapest first", *describe(offers, limit)]
    if not may_buy:
        return None, [*lines, "next: make setup YES=1 buys the first that budget.max_usd allows; nothing is refunded"]
    if limit is None:
        raise ConfigError.of("budget.max_usd", f"null: a {seller.name} is bought within a limit only", next="write one")
    chosen = next((offer for offer in offers if offer.usd <= limit), None)
    if chosen is None:
        what = f"${limit:,.2f} are left for a {seller.name}, and the cheapest costs ${offers[0].usd:,.2f}"
        raise ConfigError.of("budget.max_usd", what, next="raise it, or fewer nodes")
    return _bought(seller, chosen), [*lines, f"bought for ${chosen.usd:,.2f}: {chosen}"]


def _bought(seller: Seller, offer: Offer) -> HeldCapacity:
    """The purchase, sent once, and then looked for; an answer that was lost is no reason to send it again."""
    trouble: CloudError | None = None
    try:
        seller.buy(offer)
    except CloudError as error:
        trouble = error
    until = clock.now() + SEEN_IN
    while not (held := newest(seller)):
        if clock.now() > until:
            if trouble:
                raise trouble
            why = f"{seller.name} {offer.id} is not seen {SEEN_IN:.0f} s after it was bought"
            raise BackendError("what was bought is not there yet", why=why, next="make setup looks again before it buys")
        clock.sleep(AGAIN)
    return held


def newest(seller: Seller) -> HeldCapacity | None:
    """What is held and of use yet: the one that ends last."""
    over = clock.now() + ENDS_EARLY * 3600
    return max((held for held in seller.held() if held.ends > over), key=lambda held: held.ends, default=None)


def moment(time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC"
