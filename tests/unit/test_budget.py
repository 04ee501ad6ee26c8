"""budget.max_usd: an estimate over it is refused, and a run that has cost it is stopped, however often it was launched."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from trainfleet.backends.base import Handle, Phase, Status
from trainfleet.backends.run_storage import Here
from trainfleet.config import Config, Settings, load
from trainfleet.node.placement import Terms
from trainfleet.plan.estimate import Bill, estimate
from trainfleet.plan.job import Artifact, Job, Request
from trainfleet.plan.plan import make_plan
from trainfleet.process.processes import Interrupts
from trainfleet.recipes import FOLDER
from trainfleet.run.run_folder import Run, append_line
from trainfleet.trust.errors import ConfigError
from trainfleet.watch import budget
from trainfleet.watch.budget import Budget, node_hours
from trainfleet.watch.monitor import MonitoredAttempt, Watch

HOUR = 3600.0
P5 = Bill(55.04)
# Four nodes for an hour, then nobody knows for how long none, three for half an hour, two of them for another half.
EVENTS = [
    {"event": "launched", "time": 0.0, "nodes": 4},
    {"event": "checkpointed", "time": HOUR / 2},
    {"event": "stopped", "time": HOUR},
    {"event": "launched", "time": 9 * HOUR, "nodes": 3},
    {"event": "restarted", "time": 9.5 * HOUR, "nodes": 2},
    {"event": "finished", "time": 10 * HOUR},
]


def test_nodes_that_stay_are_paid_for_between_launches() -> None:
    assert node_hours(EVENTS, lingers=2.0) == 4 + 4 * 2 + 1.5 + 1, (
        "eight hours lie between the launches, and two are paid for"
    )
    assert node_hours(EVENTS, lingers=100.0) == 4 + 4 * 8 + 1.5 + 1
    later = 13 * HOUR
    assert node_hours(EVENTS, later, 2.0, under_way=False) == 4 + 4 * 2 + 1.5 + 1 + 2 * 2
    assert node_hours(EVENTS, later, under_way=False) == node_hours(EVENTS)


def config_of(recipe: str, settings: str = "") -> Config:
    return load(Settings(FOLDER / f"{recipe}.yaml", settings))[0]


def test_nodes_are_paid_for_while_a_launch_lasts() -> None:
    assert node_hours(EVENTS) == 4 + 1.5 + 1
    assert node_hours(EVENTS[:2]) == 2 and node_hours(EVENTS[:2], now=HOUR) == 4
    assert node_hours([]) == node_hours([], now=HOUR) == 0
    waits = {"event": "queued", "time": 0.0, "phase": "queued"}
    alone = [EVENTS[0], waits, {"event": "began", "time": HOUR}]
    assert node_hours(alone, now=3 * HOUR) == 4 * 2, (
        "ranks tell that it waits no more, where no launcher looked on"
    )


def test_an_estimate_over_the_limit_is_refused_with_the_steps_that_keep_to_it() -> None:
    costs = estimate(config_of("llama-3-8b-p5"), P5).usd
    assert costs
    make_plan(config_of("llama-3-8b-p5", f"budget.max_usd={costs + 1}"), [], [], [], P5)
    limited = f"budget.max_usd={costs / 2}"
    with pytest.raises(
        ConfigError,
        match=r"budget.max_usd: the run is estimated at .*; train.steps: 499 fits it",
    ):
        make_plan(config_of("llama-3-8b-p5", limited), [], [], [], P5)
    make_plan(config_of("llama-3-8b-p5", f"{limited} train.steps=500"), [], [], [], P5)


def test_a_limit_that_nobody_could_keep_is_refused() -> None:
    with pytest.raises(ConfigError, match="the price of a host is unknown"):
        make_plan(
            config_of("ssh-4-nodes", "fleet.hosts=[a,b,c,d] budget.max_usd=5"), [], [], [], None
        )
    make_plan(
        config_of("first-run", "budget.max_usd=5"), [], [], [], Bill(0.0)
    )  # this machine costs nothing


class Hosts:
    """A backend whose job goes on until its ranks are asked to stop."""

    def __init__(self, run: Run) -> None:
        self.run, self.looks, self.terms = run, 0, Terms(wait=0)

    def submit(self, request: Request) -> Handle:
        return Handle("hosts", "1", request.token, 1)

    def status(self, handle: Handle) -> Status:
        self.looks += 1
        assert self.looks < 100, "it was never asked to stop"
        return Status(Phase.ENDED if self.run.stop.exists() else Phase.RUNNING, exits={0: 0})

    def stop(self, handle: Handle, at_once: bool) -> None: ...


def test_a_run_that_has_cost_its_limit_is_asked_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "LOOK_EVERY", 0.0)
    run, config = (
        Run(tmp_path),
        config_of("llama-3-8b-p5", "budget.max_usd=55"),
    )  # $55.04 an hour and node
    run.record("launched", nodes=8)
    job = Job("train", "x", run.folder, 1, 1, "m", (), True)
    request, said = Request(job, (Artifact("node-0.sh", "x"),)), list[str]()
    costs = Budget(run, config, P5)
    assert not costs.is_spent(), "it has just begun"
    costs.bill = Bill(1e9)
    watch = Watch(Hosts(run), Here(run), run, Interrupts(), lambda waits: None, said.append, costs)  # type: ignore[arg-type]
    MonitoredAttempt(watch, request).follow()
    assert run.stop.exists() and said[0] == "the run has reached its budget.max_usd of $55.00"


@pytest.mark.parametrize(("nodes", "limit"), [(1, 55.04), (8, 1000.0), (64, 170.0), (3, 2.5)])
def test_a_limit_is_overshot_by_one_poll_at_most(nodes: int, limit: float, tmp_path: Path) -> None:
    run, config, now = Run(tmp_path), config_of("llama-3-8b-p5", f"budget.max_usd={limit}"), [1e9]
    run.events.mkdir(parents=True)
    append_line(run.events / "launcher-a.jsonl", {"event": "launched", "time": 1e9, "nodes": nodes})
    told = list[tuple[float, str]]()
    rate = nodes * P5.node / HOUR  # dollars a second
    costs = Budget(run, config, P5, clock=lambda: now[0])
    poll, cost = rate * budget.LOOK_EVERY + 0.01, lambda: rate * (now[0] - 1e9)
    while not costs.is_spent(lambda words: told.append((cost(), words))):
        assert cost() < limit + poll, "it goes on for more than a poll"
        now[0] += 0.25  # the watch's own pace
    assert limit - 0.01 <= cost() <= limit + poll
    (near, words), *more = told
    assert not more and 0.8 * limit - 0.01 <= near <= 0.8 * limit + poll
    assert words.startswith("the run has cost $") and words.endswith(
        f"of its budget.max_usd ${limit:,.2f}"
    )


def test_a_clock_that_is_set_back_does_not_hide_what_is_spent(tmp_path: Path) -> None:
    run, config = Run(tmp_path), config_of("llama-3-8b-p5", "budget.max_usd=55")
    run.events.mkdir(parents=True)
    append_line(
        run.events / "launcher-a.jsonl", {"event": "launched", "time": 1e9 - 9 * HOUR, "nodes": 1}
    )
    moments = [1e9, 1e9 - HOUR]
    costs = Budget(
        run,
        replace(config, budget=replace(config.budget, max_usd=1e6)),
        P5,
        clock=lambda: moments.pop(0),
    )
    assert not costs.is_spent()
    costs.limit = 55.0
    assert costs.is_spent()


def test_a_run_that_has_cost_its_limit_is_not_begun_again(tmp_path: Path) -> None:
    run, config = Run(tmp_path / "dear"), config_of("llama-3-8b-p5", "budget.max_usd=55")
    Budget(run, config, P5).require()
    run.events.mkdir(parents=True)
    append_line(run.events / "launcher-a.jsonl", {"event": "launched", "time": 0.0, "nodes": 2})
    append_line(run.events / "launcher-a.jsonl", {"event": "stopped", "time": HOUR})
    with pytest.raises(ConfigError, match=r"dear has cost \$110.08 already; its limit is \$55.00"):
        Budget(run, config, P5).require()
    Budget(run, replace(config, budget=replace(config.budget, max_usd=200.0)), P5).require()


def test_a_run_is_asked_to_stop_before_its_machines_are_taken_back(tmp_path: Path) -> None:
    run, config = Run(tmp_path), config_of("llama-3-8b-p5", "")
    run.record("launched", nodes=8)
    request, said = (
        Request(Job("train", "x", run.folder, 1, 1, "m", (), True), (Artifact("node-0.sh", "x"),)),
        list[str](),
    )
    ends = time.time() + 301.0  # a second from the moment at which it has to save
    watch = Watch(
        Hosts(run),
        Here(run),
        run,
        Interrupts(),
        lambda waits: None,
        said.append,
        Budget(run, config, P5),
        ends=ends,
    )  # type: ignore[arg-type]
    MonitoredAttempt(watch, request).follow()
    assert (
        run.stop.exists()
        and said[0].startswith("the capacity block ends soon; next: run make setup")
        and watch.backend.looks > 2
    )  # type: ignore[attr-defined]
