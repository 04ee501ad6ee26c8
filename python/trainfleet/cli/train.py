"""make train: tokenizes what is not tokenized yet, trains from the newest checkpoint to train.steps, reports."""

from __future__ import annotations

import time

from .. import runs
from ..config import dump_resolved
from ..errors import TrainfleetError
from ..plan.plan import Plan
from ..report import html, plots
from ..report.live import Live
from ..report.summary import print_summary
from ..runs import Run
from ..watch.interrupts import Interrupts
from . import carry
from .settings import plan_for
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    plan = plan_for(variables)
    run = runs.run_of(plan.config.name)
    if finished(plan, run):
        steps = plan.config.train.steps
        print(f"{run.name} is finished: all {steps:,} steps are done")
        print(f"next: make sample, or train on: make train SET='train.steps={2 * steps}'")
        return 0
    with carry.held(run.folder, f"the run {run.name}"), Interrupts() as interrupts:
        try:
            return launch(plan, run, interrupts, started)
        except TrainfleetError:
            report(run, "failed")
            raise
        finally:
            run.stop.unlink(missing_ok=True)


def finished(plan: Plan, run: Run) -> bool:
    """Whether the run has done all the steps that the config asks for."""
    results = run.read_results()
    return results.get("status") == "finished" and int(results.get("steps", 0)) >= plan.config.train.steps


def launch(plan: Plan, run: Run, interrupts: Interrupts, started: float) -> int:
    """The command's exit code, once nothing of the run is running any more."""
    config = plan.config
    run.stop.unlink(missing_ok=True)
    runs.write_atomic(run.config, dump_resolved(config))
    run.update_results(
        name=run.name,
        started=started,
        status="running",
        backend=config.fleet.backend,
        nodes=config.fleet.nodes,
        world_size=config.world_size,
        restarts=0,
    )
    seconds = {}
    for request in plan.requests:
        began = time.time()
        if request.job.kind == "tokenize":
            done = carry.tokenize(plan, request, interrupts)
            seconds["tokenize"] = round(time.time() - began, 2)
        else:
            run.record("launched", nodes=request.job.nodes, ranks_per_node=request.job.ranks_per_node)
            done = carry.carry(plan, request, interrupts, Live(run, config.train.steps))
        if not done:
            return conclude(run, "stopped", seconds)
    return conclude(run, str(run.read_results()["status"]), seconds)


def conclude(run: Run, status: str, seconds: dict[str, float]) -> int:
    """Writes the last word to results.json, draws the report and prints the summary."""
    run.update_results(seconds=run.read_results().get("seconds", {}) | seconds)
    report(run, status)
    print_summary(run)
    return 0 if status == "finished" else carry.STOPPED


def report(run: Run, status: str) -> None:
    """Leaves the status in results.json, and the plots and report.html of what has been logged, also of a run that failed."""
    run.update_results(status=status)
    if run.metrics.exists():
        plots.draw(run)
        html.write(run)
