"""Whether the ranks get on, judged from their heartbeats alone, and who does not when they don't. Pure but for reading files.

A rank is silent when its file goes stale while nobody makes a step: its process is stopped or dead, or its node is. The ranks are
stuck when all are alive and none gets on: then their stacks tell the odd one. How long is too long depends on the phase, and on
how long this run's steps are. A stale file alone is no alarm: a shared file system may pause for a minute under one that trains.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from ..heartbeat import EVERY, Beat, ask_for_stacks, read_beats, read_stacks

STEPS_KEPT = 256  # of all ranks, of which the usual step is the median
SLOWER = 1.5  # a rank whose own work takes this many times the others' is slow
SLOW_SHARE = 0.2  # if that costs at least this part of a step
SLOW_LOOKS = 30  # beats in a row


@dataclass(frozen=True)
class Limits:
    """Seconds after which something is wrong, by phase. A step's limit follows from the steps seen."""

    silent: float = 8.0  # a rank's file, while the others wait in a step
    silent_elsewhere: float = 60.0  # the same while it starts, loads, compiles or writes a checkpoint
    silent_together: float = 120.0  # all files at once: rather the file system than the ranks
    start: float = 600.0  # until the first beat: imports over a cold file system
    load: float = 1800.0
    compile: float = 7200.0  # the first step: neuronx-cc takes this long for large models
    validate: float = 1800.0
    checkpoint: float = 1800.0
    end: float = 600.0
    step: float = 10.0  # at least
    steps: float = 10.0  # or this many usual steps

    def of(self, phase: str, usual_step: float | None) -> float:
        if phase == "step":
            return self.compile if usual_step is None else max(self.step, self.steps * usual_step)
        return float(getattr(self, phase))


@dataclass(frozen=True)
class Alarm:
    """Why an attempt must end: in words, and the rank and node that are to blame where that is known."""

    words: str
    rank: int | None = None
    node: int | None = None


@dataclass
class Seen:
    """What is remembered of one rank: its newest beat, and when (by our clock) that and its place were new."""

    beat: Beat
    heard: float
    moved: float
    slow: int = 0


@dataclass
class Watchdog:
    """Looks at the beats of one attempt of `ranks` ranks; `began` and every `now` are seconds of one clock, ours."""

    ranks: int
    began: float
    limits: Limits = field(default_factory=Limits)
    seen: dict[int, Seen] = field(default_factory=dict)
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))

    @property
    def usual_step(self) -> float | None:
        """The median of the steps seen; None before there is one."""
        return median(self.steps) if self.steps else None

    def look(self, beats: Mapping[int, Beat], now: float) -> Alarm | None:
        """Takes in the beats as they are now; an alarm when they are not those of a job that gets on."""
        for rank, beat in beats.items():
            self._hear(rank, beat, now)
        return self._missing(now) or self._silent(now) or self._stuck()

    def slow(self) -> list[Beat]:
        """The newest beats of the ranks whose own work takes much longer than the others', step after step; each once."""
        found = [seen for seen in self.seen.values() if seen.slow == SLOW_LOOKS]
        for seen in found:
            seen.slow += 1
        return [seen.beat for seen in found]

    def _hear(self, rank: int, beat: Beat, now: float) -> None:
        before = self.seen.get(rank)
        if beat.step_seconds and (before is None or beat.step > before.beat.step):
            self.steps.append(beat.step_seconds)
        if before is None:
            self.seen[rank] = Seen(beat, now, now - beat.phase_seconds)
            return
        if beat.time == before.beat.time:
            return
        before.heard = now
        if (beat.phase, beat.step) != (before.beat.phase, before.beat.step):
            before.moved = now - beat.phase_seconds
            before.slow = before.slow + 1 if self._is_slow(beat) else 0
        before.beat = beat

    def _is_slow(self, beat: Beat) -> bool:
        others = [seen.beat.busy_seconds for rank, seen in self.seen.items() if rank != beat.rank]
        if not others or beat.phase != "step":
            return False
        usual = median(others)
        return beat.busy_seconds > SLOWER * usual > 0 and beat.busy_seconds - usual > SLOW_SHARE * beat.step_seconds

    def _missing(self, now: float) -> Alarm | None:
        missing = sorted(set(range(self.ranks)) - set(self.seen))
        if not missing or now - self.began < self.limits.start:
            return None
        who = f"rank {missing[0]}" if len(missing) == 1 else f"{len(missing)} ranks, of them rank {missing[0]},"
        return Alarm(f"{who} gave no sign of life in {now - self.began:.0f} s", missing[0])

    def _silent(self, now: float) -> Alarm | None:
        """Ranks whose file is stale, when nobody gets on meanwhile."""
        quiet = {rank: now - seen.heard for rank, seen in self.seen.items() if seen.beat.phase != "end"}
        worst = max(quiet, key=lambda rank: quiet[rank], default=None)
        if worst is None or len(self.seen) < self.ranks:
            return None
        beat, moved = self.seen[worst].beat, min(now - seen.moved for seen in self.seen.values())
        limit = self.limits.silent_elsewhere
        if beat.phase == "step" and self.usual_step is not None:
            limit = max(self.limits.silent, 3 * self.usual_step)
        if min(quiet.values()) > quiet[worst] - 3 * EVERY:
            limit = self.limits.silent_together
        if min(quiet[worst], moved) <= limit:
            return None
        return Alarm(
            f"silent rank {worst}: no heartbeat for {quiet[worst]:.0f} s, last seen in {place(beat)}, while the others wait",
            worst, beat.node,
        )  # fmt: skip

    def _stuck(self) -> Alarm | None:
        """All alive, and by their own word nobody has moved for longer than the phase may take."""
        if len(self.seen) < self.ranks:
            return None
        latest = max(self.seen.values(), key=lambda seen: seen.moved)
        limit = self.limits.of(latest.beat.phase, self.usual_step)
        if (still := latest.heard - latest.moved) <= limit:
            return None
        behind = min(self.seen.values(), key=lambda seen: seen.beat.step).beat
        apart = behind.step < latest.beat.step
        words = f"no rank has moved for {still:.0f} s (limit {limit:.0f} s) in {place(latest.beat)}"
        return Alarm(words, behind.rank if apart else None, behind.node if apart else None)


