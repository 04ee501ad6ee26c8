"""make train: tokenizes what is not tokenized yet, trains from the newest checkpoint to train.steps, reports."""

from __future__ import annotations

import sys
import time

from .. import hardware, runs
from ..backends import backend_of
from ..checkpoints import catalogue, changes
from ..checkpoints.marker import Broken
from ..checkpoints.store import store_of
from ..config import Config, dump_given, dump_resolved
from ..errors import ConfigError, InputError, Problem, RunError, TrainfleetError
from ..lease import Office, Tenure
from ..plan.plan import Plan
from ..report import html, plots
from ..report.live import Live
from ..report.summary import print_summary
from ..runs import Run
from ..watch.budget import Budget
from ..watch.interrupts import Interrupts
from . import carry
from .export import export
from .settings import plan_for
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    carry.warn(plan := plan_for(variables))
    return carry_out(plan, started)


def carry_out(plan: Plan, started: float, summarize: bool = True) -> int:
    """Trains by this plan; the command's exit code."""
    require_engine(plan.config)
    run = runs.run_of(plan.config.name)
    if not backend_of(plan.config).shares_disk:
        return carry.hand_over("train", plan, started, summarize)
    require_same(plan.config, run)
    if carry.is_finished(plan, run):
        return carry.say_finished(plan, run)
    Budget(run, plan.config).require()
    with carry.in_charge(plan.config, run) as office, Interrupts() as interrupts:
        try:
            office.code = launch(plan, run, interrupts, started, office)
        except TrainfleetError:
            report(run, plan.config, "failed")
            raise
        finally:
            run.stop.unlink(missing_ok=True)
    if summarize and not plan.config.fleet.reached_by_ssh:  # there it is printed where the command was typed
        print_summary(run)
    return office.code


def require_same(config: Config, run: Run) -> None:
    """Refuses what the ranks would: to go on with a run as another one. Its folder stays as it is.

    Raises:
        RunError: naming what differs.
    """
    store = store_of(run, config.checkpoint.destination)
    for step in reversed(store.steps()):
        try:
            commit = catalogue.read(store, step)
        except Broken:
            continue  # the ranks set it aside
        changes.check(commit, config, commit.dataset, store.address(step))
        return


def require_engine(config: Config) -> None:
    """ConfigError where nothing trains on the accelerators of the nodes yet: their CPUs must not stand in for them."""
    if device := hardware.awaited(config.fleet.instance_type):
        message = f"{config.fleet.instance_type}: training on {device.name} is not built yet; planning and setting up are"
        raise ConfigError([Problem(0, "", "fleet.instance_type", message)], next="make plan")


def launch(plan: Plan, run: Run, interrupts: Interrupts, started: float, office: Office) -> int:
    """The command's exit code, once nothing of the run is running any more."""
    config = plan.config
    restarts = take_over(run, office.predecessor) if office.predecessor else 0
    run.stop.unlink(missing_ok=True)
    runs.write_atomic(run.config, dump_resolved(config))
    runs.write_atomic(run.given, dump_given(config, list(plan.derived)))
    run.update_results(
        name=run.name,
        started=started,
        status="running",
        backend=config.fleet.backend,
        nodes=config.fleet.nodes,
        world_size=config.world_size,
        restarts=restarts,
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
            return conclude(run, config, "stopped", seconds)
    code = conclude(run, config, str(run.read_results().get("status")), seconds)
    return export(run, run.exported(config.train.steps)) if code == 0 and config.checkpoint.export else code


def take_over(run: Run, predecessor: Tenure) -> int:
    """How often the run has been restarted, now that the launcher before this one died at its work."""
    restarts = int(run.read_results().get("restarts", 0)) + 1
    run.record("restarted", attempt=restarts, cause="lost-node", who=f"the launcher on {predecessor.host}")
    return restarts


def conclude(run: Run, config: Config, status: str, seconds: dict[str, float]) -> int:
    """Writes the last word to results.json and draws the report; the exit code."""
    run.update_results(seconds=(run.read_results().get("seconds") or {}) | seconds)
    report(run, config, status)
    return 0 if status == "finished" else carry.STOPPED


def report(run: Run, config: Config, status: str) -> None:
    """Leaves status and cost in results.json, and plots and report.html of what has been logged, also of a run that failed.

    A disk that is full fails none of it: the run is what matters, and `make report` draws again.
    """
    try:
        spent = Budget(run, config).spent()
        run.update_results(status=status, **({"usd": round(spent, 4)} if spent else {}))
        if run.metrics.exists():
            plots.draw(run)
            html.write(run)
    except (OSError, RunError, InputError) as error:
        print(f"warning: the report is not whole: {error}\n  next: df -h {run.folder}, then make report", file=sys.stderr)
