"""Tracks a run's cost against its budget. The cost is computed from the run's events as hours times
prices.

Because the total is derived only from events, it survives the death of a launcher, and every reader
gets the same result. For fleets that create machines, plan/estimate.py provides the prices: a setup
estimate, plus an hourly rate for nodes and for other resources. Between launches, nodes are charged
until fleet.idle_minutes removes them. Other resources are also charged while the job is queued. A
run is stopped early enough for its budget to cover its nodes until they are removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ..config import Config
from ..plan.estimate import Bill
from ..run.run_folder import Record, Run
from ..trust.errors import ConfigError

LOOK_EVERY = 5.0  # seconds between checks
# Events that mark the end of queueing. Ranks record `began` even without a launcher.
RUNS = ("running", "launched", "began")
NEAR = 0.8  # fraction of the limit at which to warn the user


class Budget:
    """Cost and limit of one run. Fleets that aren't billed cost nothing, so plan/plan.py rejects a
    budget limit for them.
    """

    def __init__(
        self, run: Run, config: Config, bill: Bill | None, clock: Callable[[], float] | None = None
    ) -> None:
        self.run = run
        self.limit = config.budget.max_usd
        self.bill = bill or Bill(0.0)
        self.nodes = config.fleet.nodes
        self.clock = clock or (lambda: time.time())
        self.looked = 0.0
        self.warned = False

    @property
    def reserve(self) -> float:
        """Returns the nodes' cost from the end of training until their removal, in US dollars."""
        return self.bill.idle(self.nodes)

    def spent(self, now: float | None = None, under_way: bool = True) -> float:
        """Returns the cost since setup, in US dollars, up to `now` (unix time). `under_way` means
        that a launch is active.
        """
        events, lingers = self.run.read_events(), self.bill.lingers
        if not any(event["event"] == "launched" for event in events):
            return 0.0
        # Resources other than nodes also cost money while the job is queued.
        alone = [event | {"nodes": 1} if "nodes" in event else event for event in events]
        beside = [event for event in alone if event["event"] != "queued"]
        return (
            self.bill.uncounted(self.nodes)
            + self.bill.node * node_hours(events, now, lingers, under_way)
            + self.bill.rest * node_hours(beside, now, lingers, under_way)
        )

    def words(self) -> str:
        """Returns the user-facing reason for stopping the run."""
        if not self.reserve:
            return f"the run has reached its budget.max_usd of ${self.limit:,.2f}"
        rest = f"${self.reserve:,.2f} of its budget.max_usd ${self.limit:,.2f} are left"
        return f"{rest} to pay for its nodes until they are removed"

    def is_spent(self, say: Callable[[str], None] = lambda words: None) -> bool:
        """Returns whether an active run has reached its limit. Warns once when the limit is near.
        Checks at most every LOOK_EVERY seconds.
        """
        now = self.clock()
        if self.limit is None or self.bill.is_free or 0 <= now - self.looked < LOOK_EVERY:
            return False
        self.looked, spent = now, self.spent(now) + self.reserve
        if NEAR * self.limit <= spent < self.limit and not self.warned:
            self.warned = True
            until = " (including its nodes until they are removed)" if self.reserve else ""
            say(
                f"the run has cost ${spent:,.2f}{until}, {spent / self.limit:.0%} of its "
                f"budget.max_usd ${self.limit:,.2f}"
            )
        return spent >= self.limit

    def require(self) -> None:
        """Raises ConfigError if no budget is left for another launch."""
        if self.limit is None:
            return
        if (
            spent := self.spent(self.clock(), under_way=False)
        ) and spent + self.reserve >= self.limit:
            until = (
                f", and its nodes will cost ${self.reserve:,.2f} until they are removed"
                if self.reserve
                else ""
            )
            message = (
                f"{self.run.name} has cost ${spent:,.2f} already{until}; its limit is "
                f"${self.limit:,.2f}"
            )
            raise ConfigError.of("budget.max_usd", message, next="raise budget.max_usd to continue")


def node_hours(
    events: Iterable[Record], now: float | None = None, lingers: float = 0.0, under_way: bool = True
) -> float:
    """Returns the total node-hours of a run's launches. Each launch counts from its `launched`
    event to its last event, or to `now` if it is still active.

    Idle nodes count for at most `lingers` hours after a launch. Queue time is free, because the run
    has no nodes between `queued` and `running`.
    """
    hours, nodes, since, waits = 0.0, 0, 0.0, False
    for event in events:
        passed = (event["time"] - since) / 3600
        if event["event"] == "launched":
            hours += nodes * min(max(0.0, passed), lingers)
        elif not waits:
            hours += nodes * passed
        nodes, since = event.get("nodes", nodes), event["time"]
        waits = _waits(event, waits)
    if now is None or waits:
        return hours
    passed = max(0.0, now - since) / 3600
    return hours + nodes * (passed if under_way else min(passed, lingers))


def _waits(event: Record, waits: bool) -> bool:
    """Returns whether the job is queued after this event. `waits` is whether it was queued before.
    The starting phase does not count, because machines cost money while they start.
    """
    if event["event"] == "queued":
        return bool(event.get("phase") == "queued")
    return waits and event["event"] not in RUNS
