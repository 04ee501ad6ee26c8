"""Finds, prices and buys prepaid capacity: EC2 capacity blocks and SageMaker training plans.

A capacity block is identified by its tags. EC2's purchase request has no client token, so calls.py
never retries it (ONCE). If the response is lost, setup polls until EC2 lists the purchase, or gives
up.

A training plan is identified by its tags and its name prefix. The name contains the plan's start
time, and SageMaker rejects duplicate names, so the same offer can't be bought twice. Offers in
several parts are skipped, because a run would have to wait between the parts.

Sources: EC2 user guide, "Capacity Blocks for ML" (full days up to 14, then weeks up to 182 days;
EC2 starts terminating instances 30 minutes before the end); SageMaker developer guide, "Reserve
training plans for your training jobs"; botocore's EC2 and SageMaker models; AWS's policy
AmazonSageMakerTrainingPlanCreateAccess, for the actions that buy a plan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ..config import Config
from ..config.tables import read_table
from ..plan.estimate import Bill
from ..trust.errors import BackendError, CloudError, ConfigError, NotAsked
from . import clock, discovery
from .calls import Calls, Json
from .prices import by_table
from .resource_types import is_ours, tags_of
from .template_inputs import own_tags, pairs, slug

_TABLE = read_table(Path(__file__).with_name("capacity.yaml"))
GONE, PLAN_TYPES = _TABLE["gone"], _TABLE["plan_types"]
# hours per day; maximum full days per block; maximum full weeks per block
DAY, DAYS, WEEKS = 24, 14, 26
AHEAD = timedelta(weeks=8)  # EC2 sells blocks that start up to 8 weeks ahead
SEEN_IN, AGAIN = 60.0, 5.0  # timeout and poll interval for a purchase to be listed, in seconds
ENDS_EARLY = 0.5  # hours before a block's end at which EC2 starts terminating its instances
USD = "trainfleet:usd"  # tag for a block's price, which EC2 reports only before the purchase
TO_BE_BOUGHT = "to be bought"  # placeholder ID for capacity that has not been bought yet
MOST_NAME = 40  # maximum characters of the config's name in a plan's name, which is limited to 64


@dataclass(frozen=True)
class Offer:
    """A purchase offer: ID, start and end (Unix time), total price in US dollars, and zone."""

    id: str
    starts: float
    ends: float
    usd: float
    zone: str

    def __str__(self) -> str:
        hours = (self.ends - self.starts) / 3600
        return f"{_moment(self.starts)}  {hours:,.0f} h  ${self.usd:,.2f}  {self.zone}"


@dataclass(frozen=True)
class HeldCapacity:
    """Purchased capacity: ID, state in lowercase, start and end (Unix time), and price in US
    dollars.
    """

    id: str
    state: str
    starts: float
    ends: float
    usd: float | None = None

    def __str__(self) -> str:
        paid = "" if self.usd is None else f", ${self.usd:,.2f}"
        return f"{self.id}: {self.state}, from {_moment(self.starts)} to {_moment(self.ends)}{paid}"


@dataclass(frozen=True)
class Paid:
    """An upfront price in US dollars per node (None: unknown), and a description of the
    purchase.
    """

    usd: float | None
    what: str

    def on(self, bill: Bill | None) -> Bill | None:
        """Returns the bill with this price added, or None if either is unknown."""
        if bill is None or self.usd is None:
            return None
        return replace(bill, paid=self.usd, paid_for=self.what)


NOTHING = Paid(0.0, "")


class PrepaidCapacity:
    """Capacity bought in advance for a config and a number of hours.

    Subclasses implement the requests. `using` returns the config with the given capacity assigned
    to its jobs. `by_list` returns one machine's on-demand list price in US dollars per hour.
    `offered` and `owned` yield the offers and the purchases. `buy` sends the purchase request once.
    """

    name: str

    def __init__(self, config: Config, calls: Calls, hours: float) -> None:
        self.config, self.calls, self.hours = config, calls, hours

    def using(self, id_: str | None) -> Config:
        raise NotImplementedError

    def by_list(self) -> float | None:
        raise NotImplementedError

    def offered(self, hours: int) -> Iterator[Offer]:
        raise NotImplementedError

    def owned(self) -> Iterator[HeldCapacity]:
        raise NotImplementedError

    def buy(self, offer: Offer) -> None:
        raise NotImplementedError

    @functools.cached_property
    def held(self) -> HeldCapacity | None:
        """Returns the usable purchase, or None if nothing was purchased or the account can't be
        queried.
        """
        try:
            return self._newest()
        except NotAsked:
            return None

    def placed(self) -> Config:
        """Returns the config with the purchased capacity, if any."""
        return self.using(self.held.id if self.held else None)

    def paid_config(self) -> Config:
        """Returns the config to price. Its machine hours count as prepaid even before the
        purchase.
        """
        return self.using(self.held.id if self.held else TO_BE_BOUGHT)

    def paid(self) -> Paid:
        """Returns the price of the purchase, or else of the cheapest offer, or else the list
        price.
        """
        nodes = self.config.fleet.nodes
        if self.held and self.held.usd is not None:
            return Paid(self.held.usd / nodes, f"the {self.name} {self.held.id}")
        hours = whole_hours(self.hours)
        try:
            offers = [] if self.held else self._offers(hours)
        except CloudError:
            offers = []  # `make plan` also works without an account
        if offers:
            what = f"the cheapest {self.name} of {hours} h on offer; make setup buys it with YES=1"
            return Paid(offers[0].usd / nodes, what)
        each = self.by_list()
        what = f"a {self.name} of {hours} h at the on-demand list price"
        return Paid(each and each * hours, what)

    def obtain(self, may_buy: bool, rest: Bill | None) -> tuple[list[str], bool]:
        """Buys the capacity if allowed. Returns lines to print, and whether the capacity is usable
        now.

        `rest`: bill for everything else. Raises the same errors as `find_or_buy`.
        """
        self.held, lines = self.find_or_buy(self._left(rest), may_buy)
        if self.held is None:
            return lines, False
        if self.held.state == "active":
            return lines, True
        starts = _moment(self.held.starts)
        return [*lines, f"its machines are there from {starts}\nnext: run make setup then"], False

    def find_or_buy(
        self, limit: float | None, may_buy: bool
    ) -> tuple[HeldCapacity | None, list[str]]:
        """Returns the purchase and lines to print. If there is no purchase yet, buys one if
        allowed, or else returns None.

        `limit`: US dollars that budget.max_usd leaves for a purchase; None prevents it.

        Raises:
            ConfigError: a purchase is allowed, but there is no limit or no offer within it.
            BackendError: AWS has no offer, or does not list the purchase in time.
        """
        if held := self._newest():
            return held, [f"{self.name} {held}"]
        hours = whole_hours(self.hours)
        offers = self._offers(hours)
        if not offers:
            then = "use fewer nodes, or try again later"
            raise BackendError(f"no {self.name} is offered", why=f"for {hours} h", next=then)
        lines = [f"{self.name}s on offer, the cheapest first"]
        for offer in offers:
            fits = limit is None or offer.usd <= limit
            lines.append(f"  {offer}" + ("" if fits else "  more than budget.max_usd leaves"))
        if not may_buy:
            then = "make setup YES=1 buys the first that budget.max_usd allows; AWS gives no refund"
            return None, [*lines, f"next: {then}"]
        cheapest = offers[0]
        self._require_within(limit, cheapest.usd)
        return self._bought(cheapest), [*lines, f"bought for ${cheapest.usd:,.2f}: {cheapest}"]

    def _require_within(self, limit: float | None, usd: float) -> None:
        if limit is None:
            what = f"null: a {self.name} is bought only within a limit"
            raise ConfigError.of("budget.max_usd", what, next="set one")
        if usd > limit:
            what = f"${limit:,.2f} is left for a {self.name}, but the cheapest costs ${usd:,.2f}"
            raise ConfigError.of("budget.max_usd", what, next="raise it, or use fewer nodes")

    def say_what_stays(self, say: Callable[[str], None]) -> None:
        """Reports that the purchased capacity is kept, because AWS does not refund it."""
        if self.held:
            say(f"kept {self.name} {self.held}")
            what = f"AWS does not cancel or refund a {self.name}"
            say(f"  {what}; make setup uses it again until it ends")

    def _newest(self) -> HeldCapacity | None:
        """Returns the usable purchase that ends last."""
        over = clock.now() + ENDS_EARLY * 3600
        usable = (held for held in self.owned() if held.ends > over)
        return max(usable, key=lambda held: held.ends, default=None)

    def _offers(self, hours: int) -> list[Offer]:
        """Returns the offers, cheapest first. At equal prices, the earliest start comes first."""
        return sorted(self.offered(hours), key=lambda offer: (offer.usd, offer.starts))

    def _left(self, rest: Bill | None) -> float | None:
        """Returns the US dollars that budget.max_usd leaves after all other costs. None means no
        limit.
        """
        limit = self.config.budget.max_usd
        if limit is None:
            return None
        if rest is None:
            what = f"${limit:,.2f}: the amount left for a {self.name} depends on an unknown price"
            raise ConfigError.of("budget.max_usd", what, next="run make plan to see which")
        return max(0.0, limit - rest.whole(self.config.fleet.nodes, self.hours))

    def _bought(self, offer: Offer) -> HeldCapacity:
        """Sends the purchase once, then polls until AWS lists it, even if the response was lost."""
        trouble: CloudError | None = None
        try:
            self.buy(offer)
        except CloudError as error:
            trouble = error
        until = clock.now() + SEEN_IN
        while not (held := self._newest()):
            if clock.now() > until:
                if trouble:
                    raise trouble
                why = f"AWS does not list {self.name} {offer.id} {SEEN_IN:.0f} s after its purchase"
                then = "run make setup, which checks again before it buys"
                raise BackendError("the purchase is not visible yet", why=why, next=then)
            clock.sleep(AGAIN)
        return held


class Blocks(PrepaidCapacity):
    """EC2 capacity blocks."""

    name = "capacity block"

    def using(self, id_: str | None) -> Config:
        """Returns the config with the block as its reservation."""
        fleet = self.config.fleet
        return replace(self.config, fleet=replace(fleet, aws=replace(fleet.aws, reservation=id_)))

    def by_list(self) -> float | None:
        return by_table().instance(self.config.fleet.instance_type or "").usd

    def offered(self, hours: int) -> Iterator[Offer]:
        fleet = self.config.fleet
        rows = self.calls.pages(
            "ec2",
            "DescribeCapacityBlockOfferings",
            "CapacityBlockOfferings",
            CapacityDurationHours=hours,
            EndDateRange=clock.utc() + AHEAD + timedelta(hours=hours),
            InstanceType=fleet.instance_type,
            InstanceCount=fleet.nodes,
        )
        zones = discovery.zones(self.config, self.calls)
        for row in rows:
            zone, usd = row["AvailabilityZone"], fee(row)
            if usd is not None and zone in zones:
                yield Offer(row["CapacityBlockOfferingId"], *_span(row, "Date"), usd, zone)

    def owned(self) -> Iterator[HeldCapacity]:
        for row in self.calls.pages("ec2", "DescribeCapacityReservations", "CapacityReservations"):
            tags = tags_of(row.get("Tags"))
            is_block = row.get("ReservationType") == "capacity-block" and row["State"] not in GONE
            if is_block and is_ours(tags, self.config.fleet_name):
                usd = fee({"UpfrontFee": tags.get(USD)})
                span = _span(row, "Date")
                yield HeldCapacity(row["CapacityReservationId"], row["State"], *span, usd)

    def buy(self, offer: Offer) -> None:
        own = own_tags(self.config.fleet_name) | {USD: f"{offer.usd:.2f}"}
        tags = [{"ResourceType": "capacity-reservation", "Tags": pairs(own)}]
        self.calls(
            "ec2",
            "PurchaseCapacityBlock",
            CapacityBlockOfferingId=offer.id,
            InstancePlatform="Linux/UNIX",
            TagSpecifications=tags,
        )


class TrainingPlans(PrepaidCapacity):
    """SageMaker flexible training plans."""

    name = "training plan"

    @property
    def named(self) -> str:
        """Returns the name prefix of this config's plans."""
        return f"trainfleet-{slug(self.config.fleet_name, MOST_NAME)}-"

    def using(self, id_: str | None) -> Config:
        """Returns the config with the plan assigned to its jobs."""
        fleet = self.config.fleet
        return replace(
            self.config, fleet=replace(fleet, sagemaker=replace(fleet.sagemaker, training_plan=id_))
        )

    def by_list(self) -> float | None:
        return by_table().training(self.config.fleet.instance_type or "", False).usd

    def offered(self, hours: int) -> Iterator[Offer]:
        fleet, now = self.config.fleet, clock.utc()
        answer = self.calls(
            "sagemaker",
            "SearchTrainingPlanOfferings",
            InstanceType=f"ml.{fleet.instance_type}",
            InstanceCount=fleet.nodes,
            DurationHours=hours,
            TargetResources=["training-job"],
            StartTimeAfter=now,
            EndTimeBefore=now + AHEAD + timedelta(hours=hours),
        )
        for row in answer["TrainingPlanOfferings"]:
            parts, usd = row.get("ReservedCapacityOfferings", ()), fee(row)
            if usd is None or len(parts) != 1:
                continue
            (part,) = parts
            if part["InstanceCount"] >= fleet.nodes and "StartTime" in part:
                zone = str(part.get("AvailabilityZone", ""))
                yield Offer(row["TrainingPlanOfferingId"], *_span(part, "Time"), usd, zone)

    def owned(self) -> Iterator[HeldCapacity]:
        for row in self.calls.pages("sagemaker", "ListTrainingPlans", "TrainingPlanSummaries"):
            arn, state = row["TrainingPlanArn"], row["Status"].lower()
            is_named = row["TrainingPlanName"].startswith(self.named) and "StartTime" in row
            if is_named and state not in GONE and is_ours(self._tags(arn), self.config.fleet_name):
                yield HeldCapacity(arn, state, *_span(row, "Time"), fee(row))

    def _tags(self, arn: str) -> dict[str, str]:
        return tags_of(self.calls("sagemaker", "ListTags", ResourceArn=arn).get("Tags"))

    def buy(self, offer: Offer) -> None:
        name = f"{self.named}{datetime.fromtimestamp(offer.starts, UTC):%Y%m%d%H%M}"
        own = pairs(own_tags(self.config.fleet_name))
        self.calls(
            "sagemaker",
            "CreateTrainingPlan",
            TrainingPlanName=name,
            TrainingPlanOfferingId=offer.id,
            Tags=own,
        )


def fee(row: Json) -> float | None:
    """Returns an offer's price in US dollars, or None if it has no price or another currency."""
    try:
        fee = float(row["UpfrontFee"])
    except (KeyError, TypeError, ValueError):
        return None
    return fee if row.get("CurrencyCode", "USD") == "USD" and 0 < fee < 1e9 else None


def whole_hours(hours: float) -> int:
    """Returns the hours of the shortest block that keeps its instances long enough: whole days up
    to 14, then whole weeks.

    Raises:
        ConfigError: AWS sells no block that long.
    """
    days = math.ceil((hours + ENDS_EARLY) / DAY)
    if days > DAYS:
        days = 7 * math.ceil(days / 7)
    if days > 7 * WEEKS:
        what = f"block: the longest lasts {7 * WEEKS} days, but this run needs {days}"
        raise ConfigError.of("fleet.aws.capacity", what, next="use more nodes")
    return max(1, days) * DAY


def _span(row: Json, word: str) -> tuple[float, float]:
    return row[f"Start{word}"].timestamp(), row[f"End{word}"].timestamp()


def _moment(time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC"
