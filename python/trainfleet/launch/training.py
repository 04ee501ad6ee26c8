"""Tokenizes and trains according to a plan, from launch to report, on the launching machine."""

from __future__ import annotations

import sys
import time

from ..backends import backend_of
from ..backends.base import Can, Handle
from ..backends.run_storage import Place
from ..checkpoints.store import CheckpointStore
from ..config import Config, dump_resolved, load_resolved, platforms
from ..data import description
from ..data.dataset import find
from ..health.lease import LEFT, Holder
from ..plan.job import Request
from ..plan.plan import Plan
from ..process import install_paths
from ..process.processes import Interrupts, run_module
from ..report import html, measurements, plots
from ..report.summary import print_summary
from ..run import run_folder
from ..run.run_folder import Run
from ..storage.s3 import SCHEME
from ..trust.errors import ConfigError, InputError, JobFailed, RunError, TrainfleetError
from ..watch.budget import Budget
from ..watch.monitor import CutOff, Sequel
from ..watch.time_accounting import goodput, ledger
from . import execution, preflight
from .command import was_handed_over
from .execution import Launch
from .launching import launching

NOTHING = "nothing was compiled: neuron_parallel_compile reported no result for any program"


def train(plan: Plan, started: float, summarize: bool = True, sequel: Sequel | None = None) -> int:
    """Trains according to a plan. Returns the exit code. `summarize` prints a summary after the
    run.
    """
    with launching(plan.config, "train"):
        run, backend = run_folder.run_of(plan.config.name), backend_of(plan.config)
        if backend.hands_over:
            from .remote_launch import hand_over  # Deferred because it imports SSH modules.

            return hand_over("train", plan, started, summarize)
        place = backend.place(run)
        place.refresh()
        require_same(plan.config, run)
        if execution.is_finished(plan, run):
            return _finish_again(plan, run, place)
        require_able(plan.config, run)
        with execution.in_charge(plan.config, run, place) as lease, Interrupts() as interrupts:
            code = _led(Launch(plan, place, lease, interrupts, started, sequel))
            if code is None:
                return LEFT
            lease.code = code
        # On a head, the command on the user's machine prints the summary.
        if summarize and (backend.is_here or Can.SHARED not in backend.can):
            print_summary(run)
        return lease.code


def require_same(config: Config, run: Run) -> None:
    """Checks that the run can continue with this config, by the same rules as its ranks. Does not
    modify the run folder.

    Raises:
        RunError: the config has incompatible changes. The error lists them.
    """
    # The plan doesn't query S3, so if the run's checkpoints are there, print the config changes
    # here.
    in_bucket = (config.checkpoint.path or "").startswith(SCHEME)
    for line in preflight.resumption(config, run):
        print(f"{line}\n" * in_bucket, end="")


def mend_finished(plan: Plan, run: Run) -> None:
    """Rewrites a finished run's missing or damaged config.yaml, because commands that load the
    model need it.

    Raises:
        RunError: all of the run's checkpoints are gone.
    """
    saved = str(run.read_results().get("last_checkpoint") or "")
    if saved and not CheckpointStore(saved.rpartition("/")[0]).steps():
        raise RunError(
            "the run is finished, but its checkpoints are gone",
            where=str(run.folder),
            why=f"the last checkpoint was {saved}",
            next="restore them, or run make clean PURGE=1 and make train to train again",
        )
    try:
        load_resolved(run.config)
    except ConfigError:
        prepare(plan, run)


def require_able(config: Config, run: Run) -> None:
    """Raises ConfigError if the run's budget is exhausted, or the errors of
    `preflight.try_addresses`.
    """
    Budget(run, config, backend_of(config).bill()).require()
    preflight.try_addresses(config)


def _finish_again(plan: Plan, run: Run, place: Place) -> int:
    """Restores a finished run's config if needed, and prints that the run is finished. Returns the
    exit code.
    """
    backend = backend_of(plan.config)
    if backend.is_here:
        mend_finished(plan, run)
    else:
        execution.end_remains(run, place, backend)
    return execution.say_finished(plan, run)


