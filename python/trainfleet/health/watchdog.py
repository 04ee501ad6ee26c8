"""Watchdog that uses heartbeats to detect whether the ranks make progress, and which rank is to
blame if they don't.

It is pure, except for reading files.

A rank is silent if its heartbeat is stale while no rank completes a step, so its process or node
must be stopped or dead. The ranks are stuck if all of them are alive but make no progress; their
stacks may then reveal the odd one out. Time limits depend on the phase and on the run's step times.
A stale file is not enough for an alarm, because a shared file system may stall for a minute during
training.

A poll costs O(ranks), and next to nothing for ranks without a new heartbeat
(tests/bench/bench_fleet.py). The watchdog runs wherever the run folder is readable: in the
launcher, or on node 0 of a job that no launcher can see.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from statistics import median

from . import fence, tcp_stats
from .heartbeat import EVERY, Stacks, ask, odd_one
from .heartbeat_format import Beat, Beats, stage

STEPS_KEPT = 256  # number of recent steps to keep; their median is the usual step time
SLOWER = 1.5  # a rank is a straggler above this multiple of the other ranks' own work time
SLOW_SHARE = 0.2  # minimum share of the step time by which a straggler exceeds the other ranks
SLOW_LOOKS = 30  # consecutive slow heartbeats before a rank counts as a straggler
# Minimum number of distinct readings among those heartbeats. A reading is a mean that stays the
# same until the next step is logged.
SLOW_READINGS = 3
# The run counts as slow if the median of its last RECENT step times is more than ITSELF times the
# fastest one.
RECENT = 32
ITSELF = 1.5
BUSY_SHARE = 0.2  # maximum fraction of time spent reading heartbeats
HEARD, MOVED = attrgetter("heard"), attrgetter("moved")


@dataclass(frozen=True)
class Limits:
    """Seconds until an alarm, by phase.

    The limit for a step also depends on observed step times.
    """

    silent: float = 8.0  # no heartbeat from a rank while the others wait for it in a step
    # No heartbeat from a rank that is starting, loading, compiling or writing a checkpoint.
    silent_elsewhere: float = 60.0
    # If all ranks fall silent at once, the file system is the more likely cause.
    silent_together: float = 120.0
    start: float = 600.0  # until the first heartbeat, including imports from a cold file system
    load: float = 1800.0
    compile: float = 7200.0  # the first step; neuronx-cc takes this long for large models
    validate: float = 1800.0
    checkpoint: float = 1800.0
    # After the last step, rank 0 loads and writes a sample and closes the loggers.
    conclude: float = 1800.0
    end: float = 30.0  # from the last rank's final heartbeat until its torchrun exits
    step: float = 10.0  # minimum limit for a step
    steps: float = 10.0  # limit as a multiple of the usual step time, if that is above the minimum

    def later(self, seconds: float, wait: float = 0.0) -> Limits:
        """Returns the limits for a watcher that sees the ranks' state with a delay of `seconds`.

        The nodes wait `wait` seconds for each other. Their barrier names a missing node.
        """
        return replace(
            self,
            start=self.start + wait,
            silent=self.silent + seconds,
            silent_elsewhere=self.silent_elsewhere + seconds,
            silent_together=self.silent_together + 10 * seconds,
        )

    def of(self, phase: str, usual_step: float | None) -> float:
        if phase == "step":
            return self.compile if usual_step is None else max(self.step, self.steps * usual_step)
        return float(getattr(self, phase))


@dataclass(frozen=True)
class Alarm:
    """Reason for ending an attempt, and the rank and node to blame if known."""

    words: str
    rank: int | None = None
    node: int | None = None


@dataclass(slots=True)
class Seen:
    """State of one rank.

    `heard` and `moved` are when the rank's heartbeat and position last changed, by the watchdog's
    clock.
    """

    beat: Beat
    heard: float
    moved: float
    slow: int = 0
    readings: float = 0
    read: float = 0.0  # latest reading of the rank's own work time


@dataclass
class Watchdog:
    """Watchdog for one attempt of `ranks` ranks.

    `began` and every `now` are seconds on the same clock.
    """

    ranks: int
    began: float
    limits: Limits = field(default_factory=Limits)
    seen: dict[int, Seen] = field(default_factory=dict)
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    latest: Seen | None = None  # rank with the most recent progress
    looked: float = 0.0
    usual_step: float | None = None  # median of the observed step times; None before the first step
    best: float = float("inf")  # lowest value of usual_step so far

    def look(self, beats: Mapping[int, Beat], now: float) -> Alarm | None:
        """Processes the ranks' latest heartbeats and returns an alarm if the job makes no progress.

        Some heartbeats may be unchanged since the previous call.
        """
        gap, self.looked = now - (self.looked or now), now
        moved = self.hear(beats.values(), now)
        self.usual_step = median(self.steps) if self.steps else None
        if self.usual_step is not None and len(self.steps) >= 2 * RECENT:
            self.best = min(self.best, self.usual_step)
        self._find_slow(moved)
        return self._missing(now) or self._silent(now, gap) or self._stuck() or self._over(now)

    @property
    def slower(self) -> float:
        """Returns the ratio of recent to best step time, or 0 if it is within the ITSELF limit."""
        recent = list(self.steps)[-RECENT:]
        times = median(recent) / self.best if len(recent) == RECENT else 0.0
        return times if times > ITSELF else 0.0

    def slow(self) -> list[Beat]:
        """Returns the latest heartbeats of ranks that have been much slower than the others for
        many steps.

        Each rank is returned only once.
        """
        found = [
            seen
            for seen in self.seen.values()
            if seen.slow >= SLOW_LOOKS and seen.readings >= SLOW_READINGS
        ]
        for seen in found:
            seen.readings = float("-inf")
        return [seen.beat for seen in found]

    def hear(self, beats: Iterable[Beat], now: float) -> list[Seen]:
        """Updates the ranks' states from their heartbeats. Returns the ranks that made progress."""
        ranks, found = self.seen, []
        for beat in beats:
            rank, _, _, _, phase, step, phase_seconds, time, step_seconds, _ = (
                beat  # unpacked at once, because this runs for every rank
            )
            seen, at = ranks.get(rank), now - phase_seconds
            if seen is None:
                seen = ranks[rank] = Seen(beat, now, at)
                newer = True
            elif time != seen.beat.time:
                newer = step > seen.beat.step
                if newer or phase != seen.beat.phase or step != seen.beat.step:
                    seen.moved = at
                    found.append(seen)
                seen.beat = beat
                seen.heard = now
            else:
                continue
            if newer and step_seconds:
                self.steps.append(step_seconds)
            if self.latest is None or seen.moved >= self.latest.moved:
                self.latest = seen
        return found

    def _find_slow(self, moved: Sequence[Seen]) -> None:
        """Counts consecutive slow heartbeats and distinct slow readings of the ranks that made
        progress.
        """
        if not moved:
            return
        usual = sorted(seen.beat.busy_seconds for seen in self.seen.values())
        # lower bound of the median over the other ranks
        least = SLOWER * usual[max(0, (len(usual) - 1) // 2 - 1)]
        for seen in moved:
            if seen.beat.busy_seconds > least and is_slow(seen.beat, usual):
                seen.slow += 1
                seen.readings += seen.beat.busy_seconds != seen.read
                seen.read = seen.beat.busy_seconds
            else:
                seen.slow = seen.readings = 0

    def _missing(self, now: float) -> Alarm | None:
        if len(self.seen) >= self.ranks or now - self.began < self.limits.start:
            return None
        missing = sorted(set(range(self.ranks)) - set(self.seen))
        who = (
            f"rank {missing[0]}"
            if len(missing) == 1
            else f"{len(missing)} ranks, including rank {missing[0]},"
        )
        return Alarm(f"{who} sent no heartbeat in {now - self.began:.0f} s", missing[0])

    def _silent(self, now: float, gap: float) -> Alarm | None:
        """Returns an alarm if a rank's heartbeat is stale while no rank makes progress.

        `gap` is the number of seconds since the last poll.
        """
        if self.latest is None or len(self.seen) < self.ranks:
            return None
        heard = [seen for seen in self.seen.values() if seen.beat.phase != "end"]
        worst = min(heard, key=HEARD, default=None)
        if worst is None:
            return None
        quiet, moved = now - worst.heard, now - self.latest.moved
        limit = self.limits.silent_elsewhere
        if worst.beat.phase == "step" and self.usual_step is not None:
            limit = max(self.limits.silent, 3 * self.usual_step, 3 * gap)
        if min(quiet, moved) <= limit:
            return None
        if (
            now - max(map(HEARD, heard)) > quiet - 3 * EVERY
            and min(quiet, moved) <= self.limits.silent_together
        ):
            return None
        rank, seen = worst.beat.rank, stage(worst.beat)
        return Alarm(
            f"silent rank {rank}: no heartbeat for {quiet:.0f} s, last seen in {seen}; the "
            "others wait for it",
            rank,
            worst.beat.node,
        )

    def _stuck(self) -> Alarm | None:
        """Returns an alarm if all ranks are alive, but none has made progress for longer than its
        phase allows.
        """
        latest = self.latest
        if latest is None or len(self.seen) < self.ranks:
            return None
        limit = self.limits.of(latest.beat.phase, self.usual_step)
        # Ranks that are still busy have finished the last step.
        if latest.beat.phase == "end":
            latest = max(
                (seen for seen in self.seen.values() if seen.beat.phase != "end"),
                key=MOVED,
                default=latest,
            )
            limit = self.limits.conclude
        if (still := latest.heard - latest.moved) <= limit:
            return None
        behind = min(self.seen.values(), key=lambda seen: seen.beat.step).beat
        apart = behind.step < latest.beat.step
        words = (
            f"no rank made progress for {still:.0f} s (limit {limit:.0f} s) in {stage(latest.beat)}"
        )
        return Alarm(words, behind.rank if apart else None, behind.node if apart else None)

    def _over(self, now: float) -> Alarm | None:
        """Returns an alarm if all ranks have ended but torchrun is still running.

        In that case, one of its agents is assumed to be stopped, and the others wait for it.
        """
        latest = self.latest
        if latest is None or latest.beat.phase != "end" or len(self.seen) < self.ranks:
            return None
        if any(seen.beat.phase != "end" for seen in self.seen.values()):
            return None
        ended = now - max(map(HEARD, self.seen.values()))
        return (
            Alarm(f"all ranks ended {ended:.0f} s ago, but torchrun is still running on a node")
            if ended > self.limits.end
            else None
        )


def is_slow(beat: Beat, busy: Sequence[float]) -> bool:
    """Returns whether a rank's own work takes much longer than the others'.

    `busy` contains all ranks' times, including this rank's, in ascending order.
    """
    if len(busy) < 2 or beat.phase != "step":
        return False
    usual = median_without(busy, bisect_left(busy, beat.busy_seconds))
    return (
        beat.busy_seconds > SLOWER * usual > 0
        and beat.busy_seconds - usual > SLOW_SHARE * beat.step_seconds
    )


def median_without(ordered: Sequence[float], left_out: int) -> float:
    """Returns the median of all numbers except the one at index `left_out`."""
    count = len(ordered) - 1

    def at(index: int) -> float:
        return ordered[index + (index >= left_out)]

    return at(count // 2) if count % 2 else (at(count // 2 - 1) + at(count // 2)) / 2


class Sentry:
    """Watchdog that reads a run folder's heartbeats, for one of the launcher's attempts.

    If a scheduler restarts the ranks (health/fence.py), the watchdog starts over with the new
    ranks.
    """

    def __init__(
        self, folder: Path, ranks: int, attempt: int, limits: Limits | None = None
    ) -> None:
        self.folder = folder
        self.ranks = ranks
        self.order = attempt
        self.limits = limits or Limits()
        self.looked = 0.0
        self.pause = EVERY / 2
        self.links = dict[int, tcp_stats.NodeLinks]()
        self.asked = 0.0
        self.suspects = set[int | None]()
        self.named = set[tuple[int | None, bool]]()
        self._begin(attempt)

    def _begin(self, number: int) -> None:
        self.number = number
        self.beats = Beats(self.folder, number)
        self.dog = Watchdog(self.ranks, time.monotonic(), self.limits)

    def look(self) -> Alarm | None:
        """Polls the heartbeats and returns an alarm if the job makes no progress.

        If heartbeats do not show which rank is to blame, stack dumps may identify it.

        Polling is rate-limited, so a call may return without polling. Polls are less frequent on a
        slow file system or with many nodes, so that reading takes at most BUSY_SHARE of the time.
        """
        now = time.monotonic()
        if now - self.looked < self.pause:
            return None
        self.looked = now
        newest = fence.current(self.folder)
        if newest.order == self.order and newest.number != self.number:
            self._begin(newest.number)
        alarm = self.dog.look(self._beats(), now)
        self.pause = max(EVERY / 2, (time.monotonic() - now) / BUSY_SHARE)
        return self._blame(alarm) if alarm else None

    def alive(self, within: float) -> frozenset[int]:
        """Returns the nodes that sent a heartbeat in the last `within` seconds.

        Uses only this machine's clock.
        """
        now = time.monotonic()
        self.dog.hear(self._beats().values(), now)
        return frozenset(
            seen.beat.node for seen in self.dog.seen.values() if now - seen.heard < within
        )

    def _beats(self) -> dict[int, Beat]:
        """Returns the new heartbeats of the job's ranks."""
        return {rank: beat for rank, beat in self.beats.new().items() if 0 <= rank < self.ranks}

    def newly_slow(self) -> list[Beat]:
        """Returns the latest heartbeats of ranks that have become stragglers since the last
        call.
        """
        return self.dog.slow()

    @property
    def slower(self) -> bool:
        """Returns whether the run has become slower."""
        return bool(self.dog.slower)

    def slow_links(self) -> dict[int | None, str]:
        """Returns nodes with bad links, and the reasons.

        Each node is returned once per attempt, and once more if the run also becomes slower. The
        key None is the link between two nodes if neither node is to blame.

        A node must be found in two consecutive comparisons, because on busy cores, a single
        packet's RTT may be high on any node.
        """
        now, slower = time.monotonic(), self.slower
        if now - self.asked < 2 * tcp_stats.EVERY:
            return {}
        before = self.links
        self.links = tcp_stats.read_links(self.folder, self.number)
        self.asked = now
        found = tcp_stats.slow_nodes(before, self.links, slower) if before else {}
        how = f"; steps take {self.dog.slower:.1f} times as long as before" if slower else ""
        known = {node for node, was_slower in self.named if was_slower or not slower}
        new = {node: why + how for node, why in found.items() if node in self.suspects - known}
        self.suspects = set(found)
        self.named = self.named | {(node, slower) for node in new}
        return new

    def _blame(self, alarm: Alarm) -> Alarm:
        left = Stacks(self.folder, time.time() - 1)
        ask(self.folder)
        deadline = time.monotonic() + 3 * EVERY
        answering = len(self.dog.seen) - (alarm.rank is not None)  # a silent rank writes no dump
        while len(stacks := left.read()) < answering and time.monotonic() < deadline:
            time.sleep(EVERY / 10)
        if alarm.rank is not None:
            return alarm
        odd = odd_one(stacks)
        if odd is None:
            return alarm
        rank, where = odd
        return Alarm(
            f"{alarm.words}; rank {rank} is in {where}, the others are elsewhere",
            rank,
            self.dog.seen[rank].beat.node,
        )
