"""A config's capacity that is bought ahead: what of it is held, what it costs, and its purchase within the budget."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..config import Config
from ..plan.bill import Bill
from ..trust.errors import CloudError, ConfigError, NotAsked
from . import capacity_blocks
from .capacity_blocks import HeldCapacity, Seller, moment, newest, whole_hours


@dataclass(frozen=True)
class Paid:
    """What is paid ahead, once: US dollars for each node, None if unknown, and what for."""

    usd: float | None
    what: str

    def on(self, bill: Bill | None) -> Bill | None:
        """The bill with it; None where one of the two is unknown."""
        return None if bill is None or self.usd is None else replace(bill, paid=self.usd, paid_for=self.what)


NOTHING = Paid(0.0, "")


class Ahead:
    """What a seller has for a config and so many hours."""

    def __init__(self, config: Config, seller: Seller, hours: float) -> None:
        self.config, self.seller, self.hours = config, seller, hours

    @functools.cached_property
    def held(self) -> HeldCapacity | None:
        """What was bought and is of use yet; None also where no account can be asked."""
        try:
            return newest(self.seller)
        except NotAsked:
            return None

    def placed(self) -> Config:
        """The config whose jobs use what is held."""
        return self.seller.placed(self.config, self.held)

    def paid_config(self) -> Config:
        """The config as it is priced: its machines by the hour are in what is paid ahead, also where that is not bought yet."""
        return self.seller.placed(self.config, self.held or HeldCapacity("to be bought", "", 0.0, 0.0))

    def paid(self) -> Paid:
        """The price: of what is held, or else of the cheapest offer; where nothing is known of offers, on-demand by the list."""
        nodes, name = self.config.fleet.nodes, self.seller.name
        if self.held and self.held.usd is not None:
            return Paid(self.held.usd / nodes, f"the {name} {self.held.id}")
        hours = whole_hours(self.hours)
        try:
            offers = [] if self.held else self.seller.offers(hours)
        except CloudError:
            offers = []  # a plan is made without an account too, and the purchase asks again
        if offers:
            return Paid(offers[0].usd / nodes, f"the cheapest {name} of {hours} h on offer; make setup buys it with YES=1")
        each = self.seller.by_list()
        return Paid(each and each * hours, f"a {name} of {hours} h at the on-demand list price; make setup shows the offers")

    def obtain(self, may_buy: bool, rest: Bill | None) -> tuple[list[str], bool]:
        """What there is, bought now if that may be, in lines for people; and whether it can be used now. `rest`: all other costs.

        Raises:
            ConfigError, BackendError: as capacity.obtain.
        """
        held, lines = capacity_blocks.obtain(self.seller, self.hours, self._left(rest), may_buy)
        self.held = held
        if held is None:
            return lines, False
        if held.is_on:
            return lines, True
        return [*lines, f"its machines are there from {moment(held.starts)} on\nnext: make setup then"], False

    def _left(self, rest: Bill | None) -> float | None:
        """What budget.max_usd leaves beside all else that is paid for in those hours; None without a limit."""
        limit = self.config.budget.max_usd
        if limit is None:
            return None
        if rest is None:
            what = f"${limit:,.2f}: what it leaves for a {self.seller.name} is unknown, as a price is"
            raise ConfigError.of("budget.max_usd", what, next="make plan shows which")
        return max(0.0, limit - rest.whole(self.config.fleet.nodes, self.hours))

    def say_what_stays(self, say: Callable[[str], None]) -> None:
        """Says that what is held can't be given back."""
        if self.held:
            say(f"kept {self.seller.name} {self.held}")
            say(f"  AWS cancels and refunds no {self.seller.name}: it is paid, and make setup uses it again until it ends")
