"""Weeks of training on a clock that is not waited for: machines fail at random, and the real watch, attempts, verdict and ledger go on.

What is played: the clock, and a backend whose hosts take part in steps, save, and fall silent. What is real: all of watch/ and
health/watchdog.py. Four ranks stand for all: that more can be watched is measured elsewhere (tests/bench/bench_fleet.py).
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

from trainfleet.backends.base import Handle, Phase, Status
from trainfleet.backends.run_storage import Here
from trainfleet.config import Config
from trainfleet.config.goodput import NOTICED, foresee, stall_of
from trainfleet.health import fence
from trainfleet.health.heartbeat_format import Beat, write_beats
from trainfleet.node.placement import Terms
from trainfleet.plan.job import Artifact, Job, Request
from trainfleet.process.processes import Interrupts
from trainfleet.run.run_folder import Run
from trainfleet.trust.errors import BackendError
from trainfleet.watch.budget import Budget
from trainfleet.watch.monitor import Watch
from trainfleet.watch.retry_loop import Attempts
from trainfleet.watch.time_accounting import goodput, ledger

NODES = 4
TICK = 1.0  # seconds that a wait takes at least
SILENCE = 9.0  # seconds after which a host that does not answer counts as lost (hosts/fleet.py)
BEGAN = 1.8e9  # unix time


@dataclass(frozen=True)
class Result:
    """What became of a run: its useful share, by the ledger and as the hosts know it, restarts, and commands typed."""

    share: float
    known: float
    restarts: int
    commands: int


@dataclass
class Weeks:
    """A backend, and the clock of all. `between`: seconds between failures; `work`: useful seconds until the run is done."""

    run: Run
    between: float
    work: float
    step: float
    interval: float
    stall: float
    starting: float  # seconds from a job's start to its first step
    dice: random.Random
    now: float = BEGAN
    kept: float = 0.0  # useful seconds in checkpoints
    at_work: bool = False
    began: float = 0.0
    fails: float = 0.0
    ends: float = 0.0
    trained: bool = False
    lost: list[dict[str, float]] = field(default_factory=list)
    terms = Terms(wait=0)

    @property
    def trains(self) -> float:
        return self.began + self.starting

    def sleep(self, seconds: float) -> None:
        """As long as nothing happens nobody looks: the clock goes on to what does."""
        self.now += max(TICK, seconds)
        if self.at_work and self.now < min(self.fails, self.ends):
            coming = [
                moment for moment in (self.trains, self.fails, self.ends) if moment > self.now
            ]
            self.now = min(coming)

    def plan(self, job: Job, without: Mapping[str, str]) -> Request:
        sound = [f"h{number}" for number in range(NODES + 2) if f"h{number}" not in without]
        if len(sound) < job.nodes:
            raise BackendError("too few hosts")
        artifacts = tuple(Artifact(f"node-{node}.sh", "exec x") for node in range(job.nodes))
        return Request(job, artifacts, tuple(sound[: job.nodes]))

    def submit(self, request: Request) -> Handle:
        self.began, self.at_work, self.trained = self.now, True, False
        self.fails = self.now + self.dice.expovariate(1 / self.between)
        left = self.work - self.kept
        self.ends = self.trains + left + self.stall * (left // self.interval)
        return Handle("weeks", str(self.began), request.token, request.job.nodes, request.hosts)

    def status(self, handle: Handle) -> Status:
        if self.now >= self.trains and not self.trained:
            self.trained = True
            for line in self.lost:
                self.run.record(
                    "lost", step=self.steps(self.kept), steps=self.steps(line["span"]), spans=[line]
                )
            self.lost = []
            self.run.record("began", step=self.steps(self.kept))
        self._beat()
        if self.now >= self.ends < self.fails:
            self._keep(self.work - self.kept, self.ends)
            self.run.record("finished", step=self.steps(self.kept))
            return Status(Phase.ENDED, exits=dict.fromkeys(range(NODES), 0), hosts=handle.hosts)
        gone = {NODES - 1: "no answer over SSH"} if self.now >= self.fails + SILENCE else {}
        return Status(Phase.RUNNING, lost=gone, silent=frozenset(gone), hosts=handle.hosts)

    def stop(self, handle: Handle, at_once: bool) -> None:
        """The end of an attempt: what was saved is kept, and what came behind it is lost."""
        if not self.at_work:
            return
        self.at_work = False
        worked = min(self.fails, self.ends) - self.trains
        if self.kept < self.work and worked > 0:
            saves = int(worked // (self.interval + self.stall))
            self._keep(
                saves * self.interval, self.trains + saves * (self.interval + self.stall), saves
            )
            self.lost = [
                {
                    "step": 1,
                    "time": self.fails,
                    "span": worked - saves * (self.interval + self.stall),
                }
            ]

    def cut_off(self, handle: Handle) -> str:
        return ""

    def _keep(self, useful: float, until: float, saves: int | None = None) -> None:
        saves = int(useful // self.interval) if saves is None else saves
        if useful <= 0:
            return
        self.kept += useful
        line = {"step": self.steps(self.kept), "loss": 2.0, "time": until, "span": useful + saves * self.stall,
                "in_checkpoint": saves * self.stall}  # fmt: skip
        with open(self.run.metrics, "a") as file:
            file.write(json.dumps(line) + "\n")
        if saves:
            self.run.record("checkpointed", step=self.steps(self.kept))

    def _beat(self) -> None:
        """All ranks get on while none has failed; then one says no more, and the others wait for it."""
        moved = min(self.now, self.fails)
        phase = "step" if moved >= self.trains else "load"
        done = self.kept + max(0.0, moved - self.trains)
        inside = self.now - moved + done % self.step if phase == "step" else self.now - self.began
        attempt = fence.current(self.run.folder).number
        for node in range(NODES if self.now < self.fails else NODES - 1):
            beat = Beat(
                node,
                node,
                100 + node,
                attempt,
                phase,
                self.steps(done),
                inside,
                self.now,
                self.step,
                self.step,
            )
            write_beats(self.run.folder, node, attempt, [beat])

    def steps(self, seconds: float) -> int:
        return int(seconds / self.step)


@contextmanager
def clock_of(weeks: Weeks) -> Iterator[None]:
    """Whoever asks for the time, or waits, has that of the simulation."""
    told = {"time": lambda: weeks.now, "monotonic": lambda: weeks.now, "sleep": weeks.sleep}
    with mock.patch.multiple(time, **told):
        yield


def simulate(config: Config, step: float, days: float, run: Run, seed: int = 1) -> Result:
    """What a run of so many useful days keeps, when its devices fail as published ones do."""
    expected = foresee(config, step)
    weeks = Weeks(run, expected.between_failures, days * 86400, step, expected.interval, stall_of(config),
                  expected.restart - NOTICED, random.Random(seed))  # fmt: skip
    job, commands = Job("train", "x", run.folder, NODES, 1, "m", (), True), 0
    with clock_of(weeks):
        while weeks.kept < weeks.work:
            commands += 1
            run.record("launched", nodes=NODES, ranks_per_node=1, started=weeks.now)
            watch = Watch(
                weeks,
                Here(run),
                run,
                Interrupts(),
                lambda waits: None,
                lambda words: None,
                Budget(run, config, None),
            )  # type: ignore[arg-type]
            Attempts(watch, weeks.plan(job, {}), [job], lambda job: None).persevere()
        spent = ledger(run.read_events(), run.read_metrics())
    restarts = sum(event["event"] == "restarted" for event in run.read_events())
    return Result(goodput(spent) or 0.0, weeks.kept / (weeks.now - BEGAN), restarts, commands)
