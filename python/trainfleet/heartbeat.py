"""The signs of life that every rank leaves in the run folder, and that the watchdog reads from wherever it is.

heartbeats/rank-<r>.json   replaced once a second by a thread of the rank: its phase and step, for how long, its node and process
heartbeats/dump            asks every rank, by being new, for its stacks: they come as logs/stacks-rank-<r>.txt
heartbeats/attempt         the number of the attempt that may run now: a rank of an earlier one ends itself when it sees it

A training loop only says where it is (`heart.at("step", 12)`), which is an assignment. What goes stale tells how a rank died: the
file, when the process does not run (stopped, dead, or its node is); what it says, when the process runs and does not get on.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from .runs import write_atomic

EVERY = 1.0  # seconds between two beats
FENCED = 75  # the exit code of a rank whose attempt is over
FOLDER, DUMP, ATTEMPT = "heartbeats", "dump", "attempt"
PHASES = ("start", "load", "compile", "step", "validate", "checkpoint", "end")


@dataclass(frozen=True)
class Beat:
    """One rank's sign of life. `phase_seconds`: for how long it has been at this step of this phase, by its own clock."""

    rank: int
    node: int
    pid: int
    attempt: int
    phase: str
    step: int
    phase_seconds: float
    time: float
    step_seconds: float = 0.0  # that the newest whole step took
    busy_seconds: float = 0.0  # of it in the rank's own work: without waiting for others


class Heart:
    """A rank's heart: beats from its making until `stop`, in a thread of its own."""

    def __init__(self, folder: Path, rank: int, node: int, attempt: int) -> None:
        self.folder, self.rank, self.node, self.attempt = folder, rank, node, attempt
        self.place: tuple[str, int, float] = ("start", 0, time.monotonic())
        self.took = self.busy = 0.0
        self._asked = _asked(folder)
        self._complained = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)
        self._thread.start()

    def at(self, phase: str, step: int = 0) -> None:
        """Says where the rank is now; costs about a microsecond."""
        before, now = self.place, time.monotonic()
        if phase == before[0] == "step":
            self.took = now - before[2]
        self.place = (phase, step, now)

    def stop(self) -> None:
        """The last beat: from here on silence means nothing."""
        self.at("end", self.place[1])
        self._end.set()
        self._thread.join()
        self._beat()

    def _run(self) -> None:
        while True:
            if current_attempt(self.folder) > self.attempt:
                print(f"attempt {self.attempt} is over; this rank was out of reach and leaves", file=sys.stderr, flush=True)
                os._exit(FENCED)
            self._beat()
            if (asked := _asked(self.folder)) != self._asked:
                self._asked = asked
                dump_stacks(self.folder / "logs" / f"stacks-rank-{self.rank}.txt")
            if self._end.wait(EVERY):
                return

    def _beat(self) -> None:
        phase, step, since = self.place
        beat = Beat(self.rank, self.node, os.getpid(), self.attempt, phase, step, round(time.monotonic() - since, 3),
                    time.time(), round(self.took, 4), round(self.busy, 4))  # fmt: skip
        try:
            write_beat(self.folder, beat)
        except OSError as error:  # the disk is the training's to complain about; a beat that is lost must not end it
            if not self._complained:
                self._complained = True
                print(f"no heartbeat could be written: {error}", file=sys.stderr, flush=True)


def write_beat(folder: Path, beat: Beat) -> None:
    """Replaces a rank's file whole. Not synced: after a power cut a beat says nothing any more."""
    path = folder / FOLDER / f"rank-{beat.rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(asdict(beat)), encoding="utf-8")
    temporary.replace(path)


def read_beats(folder: Path, attempt: int) -> dict[int, Beat]:
    """The newest beat of every rank of this attempt."""
    beats = {}
    for path in (folder / FOLDER).glob("rank-*.json"):
        try:
            beat = Beat(**json.loads(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError):  # it is being replaced, on a file system where that can be seen
            continue
        if beat.attempt == attempt:
            beats[beat.rank] = beat
    return beats


def begin_attempt(folder: Path) -> int:
    """The number of a new attempt. Ranks of all earlier ones, wherever they still are, end themselves within EVERY seconds."""
    number = current_attempt(folder) + 1
    write_atomic(folder / FOLDER / ATTEMPT, f"{number}\n")
    for path in (folder / FOLDER).glob("rank-*"):
        path.unlink(missing_ok=True)
    return number


def current_attempt(folder: Path) -> int:
    """The number of the newest attempt; 0 before the first."""
    try:
        return int((folder / FOLDER / ATTEMPT).read_text())
    except (OSError, ValueError):
        return 0


def ask_for_stacks(folder: Path) -> None:
    """Every rank that still runs writes its stacks within EVERY seconds."""
    path = folder / FOLDER / DUMP
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(time.time()))


def dump_stacks(path: Path) -> None:
    """Leaves the Python stacks of all threads of this process in a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def read_stacks(folder: Path, since: float) -> dict[int, str]:
    """The stacks by rank of those that wrote them after `since` (unix time)."""
    paths = [path for path in (folder / "logs").glob("stacks-rank-*.txt") if path.stat().st_mtime >= since]
    return {int(path.stem.split("-")[2]): path.read_text(encoding="utf-8") for path in paths}


def _asked(folder: Path) -> str:
    """When stacks were asked for last."""
    try:
        return (folder / FOLDER / DUMP).read_text()
    except OSError:
        return ""