def _led(launch: Launch) -> int | None:
    """Leads the run. Returns its exit code, or None if this launcher was cut off from the run."""
    try:
        return lead(launch)
    except CutOff as error:
        launch.lease.leave()
        print(error)
        return None
    except TrainfleetError:
        launch.lease.confirm()
        report(launch.run, launch.config, "failed")
        raise
    finally:
        if not launch.lease.left:  # A standby continues the run, so the request applies to it.
            launch.run.stop.unlink(missing_ok=True)
        launch.backend.learn(launch.run)


def lead(launch: Launch) -> int:
    """Leads the run until all its processes have ended. Returns the exit code."""
    run, config, predecessor = launch.run, launch.config, launch.lease.predecessor
    found = launch.following()
    if found is None:
        return conclude(run, config, "stopped", {})
    launch, running = found
    restarts = restarts_of(run, None if running else predecessor)
    if not running:
        prepare(launch.plan, run)
    # The ranks report the status of a job that is already running.
    state = {} if running else {"status": "running"}
    describe(launch.plan, run, launch.started, restarts=restarts, **state)
    launch.place.refresh()
    if not running and run.is_asked_to_stop():
        return conclude(run, config, "stopped", {})
    return carry_out(launch, running)


def carry_out(launch: Launch, running: tuple[Handle, Request] | None) -> int:
    """Executes each of the plan's requests. Returns the exit code. `running` is an earlier
    launcher's job, if any.
    """
    run, config, seconds = launch.run, launch.config, dict[str, float]()
    for request in launch.plan.requests:
        began = time.time()
        done = launch.do(request, running)
        if request.job.kind == "tokenize":
            seconds["tokenize"] = round(time.time() - began, 2)
        if not done:
            return conclude(run, config, "stopped", seconds)
    if config.train.compile_only:
        seconds["compile"] = round(time.time() - began, 2)
        require_compiled(run, request.job.ahead)
    launch.lease.confirm()
    status = str(run.read_results().get("status"))  # "running" if the job ended in the queue
    code = conclude(run, config, "stopped" if status == "running" else status, seconds)
    return export(run, config) if code == 0 and config.checkpoint.export_hf else code


def prepare(plan: Plan, run: Run) -> None:
    """Writes the config files that the ranks read at startup. Keeps any stop request in the run
    folder, because it is newer than the command (launch/launching.py).
    """
    run_folder.write_atomic(run.config, dump_resolved(plan.config))
    if not was_handed_over():  # On a head, the file arrived with the requests.
        run_folder.write_atomic(run.given, plan.asked)


def describe(plan: Plan, run: Run, started: float, **state: object) -> None:
    """Writes the run's metadata and `state` to results.json, before the ranks start writing to
    it.
    """
    fleet, training = plan.config.fleet, plan.config.train
    versions = (run.read_results().get("versions") or {}) | {"trainfleet": install_paths.version()}
    run.update_results(
        predicted=plan.estimate.predicted(training.steps * plan.config.step_tokens),
        name=run.name,
        started=started,
        versions=versions,
        **state,
        backend=fleet.backend,
        nodes=fleet.nodes,
        world_size=plan.config.world_size,
        unattended=Can.OUTLIVES in backend_of(plan.config).can,
    )


def require_compiled(run: Run, ahead: bool) -> None:
    """Marks an ahead-of-time compile run as finished if every recorded program was compiled.

    Raises:
        JobFailed: some programs could not be compiled. The error lists the failing operators.
    """
    if not ahead:
        return
    found = measurements.compilation_of(run)
    if found.failed or not found.compiled:
        why = "\n".join(f"  {line}" for line in found.explained())
        what = (
            f"{len(found.failed)} of {len(found.compiled)} programs could not be compiled"
            if found.failed
            else NOTHING
        )
        raise JobFailed(
            f"{what}\n{why}".rstrip(), where=str(run.folder), next=f"make logs RUN={run.name}"
        )
    run.update_results(status="finished")


