"""Queues training behind the job that compiles for it: the engine starts it once that has
succeeded, with or without a launcher.

The launcher follows the job that compiles; then `train` finds the other one submitted, as if by a
launcher before it. Each attempt to compile is another job, so training is queued behind each of
them. If none ends well, or somebody stops either of the two, training is taken back.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from ..backends import backend_of
from ..backends.base import Can, Handle, save_job
from ..config import Config, Derivation
from ..health import fence
from ..plan.plan import Plan
from ..run.run_folder import run_of
from ..watch.monitor import Sequel
from . import execution, training
from .command import plan_of


def can_wait(config: Config) -> bool:
    """Tells whether training can wait in the queue: on an engine that has one and is asked from
    here.
    """
    backend = backend_of(config)
    return Can.FOLLOWS in backend.can and not backend.hands_over


def is_in_queue(config: Config) -> bool:
    """Tells whether training is in the queue already, or runs: its compiling has been seen to."""
    return can_wait(config) and execution.left_running(config, run_of(config.name)) is not None


class ChainedTraining:
    """The training of a config, while it waits behind a job. `started`: when the command began,
    unix time.
    """

    def __init__(self, config: Config, derived: Derivation, started: float) -> None:
        self.config, self.derived, self.started = config, derived, started
        self.run, self.backend = run_of(config.name), backend_of(config)
        self.begun = False
        self.submitted: Handle | None = None

    @property
    def sequel(self) -> Sequel | None:
        """Returns the sequel for the follower of the job before it; None if it can't wait."""
        return Sequel(self.queue, self.is_asked_to_stop) if can_wait(self.config) else None

    def is_asked_to_stop(self) -> bool:
        return self.begun and self.run.is_asked_to_stop()

    def queue(self, first: Handle) -> None:
        """Submits it, to begin once `first` has ended well, in the place of what waited for an
        earlier attempt.

        Raises:
            ConfigError, RunError, BackendError: it can't be trained; `train` would refuse the same.
        """
        if self.is_asked_to_stop():  # and so is what it follows
            return
        if self.submitted:
            self.backend.stop(self.submitted, at_once=True)
        plan, place = (
            plan_of(self.config, self.derived, launch=secrets.token_hex(8)),
            self.backend.place(self.run),
        )
        place.refresh()
        training.require_same(plan.config, self.run)
        if execution.is_finished(plan, self.run):
            return
        training.require_able(plan.config, self.run)
        with execution.in_charge(plan.config, self.run, place) as lease:
            self._submit(plan, first)
            lease.leave()
        print(f"{self.run.name} is queued behind it", flush=True)

    def _submit(self, plan: Plan, first: Handle) -> None:
        request = backend_of(plan.config).plan(replace(plan.requests[-1].job, after=first.id), {})
        self.begun = True
        training.prepare(plan, self.run)
        training.describe(plan, self.run, self.started, restarts=0, status="running")
        execution.record_launch(self.run, request)
        request = request.with_environment({fence.VARIABLE: str(fence.begin(self.run.folder))})
        self.submitted = self.backend.submit(request)
        save_job(self.run, self.submitted, request)
        status = self.backend.status(self.submitted)
        self.run.note("queued", phase=status.phase.value, reason=status.reason)

    def withdraw(self, status: str) -> None:
        """Takes it back, where it waits, and leaves `status` in its results."""
        if self.submitted:
            self.backend.stop(self.submitted, at_once=True)
        if self.begun:
            self.run.stop.unlink(missing_ok=True)
            training.report(self.run, self.config, status)
