"""The machines of AWS Batch and SageMaker: a stack for all that they need in the account and the config does not name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from ..cloud import changeset, outlook, spending
from ..cloud.engine_fleet import EngineFleet
from ..cloud.prices import Prices, by_table, in_region
from ..cloud.stages import Times
from ..config import Config
from ..errors import CloudError
from ..plan.request import Artifact
from .bodies import Body
from .ec2_machines import Stacked

Costs = tuple[Callable[[Config, Prices], Iterator[spending.Row]], Callable[[Config], Times]]
# In a body, in the place of what the stack has made.
OUTPUTS = {"${JobRole}": "JobRole", "${ExecutionRole}": "ExecutionRole", "${LogGroup}": "LogGroup"}
JOB_ROLE, EXECUTION_ROLE, LOG_GROUP = OUTPUTS


def filled(cloud: EngineFleet, body: Body) -> Body:
    """A body in which the stack's placeholders are replaced by what it has made; CloudError where there is none."""
    text = json.dumps(body)
    wanted = [name for name in OUTPUTS if name in text]
    found = cloud.outputs() if wanted else {}
    for name in wanted:
        text = text.replace(name, found[OUTPUTS[name]])
    filled: Body = json.loads(text)
    return filled


def priced(rows: list[spending.Row], times: Times, nodes: int, prices: Prices, hours: float | None) -> Iterator[str]:
    """Both tables of what an engine's machines cost: by the hour, and from set-up to teardown."""
    yield from ("dollars an hour, while a job runs", *spending.describe(rows, hours))
    if prices.trouble:
        yield f"  the Pricing API was not of use: {prices.trouble}"
    yield from spending.describe_whole(spending.bill(rows, times, nodes), nodes, hours)


class Engine(Stacked):
    """Machines (base.py) of an engine, which makes them for each job itself.

    `needed`: the config leaves something to a stack. `on_ec2`: they are instances of the account. `costs`: what an hour of a job
    costs by these prices, and the stages around it. `notes`: more lines of a plan.
    """

    def __init__(
        self, config: Config, engine: str, needed: bool, on_ec2: bool, costs: Costs, notes: Callable[[], list[str]] = lambda: []
    ) -> None:
        self.own = EngineFleet(config, engine, on_ec2)
        super().__init__(self.own)
        self.config, self.needed, self.costs, self.notes = config, needed, costs, notes

    def changes(self) -> tuple[Artifact, ...]:
        return super().changes() if self.needed else ()

    def is_there(self) -> bool:
        """Whether the stack is ready for jobs; without credentials it is not."""
        try:
            return not self.needed or bool(self.own.outputs())
        except CloudError:
            return False

    def prospect(self, hours: float | None) -> tuple[list[str], tuple[Artifact, ...]]:
        """What `make setup` would change, in words and as the very requests; what AWS refuses to tell is said, and no more.

        `hours`: of the run; None if unknown.
        """
        prices, account = in_region(self.config), ["account: queue and roles are yours, so setup makes nothing"]
        changes: tuple[Artifact, ...] = ()
        try:
            if self.needed:
                found, changes = self.foreseen, self.changes()
                account = [f"stack {self.cloud.stack.name}", *changeset.describe(found.changes, not found.before)]
                if found.unasked:
                    prices, account = by_table(), [*account, "", *outlook.account(self.config, self.own.calls, found)]
        except CloudError as error:
            prices, account = by_table(), [f"account: not looked at, as {error.what}"]
        return [*self.notes(), "", *self._costs(prices, hours), "", *account], changes

    def _costs(self, prices: Prices, hours: float | None) -> Iterator[str]:
        costs, times = self.costs
        yield from priced(list(costs(self.config, prices)), times(self.config), self.config.fleet.nodes, prices, hours)

    def apply(self) -> int:
        if self.needed:
            self.make()
            print("ready; machines come with a job, and go with it")
        else:
            print("nothing needs setting up: queue and roles are yours")
        print("next: make push, then make train" if self.config.fleet.image == "build" else "next: make train")
        return 0
