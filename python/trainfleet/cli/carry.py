"""What tokenize and train share: carry a request out under its folder's lock, show it, and judge it when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .. import runs
from ..backends import backend_of
from ..errors import BackendError
from ..plan.plan import Plan
from ..plan.request import Request
from ..report.live import Live, TokenizeLive
from ..watch.follow import carry_out
from ..watch.interrupts import Interrupts
from ..watch.verdict import judge, mark

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
    before = mark(request)
    run = runs.run_of(plan.config.name)
    backend = backend_of(plan.config.fleet.backend)
    with live:
        status = carry_out(backend, request, run.stop, interrupts, live.update, live.line.say)
    asked = interrupts.count > 0 or run.stop.exists()
    if interrupts.count > 1 or (asked and not request.job.torchrun):
        return False
    if status.failed:
        verdict = judge(request, status, run.events, before)
        run.record("verdict", who=verdict.who, cause=verdict.cause)
        raise JobFailed(str(verdict))
    return True


def tokenize(plan: Plan, request: Request, interrupts: Interrupts) -> bool:
    """Whether the dataset is whole now; False after a stop."""
    if runs.is_locked(request.job.folder):  # its node 0 holds the lock, on whatever machine that is
        raise BackendError(
            f"another command is tokenizing {request.job.name}", where=str(request.job.folder), next="wait for it, or make stop"
        )
    return carry(plan, request, interrupts, TokenizeLive(request.job.folder))
