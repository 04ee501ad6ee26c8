"""Executes a plan as the run's launcher: holds the run's lock or lease, shows live progress, and
reports a verdict on failure.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TextIO

from ..backends import Backend, backend_of
from ..backends.base import Can, Handle, load_job
from ..backends.run_storage import Place
from ..config import Config, dump_resolved
from ..config.layouts import smaller
from ..data.dataset_store import is_busy
from ..health import faults
from ..health.lease import SUCCEEDS, Lease, led_already, newest_holder
from ..node.placement import require_numbers
from ..plan.job import Request, tokenize_job, train_job
from ..plan.plan import Plan
from ..process.processes import Interrupts
from ..report.live import Live, TokenizeLive
from ..report.summary import status
from ..run import records, run_folder
from ..trust.errors import BackendError, InputError, JobFailed
from ..watch.budget import Budget
from ..watch.monitor import ENDS, STILL, STUCK, Sequel, Watch
from ..watch.retry_loop import Attempts, first_that_fits, when_nodes_return
from .launching import leads

# Environment variable that marks processes on a fleet's head (backends/head.py).
HEAD = "TRAINFLEET_HEAD"
COMPILES = 14400.0  # maximum compile time of one program, in seconds
STOPPED = 130  # exit code after a stop, as in shells after Ctrl-C


@contextmanager
def in_charge(config: Config, run: run_folder.Run, place: Place) -> Iterator[Lease]:
    """Holds the lock of a local run, or the lease of a run on other machines. Raises BackendError
    if another command leads the run.

    For a run on other machines, only the lease decides who leads it. The lock is still taken if it
    is free, because commands on this machine check it (run_folder.is_locked).
    """
    lease, backend = Lease(run.folder), backend_of(config)
    place.lead()
    try:
        if backend.is_here:
            with held(run):
                leads(run)
                yield lease
            return
        with lease, _lock_beside(run), _attended(backend, lease):
            leads(run)
            yield lease
    finally:
        try:
            place.refresh()  # publishes the run's final state
        except BackendError as error:
            print(
                f"warning: other machines can't see the run's final state: {error}", file=sys.stderr
            )


@contextmanager
def held(run: run_folder.Run) -> Iterator[None]:
    """Holds the lock of the run's folder. Raises BackendError if another command holds the lock."""
    if (lock := run_folder.take_lock(run.folder)) is None:
        raise led_already(run.name, str(run.folder))
    with lock:
        yield


def _attended(backend: Backend, lease: Lease) -> AbstractContextManager[object]:
    """Keeps another host on standby if this process runs on a fleet's head."""
    if HEAD not in os.environ:
        return nullcontext()
    from .failover import kept  # Deferred because it imports SSH modules.

    return kept(backend, lease)


def _lock_beside(run: run_folder.Run) -> AbstractContextManager[TextIO | None]:
    """Holds the run's lock if the lock is free and the file system supports locking."""
    with suppress(OSError):
        return run_folder.take_lock(run.folder) or nullcontext()
    return nullcontext()


def warn(plan: Plan) -> None:
    """Prints the plan's warnings before work begins."""
    for note in plan.notes:
        if note.startswith("warning:"):
            print(note, file=sys.stderr)


def is_finished(plan: Plan, run: run_folder.Run) -> bool:
    """Returns whether the run has completed all of the config's steps."""
    results = run.read_results()
    return (
        results.get("status") == "finished"
        and int(results.get("steps", 0)) >= plan.config.train.steps
    )


def say_finished(plan: Plan, run: run_folder.Run) -> int:
    """Prints that the run is already finished, with its final status. Returns the exit code."""
    print(
        f"nothing to do: all {plan.config.train.steps:,} steps are done (train.steps)\n"
        f"{status(run)}"
    )
    return 0


