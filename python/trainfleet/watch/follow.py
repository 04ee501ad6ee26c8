"""Carries one attempt of a request out and stays with it: shows progress, passes stops on, ends all when one part has failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..backends.base import Backend, Status
from ..plan.request import Request
from ..runs import Run
from ..watchdog import Alarm, Sentry
from .budget import Budget
from .interrupts import Interrupts

POLL = 0.2  # seconds
FAILED_GRACE = 3.0  # seconds that the other nodes get, once one has failed, to say why they fail too


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: its last status, and the alarm that ended it, if one did."""

    status: Status
    alarm: Alarm | None

    @property
    def failed(self) -> bool:
        return self.alarm is not None or self.status.failed


@dataclass
class Follower:
    """Stays with the attempts of one request's job."""

    backend: Backend
    run: Run
    interrupts: Interrupts
    show: Callable[[], None]
    say: Callable[[str], None]
    budget: Budget
    asked: bool = False

    def carry_out(self, request: Request, attempt: int) -> Outcome:
        """The outcome of one attempt; when this returns or raises, nothing of it runs on any node that can be reached."""
        ranks = request.job.nodes * request.job.ranks_per_node
        sentry = Sentry(self.run.folder, ranks, attempt) if request.job.torchrun else None
        handle = self.backend.submit(request)
        try:
            return self._stay(handle, request, sentry)
        finally:
            self.backend.stop(handle)

    def _stay(self, handle: Any, request: Request, sentry: Sentry | None) -> Outcome:
        failed_at, alarm = None, None
        while (status := self.backend.status(handle)).running:
            self.show()
            if self._stops(handle, request):
                break
            alarm = sentry.look() if sentry and not status.failed else None
            if alarm:
                status = self.backend.status(handle)  # a node that is lost explains a silent rank
                break
            if status.failed:
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > FAILED_GRACE:
                    break
            if sentry:
                self._note_slow(sentry)
            time.sleep(POLL)
        self.show()
        return Outcome(status, alarm)  # as it was before the rest were stopped: that they were killed says nothing

    def _stops(self, handle: Any, request: Request) -> bool:
        """Passes a request to stop on; whether it was the second one, which ends all at once."""
        if self.interrupts.count > 1:
            self.say("stopping now, as asked twice")
            return True
        if not self.asked and (self.interrupts.count or self.run.stop.exists() or self._is_spent()):
            self.asked = True
            gently = "stopping at the next step, with a checkpoint (Ctrl-C again: at once)"
            self.say(gently if request.job.torchrun else "stopping")
            self.run.stop.touch() if request.job.torchrun else self.backend.ask_to_stop(handle)
        return False

    def _is_spent(self) -> bool:
        if spent := self.budget.is_spent():
            self.say(f"the run has cost ${self.budget.limit:,.2f}, its budget.max_usd")
        return spent

    def _note_slow(self, sentry: Sentry) -> None:
        for beat in sentry.newly_slow():
            self.run.record("slow", rank=beat.rank, node=beat.node, step=beat.step, busy_seconds=beat.busy_seconds)
