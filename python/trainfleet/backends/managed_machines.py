"""Machines of AWS Batch and SageMaker: a stack that provides the account resources missing from the
config.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from ..cloud import cloudformation, plan_text, spending
from ..cloud.capacity import NOTHING, Paid, PrepaidCapacity
from ..cloud.prices import Prices, by_table, in_region
from ..cloud.scheduler_template import SchedulerStack
from ..config import Config
from ..plan.job import Artifact
from ..trust.errors import CloudError
from .base import Prospect
from .ec2_machines import Stacked, say
from .request_json import Body

Costs = Callable[[Config, Prices], spending.Spending]
# Placeholder in a request body → stack output that replaces it.
OUTPUTS = {"${JobRole}": "JobRole", "${ExecutionRole}": "ExecutionRole", "${LogGroup}": "LogGroup"}
JOB_ROLE, EXECUTION_ROLE, LOG_GROUP = OUTPUTS


def filled(cloud: SchedulerStack, body: Body) -> Body:
    """Replaces the placeholders in a request body with stack outputs. Raises CloudError if they are
    needed but the stack does not exist.
    """
    text = json.dumps(body)
    wanted = [name for name in OUTPUTS if name in text]
    found = cloud.outputs() if wanted else {}
    for name in wanted:
        text = text.replace(name, found[OUTPUTS[name]])
    filled: Body = json.loads(text)
    return filled


def priced(
    costs: spending.Spending, nodes: int, prices: Prices, hours: float | None, paid: Paid = NOTHING
) -> Iterator[str]:
    """Yields a service's two cost tables: per hour, and from setup to teardown."""
    yield from ("dollars an hour, while a job runs", *spending.describe(costs.rows, hours))
    if prices.trouble:
        yield f"  the Pricing API is unavailable: {prices.trouble}"
    yield from spending.describe_whole(paid.on(costs.bill(nodes)), nodes, hours)


class ManagedMachines(Stacked):
    """Machines (base.py) that a managed service starts for each job.

    `needed` is true if a stack must provide resources that the config does not name. `costs`
    returns a job's cost at given prices. `notes` returns extra lines for the plan. `ahead` is
    prepaid capacity.
    """

    def __init__(
        self,
        config: Config,
        engine: str,
        needed: bool,
        costs: Costs,
        notes: Callable[[], list[str]] = lambda: [],
        ahead: PrepaidCapacity | None = None,
    ) -> None:
        self.own = SchedulerStack(config, engine)
        super().__init__(self.own)
        self.config, self.needed, self.costs, self.notes, self.ahead = (
            config,
            needed,
            costs,
            notes,
            ahead,
        )

    def changes(self) -> tuple[Artifact, ...]:
        return super().changes() if self.needed else ()

    def is_there(self) -> bool:
        """Returns whether the stack is ready for jobs. False without credentials."""
        try:
            return not self.needed or bool(self.own.outputs())
        except CloudError:
            return False

    def prospect(self, hours: float | None, speed: float | None) -> Prospect:
        """Returns the plan's lines. If AWS denies a request, the account section reports only that
        error.
        """
        prices, account = (
            in_region(self.config),
            ["account: you provide the queue and roles, so setup creates nothing"],
        )
        changes: tuple[Artifact, ...] = ()
        try:
            if self.needed:
                found, changes = self.foreseen, self.changes()
                account = [
                    f"stack {self.cloud.stack.name}",
                    *cloudformation.describe(found.changes, not found.before),
                    "",
                    *plan_text.account(self.config, self.own.calls, found.inputs, found.unasked),
                ]
                prices = by_table() if found.unasked else prices
        except CloudError as error:
            prices, account = by_table(), [f"account: not checked: {error.what}"]
        lines = (*self.notes(), "", *self._costs(prices, hours), "", *account)
        return Prospect(lines, changes, awaited=not self.is_there(), exact=True)

    def _costs(self, prices: Prices, hours: float | None) -> Iterator[str]:
        config, paid = self.config, NOTHING
        if self.ahead:
            config, paid = self.ahead.paid_config(), self.ahead.paid()
        yield from priced(self.costs(config, prices), config.fleet.nodes, prices, hours, paid)

    def remove(self, purge: bool) -> None:
        super().remove(purge)
        if self.ahead:
            self.ahead.say_what_stays(say)

    def apply(self) -> int:
        if self.needed:
            self.make()
            print("ready; each job starts and stops its machines")
        else:
            print("nothing to set up: you provide the queue and roles")
        print(
            "next: run make push, then make train"
            if self.config.fleet.container == "build"
            else "next: make train"
        )
        return 0