def end_remains(run: run_folder.Run, place: Place, backend: Backend) -> None:
    """Kills a finished run's leftover processes, such as a frozen agent, if its launcher was killed
    before it could do so.
    """
    holder, job = newest_holder(run.folder), load_job(run)
    if job and holder and holder.code is None and not place.is_running():
        backend.stop(job[0], at_once=True)


def left_running(config: Config, run: run_folder.Run) -> tuple[Handle, Request] | None:
    """Returns an earlier launcher's job if all of its nodes are still running, otherwise None."""
    job = load_job(run)
    if job is None:
        return None
    status = backend_of(config).status(job[0])
    return None if status.ended or status.failed else job


def refit(run: run_folder.Run, config: Config) -> None:
    """Writes the config that the ranks continue with, for example on fewer nodes."""
    run_folder.write_atomic(run.config, dump_resolved(config))
    run.update_results(nodes=config.fleet.nodes, world_size=config.world_size)


def record_launch(run: run_folder.Run, request: Request) -> None:
    """Records the launch event, which marks when the run starts to cost money, along with the
    command's start time.
    """
    began = run.read_results().get("started") or time.time()
    run.record(
        "launched",
        nodes=request.job.nodes,
        ranks_per_node=request.job.ranks_per_node,
        started=began,
    )


