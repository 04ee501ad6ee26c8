"""Accounts for a run's time: each second between a command's start and its end counts exactly once.

Events mark when ranks were launched, training began or an attempt failed, according to the
launcher's and rank 0's clocks. Spans come from the metrics. Each metrics line reports the time
since the previous line, and how much of it went to checkpoints, validation and compilation. Time
between spans counts toward the current activity. An event never counts as earlier than the event
before it, so the sum stays exact even if clocks disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

USES = (
    "useful",
    "repeated",
    "validate",
    "checkpoint",
    "compile",
    "prepare",
    "queue",
    "start",
    "down",
)
AFTER = {  # activity from this event until the next one
    "launched": "start",
    "queued": "queue",
    "running": "start",
    "began": "start",
    "restarted": "start",
    "fault": "down",
    "verdict": "down",
    "notice": "checkpoint",
    "finished": "checkpoint",
    "stopped": "checkpoint",
}
ENDS = {"finished", "stopped"}
Record = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """A stretch of training that ended at `time` (unix), with the seconds spent on other
    activities. `kept` is False if a crash discarded its steps.
    """

    time: float
    seconds: float
    kept: bool
    checkpoint: float = 0.0
    validate: float = 0.0
    compile: float = 0.0
    step: float = 0.0  # time of one step

    @classmethod
    def of(cls, line: Record, kept: bool) -> Span | None:
        """Returns a metrics line's span, or None if it has no span, as in runs before format 2."""
        if not isinstance(line.get("time"), (int, float)) or not isinstance(
            line.get("span"), (int, float)
        ):
            return None
        apart = {
            name: float(line.get(f"in_{name}") or 0.0)
            for name in ("checkpoint", "validate", "compile")
        }
        whole, step = max(0.0, float(line["span"])), line.get("seconds")
        step = min(float(step), whole) if isinstance(step, (int, float)) else whole
        return cls(float(line["time"]), whole, kept, **apart, step=step)

    @property
    def work(self) -> str:
        return "useful" if self.kept else "repeated"

    def uses(self, seconds: float, step: float) -> Iterator[tuple[str, float]]:
        """Divides `seconds` among the activities. `step` is the usual step time, which is
        subtracted from the compilation time.
        """
        rest = seconds
        for name, wanted in (
            ("checkpoint", self.checkpoint),
            ("validate", self.validate),
            ("compile", self.compile - step),
        ):
            spent = min(max(0.0, wanted), rest)
            rest -= spent
            yield name, spent
        yield self.work, rest

    def spend(self, at: float, before: str, step: float, spent: dict[str, float]) -> None:
        """Adds the span's seconds to `spent`. The gap between `at` and the span counts toward the
        activity `before`.
        """
        begin = max(at, self.time - self.seconds)
        spent[before] += max(0.0, begin - at)
        for name, seconds in self.uses(max(0.0, self.time - begin), step):
            spent[name] += seconds


def ledger(
    events: Sequence[Record], metrics: Iterable[Record], now: float | None = None
) -> dict[str, float]:
    """Returns the seconds per activity, which add up to the time from each command's start to its
    end. Returns {} if no command recorded its start.

    `now` (unix time) is set while the run is active. Time lost in a crash comes from `lost` events,
    because the metrics no longer contain the lost steps.
    """
    lines = [(line, True) for line in metrics]
    for event in events:
        lost = event["event"] == "lost"
        lines += [(line, False) for line in event.get("spans", ()) if lost]
    spans = [span for line, kept in lines if (span := Span.of(line, kept))]
    usual = median([span.step for span in spans if span.kept and not span.compile] or [0.0])
    spent = dict.fromkeys(USES, 0.0)
    for launch, until in _launches(events):
        mine = [span for span in spans if launch[0]["started"] <= span.time < until]
        _sweep(launch, mine, usual, now if until == math.inf else None, spent)
    return {use: round(seconds, 3) for use, seconds in spent.items() if seconds > 0}


def _launches(events: Sequence[Record]) -> Iterator[tuple[list[Record], float]]:
    """Yields the events of each command that recorded its start, beginning with `launched`, and the
    start of the next command.
    """
    launches: list[list[Record]] = []
    for event in events:
        if event["event"] == "launched":
            launches.append([])
        if launches:
            launches[-1].append(event)
    begun = [launch for launch in launches if "started" in launch[0]]
    starts = [float(launch[0]["started"]) for launch in begun]
    yield from zip(begun, [*starts[1:], math.inf], strict=False)


def _time(moment: Record | Span) -> float:
    return moment.time if isinstance(moment, Span) else float(moment["time"])


def _sweep(
    launch: Sequence[Record],
    spans: Sequence[Span],
    usual: float,
    now: float | None,
    spent: dict[str, float],
) -> None:
    """Adds one command's seconds to `spent`, event by event."""
    at, use, stepping = float(launch[0]["started"]), "prepare", False
    last = max(map(_time, spans), default=at)
    ended = ENDS & {event["event"] for event in launch}
    moments: list[Record | Span] = [*spans, *launch]
    for moment in sorted(moments, key=_time):  # a span sorts before an event with the same time
        time = _time(moment)
        if isinstance(moment, Span):
            # Any gap between consecutive spans comes from rounding.
            moment.spend(at, moment.work if stepping else use, usual, spent)
            use = "checkpoint" if ended and time >= last else "down"
        elif moment["event"] in AFTER:
            spent[use] += max(0.0, time - at)
            use = AFTER[moment["event"]]
        else:
            continue
        at, stepping = max(at, time), isinstance(moment, Span)
    # A killed launcher does not record its end.
    end = max(now or 0.0, last, *map(_time, launch))
    spent["useful" if now is not None and stepping else use] += max(0.0, end - at)


def goodput(spent: dict[str, float]) -> float | None:
    """Returns the fraction of the total time that was spent on kept steps, or None if no time was
    recorded.
    """
    total = sum(spent.values())
    return round(spent.get("useful", 0.0) / total, 4) if total else None
