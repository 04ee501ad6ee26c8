"""Executes a plan on the machine that launches: under the run's lock, with live progress, and a verdict when it fails."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TextIO

from .. import runs
from ..backends import Backend, backend_of
from ..backends.base import Can, Handle, load_job
from ..backends.place import Place
from ..config import Config, dump_resolved
from ..config.refit import smaller
from ..errors import BackendError, JobFailed
from ..lease import SUCCEEDS, Lease, led_already, newest_holder
from ..plan.job import Job, tokenize_job, train_job
from ..plan.plan import Plan
from ..plan.request import Request
from ..report.live import Live, TokenizeLive
from ..report.summary import status
from ..seat import require_numbers
from ..watch.attempts import ASK_AGAIN, PATIENCE, first_that_fits, persevere
from ..watch.budget import Budget
from ..watch.follow import ENDS, Follower, Sequel
from ..watch.interrupts import Interrupts
from .intending import leads

HEAD = "TRAINFLEET_HEAD"  # set for what runs on a fleet's head (backends/ssh.py)
COMPILES = 14400.0  # seconds that compiling one program takes at most
STOPPED = 130  # the exit code of a command that was stopped, as a shell gives it after Ctrl-C


@contextmanager
def in_charge(config: Config, run: runs.Run, place: Place) -> Iterator[Lease]:
    """Holds the lock of a run of this machine, or the lease of any other; refuses where another command is at work in it.

    The lease alone decides who leads a run of other machines. Its lock is taken beside that where it is to be had, for commands
    of this machine that look for it (runs.is_locked).
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
            place.refresh()  # its last words
        except BackendError as error:
            print(f"warning: others do not see how it ended: {error}", file=sys.stderr)


@contextmanager
def held(run: runs.Run) -> Iterator[None]:
    """Holds the lock of the run's folder; BackendError where another command has it."""
    if (lock := runs.take_lock(run.folder)) is None:
        raise led_already(run.name, str(run.folder))
    with lock:
        yield


def _attended(backend: Backend, lease: Lease) -> AbstractContextManager[object]:
    """On a fleet's head: another host stands by; elsewhere nothing."""
    if HEAD not in os.environ:
        return nullcontext()
    from .succession import kept  # loads SSH

    return kept(backend, lease)


def _lock_beside(run: runs.Run) -> AbstractContextManager[TextIO | None]:
    """The lock, where it is free and the file system has locks."""
    with suppress(OSError):
        return runs.take_lock(run.folder) or nullcontext()
    return nullcontext()


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


def end_remains(run: runs.Run, place: Place, backend: Backend) -> None:
    """Ends what is left on the nodes of a finished run whose launcher was killed before it did that: a frozen agent, say."""
    holder, job = newest_holder(run.folder), load_job(run)
    if job and holder and holder.code is None and not place.is_running():
        backend.stop(job[0], at_once=True)


def left_running(config: Config, run: runs.Run) -> tuple[Handle, Request] | None:
    """The job that an earlier launcher submitted, if all of it still runs."""
    job = load_job(run)
    if job is None:
        return None
    status = backend_of(config).status(job[0])
    return None if status.ended or status.failed else job


def take_over(plan: Plan, run: runs.Run, interrupts: Interrupts) -> Plan | None:
    """The plan of a launcher whose predecessor died, if possible without the hosts that are gone; None after a stop.

    Whoever took over waits for missing hosts, as a launcher does that loses them (watch/attempts.py).

    Raises:
        JobFailed: too few have come back in time.
        BackendError: a command that was typed finds too few.
    """
    backend, job, deadline, said = backend_of(plan.config), load_job(run), time.monotonic() + PATIENCE, False
    number = job[1].job.attempt + 1 if job else 1
    while True:
        lost = backend.status(job[0]).lost if job else {}
        without = {job[1].host(node): why for node, why in lost.items()} if job else {}
        try:
            found = [first_that_fits(backend, _jobs_of(plan, each, number), [without, {}]) for each in plan.requests]
            return replace(plan, requests=tuple(found))
        except BackendError as error:
            if SUCCEEDS not in os.environ:
                raise
            if time.monotonic() > deadline:
                raise JobFailed(error.what, where=error.where, why=error.why, next=error.next) from error
            if not said:
                print(f"waiting for nodes: {error}", flush=True)
            said = True
        if interrupts.count or run.is_asked_to_stop():
            return None
        time.sleep(ASK_AGAIN)


def _jobs_of(plan: Plan, request: Request, attempt: int) -> list[Job]:
    """The request's job, and the same for fewer nodes where the config allows that."""
    fewer = [train_job(config) for config in smaller(plan.config)] if request.job.kind == "train" else []
    return [replace(job, launch=request.job.launch, attempt=attempt) for job in (request.job, *fewer)]


def execute(
    plan: Plan, request: Request, place: Place, interrupts: Interrupts, live: Live | TokenizeLive, lease: Lease,
    running: Handle | None = None, sequel: Sequel | None = None,
) -> bool:  # fmt: skip
    """Whether every node ended well; False when it was stopped before that. `running`: the job has been submitted already.

    Raises:
        JobFailed: with the verdict.
    """
    run, backend = runs.run_of(plan.config.name), backend_of(plan.config)
    choices = {config.fleet.nodes: config for config in (plan.config, *smaller(plan.config))}
    jobs = [train_job(config) if request.job.kind == "train" else tokenize_job(config) for config in choices.values()]
    budget = Budget(run, plan.config, backend.bill())

    def show(waits_for: str = "") -> None:
        live.update(waits_for)
        interrupts.signalled |= live.line.unread  # as when its terminal is closed

    follower = Follower(backend, place, run, interrupts, show, live.line.say, budget)
    if isinstance(live, TokenizeLive):
        follower.progress = lambda: live.progress
    if request.job.ahead:  # what compiles says little
        follower.progress, follower.still = (lambda: sum(runs.size_of(log) for log in request.logs)), COMPILES
    refit_fewer(run, plan.config, choices.get(request.job.nodes))
    require_numbers(ENDS)
    follower.ends = float(os.environ[ENDS]) if ENDS in os.environ else None
    follower.kind = plan.config.fleet.node_type
    follower.confirm, follower.standby = lease.confirm, lambda: lease.standby
    if Can.LEAVE_OUT in backend.can:
        from .succession import sharpen  # loads SSH

        sharpen(follower)
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


def refit_fewer(run: runs.Run, asked: Config, found: Config | None) -> None:
    """Makes the ranks continue on fewer nodes than the config asks for, where a successor has found so few."""
    if found and found != asked:
        refit(run, found)


def tokenize(
    plan: Plan, request: Request, place: Place, interrupts: Interrupts, lease: Lease, running: Handle | None = None
) -> bool:
    """Whether the dataset is whole now; False after a stop."""
    if not running and runs.is_locked(request.job.folder):  # its node 0 holds the lock, on whatever machine that is
        what, where = f"another command is tokenizing {request.job.name}", str(request.job.folder)
        raise BackendError(what, where=where, next="wait for it, or make stop")
    return execute(plan, request, place, interrupts, TokenizeLive(request.job.folder, plan.config.data.store), lease, running)
