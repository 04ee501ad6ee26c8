"""Buys capacity in advance: EC2's capacity blocks and SageMaker's training plans are found, priced
and bought once.

A block is found again by its tags. EC2's purchase has no client token, so it is sent once and never
repeated automatically (calls.py, ONCE). If its answer is lost, setup polls for the purchase until
it is seen, or setup ends.

A training plan is found again by its name's beginning and its tags. Its name says when it begins:
SageMaker takes a name once, so that one offer is not bought twice. Only offers in one piece are
taken, because a run would have to wait between two.

Sources: EC2 user guide, "Capacity Blocks for ML" (full days up to 14, then weeks up to 182 days;
instances are ended from 30 minutes before the end on); SageMaker developer guide, "Reserve training
plans for your training jobs"; botocore's models of EC2 and SageMaker, with the list of types; the
actions that a plan's purchase needs, AWS's policy AmazonSageMakerTrainingPlanCreateAccess.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from ..config import Config
from ..plan.estimate import Bill
from ..trust.errors import BackendError, CloudError, ConfigError, NotAsked
from . import clock, discovery
from .calls import Calls
from .prices import by_table
from .resource_types import is_ours, tags_of
from .template_inputs import own_tags, pairs, slug

DAY, DAYS, WEEKS = 24, 14, 26  # hours; full days up to here, and then full weeks
AHEAD = timedelta(weeks=8)  # how far ahead blocks are sold
SEEN_IN, AGAIN = 60.0, 5.0  # seconds until a purchase is seen
ENDS_EARLY = 0.5  # hours before a block's end when AWS begins to end its instances
USD = "trainfleet:usd"  # a block's tag with its price, which EC2 shows only before the purchase
GONE = (
    "expired",
    "cancelled",
    "failed",
    "payment-failed",
    "unsupported",
    "unavailable",
    "cancelling",
)
TO_BE_BOUGHT = "to be bought"  # the id of capacity that is priced but not held yet
PLAN_TYPES = (
    "p4d.24xlarge",
    "p4de.24xlarge",
    "p5.4xlarge",
    "p5.48xlarge",
    "p5e.48xlarge",
    "p5en.48xlarge",
    "p6-b200.48xlarge",
    "p6-b300.48xlarge",
    "trn1.32xlarge",
    "trn2.48xlarge",
)
MOST_NAME = 40  # characters of a config's name in a plan's, which has 64


@dataclass(frozen=True)
class Offer:
    """An offer: its id, when it begins and ends (Unix time), US dollars for all of it, and its
    zone.
    """

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
    """A purchase: its id (cr-...), state in lower case, when it begins and ends, and US dollars."""

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
    """A price that is paid once and in advance: US dollars for each node, None if unknown, and its
    purpose.
    """

    usd: float | None
    what: str

    def on(self, bill: Bill | None) -> Bill | None:
        """Returns the bill with this price; None if either is unknown."""
        return (
            None
            if bill is None or self.usd is None
            else replace(bill, paid=self.usd, paid_for=self.what)
        )


NOTHING = Paid(0.0, "")


class PrepaidCapacity:
    """Capacity for a config and a number of hours: the part that is held, its cost, and its
    purchase within the budget.

    Each kind defines its requests: `using` is the config whose jobs use the capacity with that id;
    `by_list`, the on-demand list price of one machine in US dollars an hour; `offered` and `owned`,
    the offers and the purchases; `buy` sends the purchase, once.
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
        """Returns the purchase that is still usable; None also if no account can be asked."""
        try:
            return self._newest()
        except NotAsked:
            return None

    def placed(self) -> Config:
        """Returns the config whose jobs use the held capacity."""
        return self.using(self.held.id if self.held else None)

    def paid_config(self) -> Config:
        """Returns the config to price: the hours of its machines are paid in advance, even before
        the purchase.
        """
        return self.using(self.held.id if self.held else TO_BE_BOUGHT)

    def paid(self) -> Paid:
        """Returns the price of the purchase, or of the cheapest offer; without any offer, the
        on-demand list price.
        """
        nodes = self.config.fleet.nodes
        if self.held and self.held.usd is not None:
            return Paid(self.held.usd / nodes, f"the {self.name} {self.held.id}")
        hours = whole_hours(self.hours)
        try:
            offers = [] if self.held else self._offers(hours)
        except CloudError:
            offers = []  # `make plan` works without an account too, and the purchase asks again
        if offers:
            return Paid(
                offers[0].usd / nodes,
                f"the cheapest {self.name} of {hours} h on offer; make setup buys it with YES=1",
            )
        each = self.by_list()
        return Paid(
            each and each * hours,
            f"a {self.name} of {hours} h at the on-demand list price; make setup shows the offers",
        )

    def obtain(self, may_buy: bool, rest: Bill | None) -> tuple[list[str], bool]:
        """Buys the capacity now if allowed. Returns lines to print, and whether it can be used now.
        `rest`: all other costs.

        Raises:
            ConfigError, BackendError: like `find_or_buy`.
        """
        self.held, lines = self.find_or_buy(self._left(rest), may_buy)
        if self.held is None:
            return lines, False
        if self.held.state == "active":
            return lines, True
        return [
            *lines,
            f"its machines are there from {_moment(self.held.starts)}\nnext: run make setup then",
        ], False

    def find_or_buy(
        self, limit: float | None, may_buy: bool
    ) -> tuple[HeldCapacity | None, list[str]]:
        """Buys the capacity now if allowed. Returns the purchase or None, and lines to print.

        `limit`: US dollars that budget.max_usd leaves for it; without one nothing is bought.

        Raises:
            ConfigError: it may be bought, but there is no limit or no offer within it.
            BackendError: AWS has no offer; or the purchase was not answered, and no purchase
                can be seen.
        """
        if held := self._newest():
            return held, [f"{self.name} {held}"]
        hours = whole_hours(self.hours)
        offers = self._offers(hours)
        if not offers:
            raise BackendError(
                f"no {self.name} is offered",
                why=f"for {hours} h",
                next="use fewer nodes, or try again later",
            )
        lines = [f"{self.name}s on offer, the cheapest first"]
        for offer in offers:
            fits = limit is None or offer.usd <= limit
            lines.append(f"  {offer}" + ("" if fits else "  more than budget.max_usd leaves"))
        if not may_buy:
            return None, [
                *lines,
                "next: make setup YES=1 buys the first that budget.max_usd allows; AWS gives no "
                "refund",
            ]
        if limit is None:
            raise ConfigError.of(
                "budget.max_usd",
                f"null: a {self.name} is bought only within a limit",
                next="write one",
            )
        cheapest = offers[0]
        if cheapest.usd > limit:
            what = (
                f"${limit:,.2f} is left for a {self.name}, but the cheapest costs "
                f"${cheapest.usd:,.2f}"
            )
            raise ConfigError.of("budget.max_usd", what, next="raise it, or use fewer nodes")
        return self._bought(cheapest), [*lines, f"bought for ${cheapest.usd:,.2f}: {cheapest}"]

    def say_what_stays(self, say: Callable[[str], None]) -> None:
        """Reports that the held capacity can't be given back."""
        if self.held:
            say(f"kept {self.name} {self.held}")
            say(
                f"  AWS does not cancel or refund a {self.name}; make setup uses it "
                "again until it ends"
            )

    def _newest(self) -> HeldCapacity | None:
        """Returns the usable purchase that ends last."""
        over = clock.now() + ENDS_EARLY * 3600
        return max(
            (held for held in self.owned() if held.ends > over),
            key=lambda held: held.ends,
            default=None,
        )

    def _offers(self, hours: int) -> list[Offer]:
        """Returns the offers, the cheapest first; at equal price, the one that begins first."""
        return sorted(self.offered(hours), key=lambda offer: (offer.usd, offer.starts))

    def _left(self, rest: Bill | None) -> float | None:
        """Returns what budget.max_usd leaves after all other costs of those hours; None without a
        limit.
        """
        limit = self.config.budget.max_usd
        if limit is None:
            return None
        if rest is None:
            what = f"${limit:,.2f}: the rest for a {self.name} is unknown: a price is unknown"
            raise ConfigError.of("budget.max_usd", what, next="run make plan to see which")
        return max(0.0, limit - rest.whole(self.config.fleet.nodes, self.hours))

    def _bought(self, offer: Offer) -> HeldCapacity:
        """Sends the purchase once, and then polls for it, also after a lost answer."""
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
                raise BackendError(
                    "the purchase is not visible yet",
                    why=why,
                    next="run make setup, which checks again before it buys",
                )
            clock.sleep(AGAIN)
        return held