@dataclass(frozen=True)
class Launch:
    """Launch of a run by the command that leads it. `started` is the command's start time in unix
    seconds. `sequel` is a job to queue behind the run's last job.
    """

    plan: Plan
    place: Place
    lease: Lease
    interrupts: Interrupts
    started: float
    sequel: Sequel | None = None

    @cached_property
    def run(self) -> run_folder.Run:
        return run_folder.run_of(self.plan.config.name)

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def backend(self) -> Backend:
        return backend_of(self.config)

    def following(self) -> tuple[Launch, tuple[Handle, Request] | None] | None:
        """Returns the launch to continue with, and an earlier launcher's job if that job is still
        running. If the earlier job has ended, the launch contains a new plan for the remaining
        hosts. Returns None after a stop request.

        Raises the errors of `take_over`.
        """
        predecessor = self.lease.predecessor
        # A launcher that fails leaves its job behind if it can't reach the scheduler.
        may_run = predecessor or Can.OUTLIVES in self.backend.can
        if may_run and (running := left_running(self.config, self.run)):
            return self, running
        # The run was stopped in the meantime, so no takeover is needed.
        if SUCCEEDS in os.environ and self.run.is_asked_to_stop():
            return None
        launch = self.take_over() if predecessor else self
        return (launch, None) if launch else None

    def take_over(self) -> Launch | None:
        """Returns the launch with a new plan after the previous launcher died, without the lost
        hosts if possible. Returns None after a stop request.

        A standby that takes over waits for missing hosts, as does a launcher that loses hosts
        (watch/retry_loop.py).

        Raises:
            JobFailed: too few hosts came back before the timeout.
            BackendError: too few hosts are available for a command that the user typed.
        """
        job = load_job(self.run)
        if SUCCEEDS not in os.environ:
            return self._without_lost(job)
        try:
            return when_nodes_return(
                lambda: self._without_lost(job), self.is_stopped, print, time.sleep
            )
        except BackendError as error:
            if self.is_stopped():
                return None
            raise JobFailed(
                error.what, where=error.where, why=error.why, next=error.next
            ) from error

    def is_stopped(self) -> bool:
        return self.interrupts.count > 0 or self.run.is_asked_to_stop()

    def _without_lost(self, job: tuple[Handle, Request] | None) -> Launch:
        """Returns the launch with a plan for the next attempt, without the lost hosts."""
        number, without = 1, dict[str, str]()
        if job:
            handle, request = job
            number, lost = request.job.attempt + 1, self.backend.status(handle).lost
            without = {request.host(node): why for node, why in lost.items()}
        found = tuple(self._next(request, number, without) for request in self.plan.requests)
        return replace(self, plan=replace(self.plan, requests=found))

    def _next(self, request: Request, number: int, without: Mapping[str, str]) -> Request:
        """Replans the request's job, using fewer nodes if necessary and allowed by the config."""
        fewer = map(train_job, smaller(self.config) if request.job.kind == "train" else ())
        jobs = (
            replace(job, launch=request.job.launch, attempt=number) for job in (request.job, *fewer)
        )
        return first_that_fits(self.backend, [*jobs], [without, {}])

    def do(self, request: Request, running: tuple[Handle, Request] | None) -> bool:
        """Executes one of the plan's requests, or follows a running job of the same kind. Returns
        True if the dataset is complete or every node has succeeded, and False after a stop.
        """
        handle = None
        if running and running[1].job.kind == request.job.kind:
            handle, request = running
            how = (
                "was queued behind the compile job"
                if request.job.after
                else "is still running from the previous launch"
            )
            print(f"{self.run.name} {how}")
        if request.job.kind == "tokenize":
            return self._tokenize(request, handle)
        if not handle:
            record_launch(self.run, request)
        logged = lambda: sum(records.size_of(log) for log in request.logs)  # noqa: E731
        # A compile job prints little, so log size serves as its progress.
        told = {"progress": logged, "still": lambda: COMPILES} if request.job.ahead else {}
        live = Live(self.run, self.config.train.steps)
        return self._execute(request, live, handle, sequel=self.sequel, **told)

    def _tokenize(self, request: Request, handle: Handle | None) -> bool:
        """Executes a request to tokenize. Raises BackendError if another command is tokenizing the
        same dataset.
        """
        folder = request.job.folder
        if not handle and is_busy(folder):
            raise BackendError(
                f"another command is tokenizing {request.job.name}",
                where=str(folder),
                next="wait until it ends, or run make stop",
            )
        live = TokenizeLive(folder, self.config.data.tokenized_path)
        still = lambda: STUCK if live.progress and live.progress.bytes_total else STILL  # noqa: E731
        return self._execute(request, live, handle, progress=lambda: live.progress, still=still)

    def _execute(
        self, request: Request, live: Live | TokenizeLive, running: Handle | None, **told: Any
    ) -> bool:
        """Follows a job until it ends. `told` contains extra fields for the job's Watch.

        Raises:
            JobFailed: the job failed. The message contains the verdict.
        """
        choices = {config.fleet.nodes: config for config in (self.config, *smaller(self.config))}
        job_of = train_job if request.job.kind == "train" else tokenize_job
        found = choices.get(request.job.nodes, self.config)
        # Raises if the run's fault can't be injected at this world size.
        faults.environment(self.run.name, found.world_size, found.train.steps)
        if found != self.config:  # a standby took over with fewer nodes
            refit(self.run, found)
        watch = replace(self._watch(live), **told)
        with live:
            jobs = [job_of(config) for config in choices.values()]
            again = Attempts(watch, request, jobs, lambda job: refit(self.run, choices[job.nodes]))
            ended = again.persevere(running)
        if self.interrupts.count > 1 or (ended.asked and not request.job.beats):
            return False
        if ended.verdict:
            raise JobFailed(str(ended.verdict))
        return True

    def _watch(self, live: Live | TokenizeLive) -> Watch:
        def show(waits_for: str = "") -> None:
            with suppress(OSError, InputError):  # A file server may fail for a moment.
                live.update(waits_for)
            # A closed output pipe is treated as a closed terminal.
            self.interrupts.signalled |= live.line.unread

        require_numbers(ENDS)
        budget = Budget(self.run, self.config, self.backend.bill())
        fleet = self.config.fleet
        ends = float(os.environ[ENDS]) if ENDS in os.environ else None
        return Watch(
            self.backend,
            self.place,
            self.run,
            self.interrupts,
            show,
            live.line.say,
            budget,
            replaces=fleet.on_slow_node == "replace",
            ends=ends,
            kind=fleet.node_type,
            confirm=self.lease.confirm,
            standby=lambda: self.lease.standby,
        )
