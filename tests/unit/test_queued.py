"""A job that waits in an engine's queue: no alarm, no dollars, its reason shown; watched and paid for from the moment that it runs."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from trainfleet.backends import terms_of
from trainfleet.backends.base import Handle, Phase, Status, save_job
from trainfleet.backends.run_storage import Here
from trainfleet.backends.slurm import Slurm
from trainfleet.cli import main
from trainfleet.config import Settings, dump_resolved, load
from trainfleet.health import watchdog
from trainfleet.node.placement import Terms
from trainfleet.plan.estimate import Bill
from trainfleet.plan.job import Artifact, Job, Request
from trainfleet.process.processes import Interrupts, identity
from trainfleet.recipes import FOLDER
from trainfleet.report.live import Live
from trainfleet.report.summary import status as summary
from trainfleet.run.run_folder import Run
from trainfleet.watch import budget, monitor
from trainfleet.watch.budget import Budget
from trainfleet.watch.monitor import AttemptOutcome, MonitoredAttempt, Watch

QUARTER = 900.0  # seconds
REASON = "(Resources): all 4 nodes of the partition are in use"


class Clock:
    """The time of all modules, which passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.began, self.passed = time.time(), 0.0

    def sleep(self, seconds: float) -> None:
        self.passed += seconds


class Queue:
    """A backend whose job waits for `waits` seconds, starts for a minute, runs for two, and whose engine may start it once more."""

    def __init__(
        self, clock: Clock, waits: float, retries: bool = False, forever: bool = False
    ) -> None:
        self.clock, self.waits, self.retries, self.forever = clock, waits, retries, forever
        self.stopped: list[bool] = []
        self.terms = Terms()

    def submit(self, request: Request) -> Handle:
        return Handle("queue", "job-1", request.token, request.job.nodes)

    def status(self, handle: Handle) -> Status:
        at, hosts = self.clock.passed, ("a", "b")
        if self.stopped:
            return Status(Phase.ENDED, exits={0: 0, 1: 0})
        if at < self.waits or self.forever:
            return Status(Phase.QUEUED, REASON)
        if at < self.waits + 60:
            return Status(Phase.STARTING, "the image is pulled")
        if at < self.waits + 180:
            return Status(Phase.RUNNING, attempt=1, hosts=hosts)
        if self.retries and at < self.waits + 480:
            waiting = at < self.waits + 300
            return (
                Status(Phase.QUEUED, "requeued: node b failed", 2)
                if waiting
                else Status(Phase.RUNNING, attempt=2, hosts=hosts)
            )
        return Status(Phase.ENDED, exits={0: 0, 1: 0})

    def stop(self, handle: Handle, at_once: bool) -> None:
        self.stopped.append(at_once)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(time, "sleep", clock.sleep)
    monkeypatch.setattr(time, "monotonic", lambda: clock.passed)
    monkeypatch.setattr(time, "time", lambda: clock.began + clock.passed)
    monkeypatch.setattr(monitor, "POLL", 5.0)
    yield clock


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "runs" / "queued")
    run.folder.mkdir(parents=True)
    return run


def run_attempt(
    run: Run, backend: Queue, show: Callable[[str], None], costs: Budget, *interrupts: int
) -> AttemptOutcome:
    request = Request(
        Job("train", "queued", run.folder, 2, 1, "m", (), True), (Artifact("job.sbatch", "x"),)
    )
    asked = Interrupts()
    asked.pressed = sum(interrupts)
    run.update_results(status="running", unattended=True)
    run.record("launched", nodes=2, ranks_per_node=1)
    watch = Watch(backend, Here(run), run, asked, show, lambda text: None, costs)  # type: ignore[arg-type]
    return MonitoredAttempt(watch, request).follow()


def money(run: Run, limit: float | None = None) -> Budget:
    config, _ = load(Settings(FOLDER / "llama-3-8b-p5.yaml"))
    return Budget(
        run, replace(config, budget=replace(config.budget, max_usd=limit)), Bill(3600.0)
    )  # a dollar for a node's second


def test_a_quarter_of_an_hour_in_the_queue_is_no_fault_and_costs_nothing(
    run: Run, clock: Clock
) -> None:
    shown: list[str] = []
    costs = money(run)

    def show(waits: str) -> None:
        shown.append(waits)
        if clock.passed < QUARTER:
            assert costs.spent(time.time()) == 0, "nobody is paid for a queue"
            assert f"queued: {REASON}" in summary(run)

    outcome = run_attempt(run, Queue(clock, QUARTER), show, costs)
    assert not outcome.failed and outcome.alarm is None
    assert (
        shown[0] == REASON and shown.count(REASON) >= QUARTER / 5 and "the image is pulled" in shown
    )
    events = [(event["event"], event.get("reason", "")) for event in run.read_events()]
    assert events == [
        ("launched", ""),
        ("queued", REASON),
        ("queued", "the image is pulled"),
        ("running", ""),
    ]
    run.record("finished", step=1)
    assert costs.spent() == pytest.approx(2 * 180, abs=2 * 5.1), (
        "from the machines' start on, two nodes for three minutes"
    )


