"""Accounts for a run's time: each second between a command's start and its end counts exactly once.

Events mark when ranks were launched, training began or an attempt failed, by the clocks of the
launcher and rank 0. Spans come from the metrics. Each metrics line reports the time since the
previous line, and how much of it went to checkpoints, validation and compilation. Time between
spans counts toward the activity at that moment. An event never counts as earlier than the event
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
}
ENDS = ("finished", "stopped")
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

    @classmethod
    def of(cls, line: Record, kept: bool) -> Span | None:
        """Returns a metrics line's span, or None if it contains no span, such as in runs before
        format 2.
        """
        if not isinstance(line.get("time"), (int, float)) or not isinstance(
            line.get("span"), (int, float)
        ):
            return None
        apart = {
            name: float(line.get(f"in_{name}") or 0.0)
            for name in ("checkpoint", "validate", "compile")
        }
        return cls(float(line["time"]), max(0.0, float(line["span"])), kept, **apart)

    def uses(self, seconds: float, step: float) -> Iterator[tuple[str, float]]:
        """Divides `seconds` among the activities. `step` is the usual step time, which does not
        count as compilation.
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
        yield "useful" if self.kept else "repeated", rest


def ledger(
    events: Sequence[Record], metrics: Iterable[Record], now: float | None = None
) -> dict[str, float]:
    """Returns the seconds per activity, which add up to the time from each command's start to its
    end. Returns {} if no command recorded its start.

    `now` (unix time) is set while the run is active. Time lost in a crash comes from `lost` events,
    because the crash's lines are removed from the metrics.
    """
    timed = [(line, span) for line in metrics if (span := Span.of(line, True))]
    spans = [span for _, span in timed]
    usual = median([_of_a_step(line, span) for line, span in timed if not span.compile] or [0.0])
    for event in events:
        spans += [
            span
            for line in event.get("spans", ())
            if event["event"] == "lost" and (span := Span.of(line, False))
        ]
    spent = dict.fromkeys(USES, 0.0)
    launches = _launches(events)
    for launch, follower in zip(launches, [*launches[1:], None], strict=False):
        until = float(follower[0]["started"]) if follower else math.inf
        mine = [span for span in spans if launch[0]["started"] <= span.time < until]
        _sweep(launch, mine, usual, None if follower else now, spent)
    return {use: round(seconds, 3) for use, seconds in spent.items() if seconds > 0}


def _of_a_step(line: Record, span: Span) -> float:
    """Returns the time of one step from a metrics line."""
    seconds = line.get("seconds")
    return min(float(seconds), span.seconds) if isinstance(seconds, (int, float)) else span.seconds


def _launches(events: Sequence[Record]) -> list[list[Record]]:
    """Returns the events of each command that recorded its start, beginning with `launched`."""
    launches: list[list[Record]] = []
    for event in events:
        if event["event"] == "launched":
            launches.append([])
        if launches:
            launches[-1].append(event)
    return [launch for launch in launches if "started" in launch[0]]


def _sweep(
    launch: Sequence[Record],
    spans: Sequence[Span],
    usual: float,
    now: float | None,
    spent: dict[str, float],
) -> None:
    """Adds one command's seconds to `spent`, event by event."""
    begin = float(launch[0]["started"])
    last = max((span.time for span in spans), default=begin)
    # A killed launcher does not record its end.
    end = max(now or 0.0, last, *(event["time"] for event in launch))
    ended = {event["event"] for event in launch} & {*ENDS}
    at, use, stepping = begin, "prepare", False
    moments: list[tuple[float, int, Record | Span]] = [
        (event["time"], 1, event) for event in launch
    ]
    moments += [(span.time, 0, span) for span in spans]
    for time, _, what in sorted(moments, key=lambda moment: moment[:2]):
        if isinstance(what, Span):
            from_ = max(at, time - what.seconds)
            work = "useful" if what.kept else "repeated"
            # Any gap between consecutive spans comes from rounding.
            spent[work if stepping else use] += max(0.0, from_ - at)
            for name, seconds in what.uses(max(0.0, time - from_), usual):
                spent[name] += seconds
            use = "checkpoint" if ended and time >= last else "down"
        elif what["event"] in AFTER or what["event"] in ENDS:
            spent[use] += max(0.0, time - at)
            use = AFTER.get(what["event"], "checkpoint")
        else:
            continue
        at, stepping = max(at, time), isinstance(what, Span)
    spent["useful" if now is not None and stepping else use] += max(0.0, end - at)


def goodput(spent: dict[str, float]) -> float | None:
    """Returns the fraction of the total time that was spent on kept steps, or None if no time was
    recorded.
    """
    total = sum(spent.values())
    return round(spent.get("useful", 0.0) / total, 4) if total else None
