"""What a run has cost, and whether that is all that it may: by the list price of its nodes, from its events alone.

So no launcher's death loses a cent of it, and whoever looks reckons the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from ..config import Config
from ..errors import ConfigError, Problem
from ..runs import Record, Run

LOOK_EVERY = 5.0  # seconds


class Budget:
    """The money of one run. What has no price is not counted: with a limit, such a fleet is refused (plan/plan.py)."""

    def __init__(self, run: Run, config: Config, price: float | None) -> None:
        """`price`: US dollars for an hour of a node."""
        self.run, self.limit, self.price = run, config.budget.max_usd, price or 0.0
        self.looked = 0.0

    def spent(self, now: float | None = None) -> float:
        """US dollars; `now` (unix time) where a launch is under way."""
        return self.price * node_hours(self.run.read_events(), now)

    def is_spent(self) -> bool:
        """Whether a run that is under way has cost its limit. Looks once in LOOK_EVERY seconds."""
        if self.limit is None or not self.price or time.monotonic() - self.looked < LOOK_EVERY:
            return False
        self.looked = time.monotonic()
        return self.spent(time.time()) >= self.limit

    def require(self) -> None:
        """ConfigError when nothing is left to begin with."""
        if self.limit is not None and (spent := self.spent()) >= self.limit:
            message = f"{self.run.name} has cost ${spent:,.2f} already, its limit is ${self.limit:,.2f}"
            raise ConfigError([Problem(0, "", "budget.max_usd", message)], next="raise it to train on; make report shows the run")


def node_hours(events: Iterable[Record], now: float | None = None) -> float:
    """The hours of all nodes in a run's launches: each from its `launched` event to its last, or to `now`.

    What a job waits in an engine's queue costs nothing: from `queued` to `running` no node is ours.
    """
    hours, nodes, since, waits = 0.0, 0, 0.0, False
    for event in events:
        if event["event"] != "launched" and not waits:
            hours += nodes * (event["time"] - since) / 3600
        nodes, since = event.get("nodes", nodes), event["time"]
        waits = _waits(event, waits)
    return hours if now is None or waits else hours + nodes * max(0.0, now - since) / 3600


def _waits(event: Record, waits: bool) -> bool:
    """Whether the job waits in a queue after this event, as it did before it or not. Machines that start are ours already."""
    return (
        event.get("phase") == "queued" if event["event"] == "queued" else waits and event["event"] not in ("running", "launched")
    )