class Blocks(PrepaidCapacity):
    """EC2's capacity blocks."""

    name = "capacity block"

    def using(self, id_: str | None) -> Config:
        """Returns the config with the block as its reservation."""
        fleet = self.config.fleet
        return replace(self.config, fleet=replace(fleet, aws=replace(fleet.aws, reservation=id_)))

    def by_list(self) -> float | None:
        return by_table().instance(self.config.fleet.instance_type or "").usd

    def offered(self, hours: int) -> Iterator[Offer]:
        wanted = {
            "InstanceType": self.config.fleet.instance_type,
            "InstanceCount": self.config.fleet.nodes,
        }
        until = _now() + AHEAD + timedelta(hours=hours)
        rows = self.calls.pages(
            "ec2",
            "DescribeCapacityBlockOfferings",
            "CapacityBlockOfferings",
            CapacityDurationHours=hours,
            EndDateRange=until,
            **wanted,
        )
        zones = discovery.zones(self.config, self.calls)
        for row in rows:
            zone, usd = row["AvailabilityZone"], fee(row)
            if usd is not None and zone in zones:
                starts, ends = row["StartDate"].timestamp(), row["EndDate"].timestamp()
                yield Offer(row["CapacityBlockOfferingId"], starts, ends, usd, zone)

    def owned(self) -> Iterator[HeldCapacity]:
        for row in self.calls.pages("ec2", "DescribeCapacityReservations", "CapacityReservations"):
            tags = tags_of(row.get("Tags"))
            is_block = row.get("ReservationType") == "capacity-block" and row["State"] not in GONE
            if is_block and is_ours(tags, self.config.fleet_name):
                starts, ends = row["StartDate"].timestamp(), row["EndDate"].timestamp()
                usd = fee({"UpfrontFee": tags.get(USD)})
                yield HeldCapacity(row["CapacityReservationId"], row["State"], starts, ends, usd)

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
    """SageMaker's flexible training plans."""

    name = "training plan"

    @property
    def named(self) -> str:
        """Returns the beginning of the names of this config's plans."""
        return f"trainfleet-{slug(self.config.fleet_name, MOST_NAME)}-"

    def using(self, id_: str | None) -> Config:
        """Returns the config with the plan as its jobs' plan."""
        fleet = self.config.fleet
        return replace(
            self.config, fleet=replace(fleet, sagemaker=replace(fleet.sagemaker, training_plan=id_))
        )

    def by_list(self) -> float | None:
        return by_table().training(self.config.fleet.instance_type or "", False).usd

    def offered(self, hours: int) -> Iterator[Offer]:
        fleet, now = self.config.fleet, _now()
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
            pieces, usd = row.get("ReservedCapacityOfferings", ()), fee(row)
            if (
                len(pieces) == 1
                and usd is not None
                and pieces[0]["InstanceCount"] >= fleet.nodes
                and "StartTime" in pieces[0]
            ):
                (piece,) = pieces
                starts, ends = piece["StartTime"].timestamp(), piece["EndTime"].timestamp()
                yield Offer(
                    row["TrainingPlanOfferingId"],
                    starts,
                    ends,
                    usd,
                    str(piece.get("AvailabilityZone", "")),
                )

    def owned(self) -> Iterator[HeldCapacity]:
        for row in self.calls.pages("sagemaker", "ListTrainingPlans", "TrainingPlanSummaries"):
            arn, state = row["TrainingPlanArn"], row["Status"].lower()
            is_named = (
                row["TrainingPlanName"].startswith(self.named)
                and state not in GONE
                and "StartTime" in row
            )
            if is_named and is_ours(self._tags(arn), self.config.fleet_name):
                yield HeldCapacity(
                    arn, state, row["StartTime"].timestamp(), row["EndTime"].timestamp(), fee(row)
                )

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


def fee(row: dict[str, Any]) -> float | None:
    """Returns an offer's price in US dollars; None if it has no price or another currency."""
    try:
        fee = float(row["UpfrontFee"])
    except (KeyError, TypeError, ValueError):
        return None
    return fee if row.get("CurrencyCode", "USD") == "USD" and 0 < fee < 1e9 else None


def whole_hours(hours: float) -> int:
    """Returns the length of the shortest block that lasts that many hours until its instances are
    ended: days up to 14, then weeks.

    Raises:
        ConfigError: AWS sells no block that long.
    """
    days = math.ceil((hours + ENDS_EARLY) / DAY)
    if days > DAYS:
        days = 7 * math.ceil(days / 7)
    if days > 7 * WEEKS:
        raise ConfigError.of(
            "fleet.aws.capacity",
            f"block: the longest lasts {7 * WEEKS} days, but this run needs {days}",
            next="more nodes",
        )
    return max(1, days) * DAY


def _now() -> datetime:
    return datetime.fromtimestamp(clock.now(), UTC)


def _moment(time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC"