def test_its_ranks_are_watched_from_the_moment_that_it_runs(
    run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[float] = []

    class Sentry(watchdog.Sentry):
        def __init__(self, *words: object) -> None:
            began.append(clock.passed)
            super().__init__(*words)  # type: ignore[arg-type]

    monkeypatch.setattr(monitor, "Sentry", Sentry)
    run_attempt(run, Queue(clock, QUARTER, retries=True), lambda waits: None, money(run))
    assert [round(moment - QUARTER) for moment in began] == [60, 300], (
        "and anew in the attempt that the engine starts by itself"
    )


def test_what_an_engine_queues_again_is_not_paid_for_meanwhile(run: Run, clock: Clock) -> None:
    costs = money(run)
    run_attempt(run, Queue(clock, 0.0, retries=True), lambda waits: None, costs)
    run.record("finished", step=1)
    assert costs.spent() == pytest.approx(2 * (180 + 180), abs=2 * 10.1)


def test_a_request_to_stop_ends_a_job_that_only_waits(run: Run, clock: Clock) -> None:
    backend = Queue(clock, 0.0, forever=True)
    run_attempt(run, backend, lambda waits: None, money(run), 1)
    assert backend.stopped == [True] and clock.passed < 60


def test_money_is_spent_from_running_on_and_then_it_stops(
    run: Run, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "LOOK_EVERY", 0.0)
    run_attempt(run, Queue(clock, QUARTER), lambda waits: None, money(run, limit=200.0))
    assert run.stop.exists()
    asked = QUARTER + 100  # two nodes, two dollars a second
    assert clock.passed >= asked


def test_status_says_how_old_a_reason_is(run: Run, clock: Clock) -> None:
    """Nobody notes that it has changed while no launcher is there."""
    run.update_results(status="running", unattended=True)
    run.record("launched", nodes=2, ranks_per_node=1)
    run.note("queued", phase="queued", reason=REASON)
    assert f"queued: {REASON} (recorded 0 s ago)" in summary(run)
    clock.passed = 3 * 3600.0
    assert f"queued: {REASON} (recorded 3 h 00 min ago)" in summary(run)


SQUEUE = "7|{state}|0|||trainfleet 0123 2 {folder} {folder}|{reason}|"


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Leaves the run of a job that waited, without a launcher, and writes the cluster's squeue."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    fleet = {"backend": "slurm", "nodes": 2, "shared_folder": str(tmp_path)}
    Path("config.yaml").write_text(yaml.safe_dump({"name": "queued", "fleet": fleet}))
    config, _ = load(Settings(Path("config.yaml")), terms_of)
    run = Run(Path("runs/queued"))
    run.folder.mkdir(parents=True)
    run.config.write_text(dump_resolved(config))
    run.update_results(name="queued", status="running", unattended=True)
    request = Request(
        Job("train", "queued", run.folder, 2, 1, "m", (), True), (Artifact("job.sbatch", "x"),)
    )
    save_job(run, Handle("slurm", f"{run.folder}:7", "0123", 2), request)
    run.record("launched", nodes=2, ranks_per_node=1)
    run.note("queued", phase="queued", reason=REASON)

    def cluster(script: str) -> None:
        (tmp_path / "bin/squeue").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin/squeue").chmod(0o755)

    return cluster


@pytest.mark.parametrize(
    ("state", "reason", "said"),
    [
        ("PENDING", "Priority", "queued: (Priority): "),
        ("RUNNING", "None", "running\n"),
    ],
)
def test_status_asks_the_engine_why_a_job_waits_now(
    waiting: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    state: str,
    reason: str,
    said: str,
) -> None:
    folder = Path("runs/queued").absolute()
    waiting(f"echo '{SQUEUE.format(state=state, reason=reason, folder=folder)}'")
    assert main(["status"]) == 0
    told = capsys.readouterr().out
    assert said in told and REASON not in told and "noted" not in told


def test_status_of_an_engine_that_does_not_answer_says_how_old_the_reason_is(
    waiting: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    waiting(f"echo $$ > {tmp_path}/asked; exec sleep 50")
    began = time.monotonic()
    assert main(["status"]) == 0
    assert time.monotonic() - began < 20
    assert f"queued: {REASON} (recorded " in capsys.readouterr().out
    assert not identity(int((tmp_path / "asked").read_text())), "squeue was ended too"


def test_status_leaves_the_engine_of_a_run_that_was_handed_over_to_its_head(
    waiting: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting(f"touch {tmp_path}/asked")

    def elsewhere(self: Slurm, config: object) -> None:
        self.hands_over, self._head = True, None

    monkeypatch.setattr(Slurm, "__init__", elsewhere)
    monkeypatch.setattr(Slurm, "place", lambda self, run: Here(run))
    monkeypatch.setattr(Slurm, "find", lambda self, run: Handle("slurm", "", "", 0))
    assert main(["status"]) == 0
    assert (
        f"queued: {REASON} (recorded " in capsys.readouterr().out
        and not (tmp_path / "asked").exists()
    )


def test_the_live_line_says_what_it_waits_for(run: Run) -> None:
    stream = io.StringIO()
    with Live(run, 10, stream) as live:
        for _ in range(3):
            live.update(REASON)
        live.update("")
    assert stream.getvalue().splitlines()[0] == REASON and stream.getvalue().count(REASON) == 1
