"""What tokenize and train share: carry a request out under its folder's lock, show it, and judge it when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .. import runs
from ..backends import backend_of
from ..config import Config, dump_resolved
from ..config.refit import smaller
from ..errors import BackendError
from ..plan.job import Job, tokenize_job, train_job
from ..plan.plan import Plan
from ..plan.request import Request
from ..report.live import Live, TokenizeLive
from ..watch.attempts import persevere
from ..watch.follow import Follower
from ..watch.interrupts import Interrupts

STOPPED = 130  # the exit code of a command that was stopped, as a shell gives it after Ctrl-C


class JobFailed(BackendError):
    """A job ended badly; its verdict is the message."""


@contextmanager
def held(folder: Path, what: str) -> Iterator[None]:
    """Holds the folder's lock, or refuses because another command is at work in it."""
    lock = runs.take_lock(folder)
    if lock is None:
        raise BackendError(f"{what} is running already", where=str(folder), next="make logs FOLLOW=1 shows it, make stop ends it")
    with lock:
        yield


def carry(plan: Plan, request: Request, interrupts: Interrupts, live: Live | TokenizeLive) -> bool:
    """Whether every node ended well; False when it was stopped before that.

    Raises:
        JobFailed: with the verdict.
    """
    run = runs.run_of(plan.config.name)
    choices = {config.fleet.nodes: config for config in (plan.config, *smaller(plan.config))}
    follower = Follower(backend_of(plan.config.fleet.backend), run, interrupts, live.update, live.line.say)
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
    return carry(plan, request, interrupts, TokenizeLive(request.job.folder))
