"""Executes a plan on the machine that launches: under the run's lock, with live progress, and a verdict when it fails."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from .. import runs
from ..backends import backend_of, lingers
from ..backends.base import Handle, load_job
from ..backends.place import Place, led_already
from ..config import Config, dump_resolved
from ..config.refit import smaller
from ..errors import BackendError, JobFailed
from ..lease import Lease
from ..plan.job import tokenize_job, train_job
from ..plan.plan import Plan
from ..plan.request import Request
from ..report.live import Live, TokenizeLive
from ..report.summary import status
from ..seat import require_numbers
from ..watch.attempts import persevere
from ..watch.budget import Budget
from ..watch.follow import ENDS, Follower, Sequel
from ..watch.interrupts import Interrupts
from .intending import leads

TAKEOVER = 20.0  # seconds for a launcher that has lost its lease to be gone
COMPILES = 14400.0  # seconds that compiling one program takes at most
STOPPED = 130  # the exit code of a command that was stopped, as a shell gives it after Ctrl-C


@contextmanager
def in_charge(config: Config, run: runs.Run, place: Place) -> Iterator[Lease]:
    """Holds the run's lock, or refuses because another command is at work in it.

    Where nodes share the folder with other machines than this, it holds the launcher's lease too.
    """
    place.lead()
    lease = Lease(run.folder)
    try:
        if backend_of(config).is_here:
            with held(run):
                leads(run)
                yield lease
            return
        with lease, held(run, patience=TAKEOVER):  # the lease first: it makes a launcher leave that was wrongly taken for dead
            leads(run)
            yield lease
    finally:
        try:
            place.refresh()  # its last words
        except BackendError as error:
            print(f"warning: others do not see how it ended: {error}", file=sys.stderr)


@contextmanager
def held(run: runs.Run, patience: float = 0.0) -> Iterator[None]:
    """Holds the lock of the run's folder, waiting up to `patience` seconds; BackendError where another command has it."""
    deadline = time.monotonic() + patience
    while (lock := runs.take_lock(run.folder)) is None and time.monotonic() < deadline:
        time.sleep(0.5)
    if lock is None:
        raise led_already(run, str(run.folder))
    with lock:
        yield


def warn(plan: Plan) -> None:
    """Says what of the data is not as it should be, before the work begins."""
    for note in plan.notes:
        if note.startswith("warning:"):
            print(note, file=sys.stderr)


def is_finished(plan: Plan, run: runs.Run) -> bool:
    """Whether the run has done all the steps that the config asks for."""
    results = run.read_results()
    return results.get("status") == "finished" and int(results.get("steps", 0)) >= plan.config.train.steps


def say_finished(plan: Plan, run: runs.Run) -> int:
    """Says that nothing is left to do, how the run ended and how to go on; the exit code."""
    print(f"nothing is left to do: train.steps is {plan.config.train.steps:,}\n{status(run)}")
    return 0


def left_running(config: Config, run: runs.Run) -> tuple[Handle, Request] | None:
    """The job that an earlier launcher submitted, if all of it still runs."""
    job = load_job(run)
    if job is None:
        return None
    status = backend_of(config).status(job[0])
    return None if status.ended or status.failed else job


def take_over(plan: Plan, run: runs.Run) -> Plan:
    """The plan of a launcher whose predecessor died: without the hosts that are gone."""
    backend, job = backend_of(plan.config), load_job(run)
    lost = backend.status(job[0]).lost if job else {}
    without = {job[1].host(node): why for node, why in lost.items()} if job else {}
    attempt = job[1].job.attempt + 1 if job else 1
    jobs = [replace(request.job, attempt=attempt) for request in plan.requests]
    return replace(plan, requests=tuple(backend.plan(job, without) for job in jobs))


def execute(
    plan: Plan, request: Request, place: Place, interrupts: Interrupts, live: Live | TokenizeLive, running: Handle | None = None,
    sequel: Sequel | None = None,
) -> bool:  # fmt: skip
    """Whether every node ended well; False when it was stopped before that. `running`: the job has been submitted already.

    Raises:
        JobFailed: with the verdict.
    """
    run, backend = runs.run_of(plan.config.name), backend_of(plan.config)
    choices = {config.fleet.nodes: config for config in (plan.config, *smaller(plan.config))}
    jobs = [train_job(config) if request.job.kind == "train" else tokenize_job(config) for config in choices.values()]
    budget = Budget(run, plan.config, backend.price(), lingers(plan.config))

    def show(waits_for: str = "") -> None:
        live.update(waits_for)
        interrupts.signalled |= live.line.unread  # as when its terminal is closed

    follower = Follower(backend, place, run, interrupts, show, live.line.say, budget)
    if isinstance(live, TokenizeLive):
        follower.progress = lambda: live.progress
    if request.job.ahead:  # what compiles says little
        follower.progress, follower.still = (lambda: sum(runs.size_of(log) for log in request.logs)), COMPILES
    require_numbers(ENDS)
    follower.ends = float(os.environ[ENDS]) if ENDS in os.environ else None
    follower.kind = plan.config.fleet.node_type
    follower.replaces, follower.sequel = plan.config.fleet.slow == "replace", sequel
    with live:
        verdict = persevere(follower, request, jobs, lambda job: refit(run, choices[job.nodes]), running)
    if interrupts.count > 1 or (follower.asked and not request.job.beats):
        return False
    if verdict:
        raise JobFailed(str(verdict))
    return True


def refit(run: runs.Run, config: Config) -> None:
    """Makes the ranks continue with this config."""
    runs.write_atomic(run.config, dump_resolved(config))
    run.update_results(nodes=config.fleet.nodes, world_size=config.world_size)


def tokenize(plan: Plan, request: Request, place: Place, interrupts: Interrupts, running: Handle | None = None) -> bool:
    """Whether the dataset is whole now; False after a stop."""
    if not running and runs.is_locked(request.job.folder):  # its node 0 holds the lock, on whatever machine that is
        what, where = f"another command is tokenizing {request.job.name}", str(request.job.folder)
        raise BackendError(what, where=where, next="wait for it, or make stop")
    return execute(plan, request, place, interrupts, TokenizeLive(request.job.folder, plan.config.data.store), running)
