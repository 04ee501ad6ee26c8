"""What tokenize and train share: carry a request out under its folder's lock, show it, and judge it when it fails."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .. import runs
from ..backends import backend_of
from ..config import Config, dump_resolved
from ..config.refit import smaller
from ..errors import BackendError
from ..lease import Office
from ..plan.job import Job, tokenize_job, train_job
from ..plan.plan import Plan
from ..plan.request import Request
from ..report.live import Live, TokenizeLive
from ..report.summary import status
from ..watch.attempts import persevere
from ..watch.budget import Budget
from ..watch.follow import Follower
from ..watch.interrupts import Interrupts

TAKEOVER = 20.0  # seconds that a launcher which has lost its office gets to be gone
STOPPED = 130  # the exit code of a command that was stopped, as a shell gives it after Ctrl-C


class JobFailed(BackendError):
    """A job ended badly; its verdict is the message."""


@contextmanager
def in_charge(config: Config, run: runs.Run) -> Iterator[Office]:
    """Holds the run's lock, or refuses because another command is at work in it; on a fleet, holds the launcher's office too."""
    office = Office(run.folder)
    if not config.fleet.reached_by_ssh:
        with held(run):
            yield office
        return
    with office, held(run, patience=TAKEOVER):  # the office first: it makes a launcher leave that was wrongly taken for dead
        yield office


@contextmanager
def held(run: runs.Run, patience: float = 0.0) -> Iterator[None]:
    """Holds the lock of the run's folder, for which it waits so many seconds.

    Raises:
        BackendError: another command is at work in it.
    """
    deadline = time.monotonic() + patience
    while (lock := runs.take_lock(run.folder)) is None and time.monotonic() < deadline:
        time.sleep(0.5)
    if lock is None:
        what, next = f"the run {run.name} is running already", "make logs FOLLOW=1 shows it, make stop ends it"
        raise BackendError(what, where=str(run.folder), next=next)
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


def hand_over(verb: str, plan: Plan, started: float, summarize: bool = False) -> int:
    """Gives a verb to the head of the fleet; its exit code there. `summarize`: when it has ended, the run is summed up."""
    from .away import carry_away  # loads SSH

    return carry_away(verb, plan, started, summarize)


def carry(plan: Plan, request: Request, interrupts: Interrupts, live: Live | TokenizeLive) -> bool:
    """Whether every node ended well; False when it was stopped before that.

    Raises:
        JobFailed: with the verdict.
    """
    run = runs.run_of(plan.config.name)
    choices = {config.fleet.nodes: config for config in (plan.config, *smaller(plan.config))}
    follower = Follower(backend_of(plan.config), run, interrupts, live.update, live.line.say, Budget(run, plan.config))
    with live:
        verdict = persevere(
            follower, request, [_job(request, config) for config in choices.values()], lambda job: refit(run, choices[job.nodes])
        )
    if interrupts.count > 1 or (follower.asked and not request.job.torchrun):
        return False
    if verdict:
        raise JobFailed(str(verdict))
    return True


def _job(request: Request, config: Config) -> Job:
    return train_job(config) if request.job.kind == "train" else tokenize_job(config)


def refit(run: runs.Run, config: Config) -> None:
    """Has the ranks go on with this config."""
    runs.write_atomic(run.config, dump_resolved(config))
    run.update_results(nodes=config.fleet.nodes, world_size=config.world_size)


def tokenize(plan: Plan, request: Request, interrupts: Interrupts) -> bool:
    """Whether the dataset is whole now; False after a stop."""
    if runs.is_locked(request.job.folder):  # its node 0 holds the lock, on whatever machine that is
        raise BackendError(
            f"another command is tokenizing {request.job.name}", where=str(request.job.folder), next="wait for it, or make stop"
        )
    return carry(plan, request, interrupts, TokenizeLive(request.job.folder, plan.config.data.store))