def place(beat: Beat) -> str:
    """`step 12`, or the name of another phase."""
    return f"step {beat.step}" if beat.phase == "step" else beat.phase


class Sentry:
    """A watchdog over the heartbeat files of a run folder, for one attempt."""

    def __init__(self, folder: Path, ranks: int, attempt: int, limits: Limits | None = None) -> None:
        self.folder, self.attempt = folder, attempt
        self.dog = Watchdog(ranks, time.monotonic(), limits or Limits())
        self.looked = 0.0

    def look(self) -> Alarm | None:
        """An alarm, with the odd rank out named by its stacks where the heartbeats could not say. Looks once a second at most."""
        now = time.monotonic()
        if now - self.looked < EVERY / 2:
            return None
        self.looked = now
        alarm = self.dog.look(read_beats(self.folder, self.attempt), now)
        return self._blame(alarm) if alarm else None

    def newly_slow(self) -> list[Beat]:
        """The ranks that turned out to be slow since the last call."""
        return self.dog.slow()

    def _blame(self, alarm: Alarm) -> Alarm:
        asked = time.time() - 1
        ask_for_stacks(self.folder)
        deadline = time.monotonic() + 3 * EVERY
        answering = len(self.dog.seen) - (alarm.rank is not None)  # a silent rank will say nothing
        while len(stacks := read_stacks(self.folder, asked)) < answering and time.monotonic() < deadline:
            time.sleep(EVERY / 10)
        if alarm.rank is not None:
            return alarm
        odd = odd_one(stacks)
        if odd is None:
            return alarm
        rank, where = odd
        return Alarm(f"{alarm.words}; rank {rank} is in {where}, the others elsewhere", rank, self.dog.seen[rank].beat.node)


def odd_one(stacks: Mapping[int, str]) -> tuple[int, str] | None:
    """The one rank whose main thread is where no other's is, and where that is; None when there is no such single rank."""
    places = {rank: innermost(text) for rank, text in stacks.items()}
    counts = Counter(places.values())
    alone = [rank for rank, place in places.items() if place and counts[place] == 1]
    return (alone[0], places[alone[0]]) if len(alone) == 1 and len(places) > 2 else None


def innermost(stacks: str) -> str:
    """Where the main thread is, as `file.py:12 name`: it is the last that faulthandler prints."""
    threads = stacks.split("most recent call first):\n")
    frame = threads[-1].strip().splitlines()[0] if len(threads) > 1 else ""
    parts = frame.strip().split('"')
    if len(parts) < 3:
        return ""
    line = parts[2].removeprefix(", line ").replace(" in ", " ")
    return f"{Path(parts[1]).name}:{line}"
