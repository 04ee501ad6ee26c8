"""What a run has cost so far, and whether its budget is spent: node hours times their price, from the run's events alone.

As only events count, no cent is lost when a launcher dies, and every reader gets the same sum. Where machines are made for the
run, a node's hour includes its share of all that is made with them (cloud/spending.py), and they are paid for between launches
too, until they stop by themselves (fleet.idle_minutes).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ..config import Config
from ..errors import ConfigError
from ..runs import Record, Run

LOOK_EVERY = 5.0  # seconds
RUNS = ("running", "launched", "began")  # events that end a wait in the queue; ranks record `began` also without a launcher
NEAR = 0.8  # of the limit: the user is warned from here on


class Budget:
    """The money of one run. Without a price nothing is counted: with a limit, such a fleet is refused (plan/plan.py)."""

    def __init__(
        self, run: Run, config: Config, price: float | None, lingers: float = 0.0, clock: Callable[[], float] | None = None
    ) -> None:
        """`price`: US dollars an hour of a node; `lingers`: hours for which nodes are paid after a launch has ended."""
        self.run, self.limit, self.price = run, config.budget.max_usd, price or 0.0
        self.lingers, self.clock = lingers, clock or (lambda: time.time())
        self.looked, self.warned = 0.0, False

    def spent(self, now: float | None = None) -> float:
        """US dollars; `now` (unix time) where a launch is under way."""
        return self.price * node_hours(self.run.read_events(), now, self.lingers)

    def is_spent(self, say: Callable[[str], None] = lambda words: None) -> bool:
        """Whether a run that is under way has reached its limit. Warns once when it is near; looks every LOOK_EVERY seconds."""
        now = self.clock()
        if self.limit is None or not self.price or 0 <= now - self.looked < LOOK_EVERY:
            return False
        self.looked, spent = now, self.spent(now)
        if NEAR * self.limit <= spent < self.limit and not self.warned:
            self.warned = True
            say(f"the run has cost ${spent:,.2f}, {spent / self.limit:.0%} of its budget.max_usd ${self.limit:,.2f}")
        return spent >= self.limit

    def require(self) -> None:
        """ConfigError when the budget is spent before the launch."""
        if self.limit is None:
            return
        idle = node_hours(self.run.read_events(), self.clock(), self.lingers, under_way=False)
        if (spent := self.price * idle) >= self.limit:
            message = f"{self.run.name} has cost ${spent:,.2f} already, its limit is ${self.limit:,.2f}"
            raise ConfigError.of("budget.max_usd", message, next="raise it to train on; make report shows the run")


def node_hours(events: Iterable[Record], now: float | None = None, lingers: float = 0.0, under_way: bool = True) -> float:
    """The hours of all nodes in a run's launches: each from its `launched` event to its last, or to `now` where it is under way.

    Between launches, and from the last to `now` where none is under way, nodes count for `lingers` hours at most. What a job
    waits in an engine's queue costs nothing: from `queued` to `running` no node is ours.
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
    """Whether the job waits in a queue after this event, as it did before it or not. Machines that start are ours already."""
    if event["event"] == "queued":
        return bool(event.get("phase") == "queued")
    return waits and event["event"] not in RUNS