def restarts_of(run: Run, predecessor: Holder | None) -> int:
    """Records a restart if the previous launcher died. Returns the run's restart count, or 0 if no
    launcher died.
    """
    if predecessor is None:
        return 0
    restarts = int(run.read_results().get("restarts", 0)) + 1
    run.record(
        "restarted", attempt=restarts, cause="lost-node", who=f"the launcher on {predecessor.host}"
    )
    return restarts


def conclude(run: Run, config: Config, status: str, seconds: dict[str, float]) -> int:
    """Writes the final state to results.json and generates the report. Returns the exit code."""
    run.update_results(seconds=(run.read_results().get("seconds") or {}) | seconds)
    report(run, config, status)
    return 0 if status == "finished" else execution.STOPPED


def export(run: Run, config: Config) -> int:
    """Exports the finished model to a Hugging Face folder inside the run folder. Returns the exit
    code.
    """
    return run_module(
        "trainfleet.engine.export",
        str(run.folder),
        str(run.exported(config.train.steps)),
        platforms.HUGGINGFACE,
    )


def spending(run: Run) -> dict[str, object]:
    """Returns the run's time ledger and goodput for results.json, or {} if no time was recorded."""
    spent = ledger(run.read_events(), run.read_metrics())
    return {"ledger": spent, "goodput": goodput(spent)} if spent else {}


def report(run: Run, config: Config, status: str) -> None:
    """Writes status and cost to results.json, and generates plots and report.html from the current
    metrics. Also works for failed runs.

    A full disk only causes a warning, because `make report` can regenerate the report.
    """
    try:
        bill = backend_of(config).bill()
        spent = Budget(run, config, bill).spent()
        run.update_results(
            status=status, **spending(run), **({} if bill is None else {"usd": round(spent, 4)})
        )
        if run.metrics.exists():
            plots.draw(run)
            html.write(run)
    except (OSError, RunError, InputError) as error:
        print(
            f"warning: the report is incomplete: {error}\n  next: run df -h {run.folder}, then "
            "make report",
            file=sys.stderr,
        )


def tokenize(plan: Plan, started: float) -> int:
    """Tokenizes the sources into data/<name> according to a plan. Returns the exit code."""
    with launching(plan.config, "tokenize"):
        run = run_folder.run_of(plan.config.name)
        if backend_of(plan.config).hands_over:
            from .remote_launch import hand_over  # Deferred because it imports SSH modules.

            return hand_over("tokenize", plan, started, summarize=False)
        place = backend_of(plan.config).place(run)
        place.refresh()
        with execution.in_charge(plan.config, run, place) as lease, Interrupts() as interrupts:
            if not _is_whole(execution.Launch(plan, place, lease, interrupts, started)):
                print("stopped; finished units are kept; run make tokenize to resume")
                lease.code = execution.STOPPED
                return lease.code
            lease.code = 0
        describe_dataset(plan)
        return 0


def _is_whole(launch: execution.Launch) -> bool:
    """Returns True if all of the plan's requests have succeeded, and False after a stop request."""
    found = launch.following()
    if found is None:
        return False
    launch, running = found
    if not running:
        run_folder.write_atomic(launch.run.config, dump_resolved(launch.config))
    return all(launch.do(request, running) for request in launch.plan.requests)


def describe_dataset(plan: Plan) -> None:
    """Prints a summary of the dataset and plots its document lengths."""
    dataset = find(plan.config.data)
    assert dataset is not None
    folder = run_folder.DATA / plan.config.data.name
    plots.draw_lengths(plan.config.data.name, dataset, folder / "lengths.png")
    for name, value in [*description.table(dataset), ("lengths", str(folder / "lengths.png"))]:
        print(f"{name:>16}  {value}")
    print("next: make train")
