"""Runs one attempt of a request and follows it: shows progress, passes stops on, ends all nodes when one part has failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from .. import fence
from ..backends.base import Backend, Handle, Phase, Status, save_job
from ..backends.place import Place
from ..errors import BackendError
from ..hardware import NodeType
from ..plan.job import Job
from ..plan.request import Request
from ..runs import Run
from ..watchdog import Alarm, Limits, Sentry
from .budget import Budget
from .interrupts import Interrupts
from .nccl import FabricLog

POLL = 0.2  # seconds
ENDS = "TRAINFLEET_ENDS"  # unix time at which all machines are reclaimed, where that is known
TO_SAVE = 300.0  # seconds before that at which a run is asked to save and stop
CONCLUDED = ("finished", "stopped")  # events of ranks that completed their work
TURNS = ("launched", "restarted", "queued", "began", *CONCLUDED)
WAITING = (Phase.QUEUED, Phase.STARTING)
STILL = 1800.0  # seconds: training a tokenizer on its sample is the longest stretch without progress
ALIVE = 5.0  # seconds without a beat after which a node that can't be reached counts as lost, and not as slow
CUT_OFF = 143  # the exit code of SIGTERM
SILENT_GRACE = 60.0  # seconds that a node which does not answer gets once the ranks are done
FAILED_GRACE = 3.0  # seconds that the other nodes get, once one has failed, to say why they fail too


class CutOff(BackendError):
    """This machine reaches no other host of the fleet, and another stands by: that one is to lead."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended: its last status, the alarm that ended it, if one did, and the nodes whose ranks still beat then.

    `concluded`: the ranks had completed their work; what happened to their nodes afterwards does not count. `cut_off`: this
    machine's name, where it reached no other host then.
    """

    status: Status
    alarm: Alarm | None
    alive: frozenset[int] = frozenset()
    concluded: bool = False
    cut_off: str = ""

    @property
    def failed(self) -> bool:
        return not self.concluded and (self.alarm is not None or self.status.failed)


@dataclass(frozen=True)
class Sequel:
    """What is to start once a job has succeeded.

    submitted         is called with the job of each attempt, as soon as that is submitted
    is_asked_to_stop  whether the sequel was, and with it what goes before
    """

    submitted: Callable[[Handle], None]
    is_asked_to_stop: Callable[[], bool]


@dataclass
class Follower:
    """Follows the attempts of one request's job."""

    backend: Backend
    place: Place
    run: Run
    interrupts: Interrupts
    show: Callable[[str], None]  # shows progress; its argument is what the job waits for, "" if nothing
    say: Callable[[str], None]
    budget: Budget
    progress: Callable[[], object] = lambda: None  # progress of a job without beats: any value that changes while it advances
    asked: bool = False
    last_progress: tuple[object, float] = (None, 0.0)  # its last value, and since when, by the monotonic clock
    seen: Status | None = None
    sentry: Sentry | None = None
    refreshed: float = 0.0  # by the monotonic clock
    replaces: bool = False  # nodes whose links slow the others down (fleet.slow)
    still: float = STILL  # seconds without a change of `progress` after which such a job counts as stalled
    ends: float | None = None  # unix time at which all machines are reclaimed
    sequel: Sequel | None = None
    trouble: bool = False  # the run folder can't be brought up to date
    kind: NodeType | None = None  # of the nodes
    nccl: FabricLog | None = None
    unreachable: frozenset[int] = frozenset()  # nodes that do not answer but whose ranks still beat
    confirm: Callable[[], None] = lambda: None  # ends this process where another launcher has taken over
    cut_off: Callable[[Handle], str] = lambda handle: ""  # this machine's name, where it reaches no other host of a job
    absent: Callable[[Sequence[str]], Mapping[int, str]] = lambda hosts: {}  # nodes on these that do not answer, and why
    standby: Callable[[], str] = lambda: ""  # the host that stands by, as far as this machine sees it

    def run_attempt(self, request: Request, running: Handle | None = None) -> Outcome:
        """The outcome of one attempt; when this returns or raises, no process of it is left on any reachable node."""
        self.seen = self.sentry = None
        self.unreachable, self.last_progress = frozenset(), (None, time.monotonic())
        self.place.refresh()
        self.confirm()
        handle = running or self.backend.submit(request)
        try:
            save_job(self.run, handle, request)
            if self.sequel:
                self.sequel.submitted(handle)
            outcome = self._stay(handle, request)
            self.place.refresh()
            if outcome.failed:
                self._supplement(request)
            if outcome.concluded:
                self._await_silent(handle, request, outcome.status.silent)
            return outcome
        finally:
            self.confirm()
            self.backend.stop(handle, at_once=True)

    def _stay(self, handle: Handle, request: Request) -> Outcome:
        failed_at, alarm = None, None
        while not (status := self.backend.status(handle)).ended:
            self.confirm()
            self._refresh()
            self._notice(status, request.job)
            self._hear_nccl()
            self.show(status.reason if status.phase in WAITING else "")
            if self._stops(handle, request):
                break
            failed = self._is_broken(status, request)
            alarm = None if failed else self.sentry.look() if self.sentry else self._still(status, request.job)
            if alarm:
                status = self.backend.status(handle)  # a node that is lost explains a silent rank
                break
            if failed:
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > FAILED_GRACE:
                    break
            if (slow := self._note_slow(request)) and slow.node is not None:
                alarm, status = slow, replace(status, lost={slow.node: slow.words}, silent=frozenset({slow.node}))
                break
            time.sleep(POLL)
        self.show("")
        status = self._with_cut_off(status, request)
        if alarm or status.failed:
            status = self._with_absent(status)
        alive = status.silent & self.sentry.alive(ALIVE) if self.sentry and status.silent else frozenset[int]()
        concluded = (alarm is not None or status.failed) and request.job.beats and self._is_concluded()
        if concluded:
            self.say(f"the ranks are done; what had not ended on their nodes is ended now{f' ({alarm.words})' if alarm else ''}")
        failed = (alarm is not None or status.failed) and not concluded
        # as it was before the rest were stopped: that they were killed says nothing
        return Outcome(status, alarm, alive, concluded, self.cut_off(handle) if failed else "")

    def _await_silent(self, handle: Handle, request: Request, silent: frozenset[int]) -> None:
        """Waits for nodes that do not answer while the ranks are done: what is left on them can be ended only once they do."""
        deadline, who = time.monotonic() + SILENT_GRACE, ", ".join(str(request.host(node)) for node in sorted(silent))
        if silent:
            self.say(f"no answer from {who}: waiting up to {SILENT_GRACE:.0f} s, to end what is left there")
        while silent and time.monotonic() < deadline:
            time.sleep(POLL)
            silent = self.backend.status(handle).silent
        if silent:
            self.say(f"still no answer from {who}: make clean ends what is left there")

    def _with_cut_off(self, status: Status, request: Request) -> Status:
        """The status; where another user had the engine end the job, ranks that had not concluded count as cut off."""
        if not status.ended_by or self.asked:
            return status
        self.place.refresh()
        concluded = (request.job.beats and self._is_concluded()) or self.run.is_asked_to_stop()
        return status if concluded else replace(status, exits={**status.exits, 0: CUT_OFF})

    def _with_absent(self, status: Status) -> Status:
        """The status, with the nodes that are gone without the engine's knowing: no exit code, no beat, and no answer."""
        if status.ended or not (unheard := set(range(len(status.hosts))) - set(status.exits) - set(status.lost)):
            return status
        unheard -= self.sentry.alive(ALIVE) if self.sentry else frozenset()
        gone = {node: why for node, why in self.absent(status.hosts).items() if node in unheard} if unheard else {}
        return replace(status, lost={**status.lost, **gone})

    def _supplement(self, request: Request) -> None:
        """Fetches the output that only the engine has: the verdict reads it."""
        try:
            self.place.supplement(request.job.folder)
        except BackendError as error:
            self.say(f"what the engine keeps of the nodes' output is not seen: {error}")

    def _refresh(self) -> None:
        """Brings the run folder up to date. While that fails, stale heartbeats do not count against the ranks."""
        if time.monotonic() - self.refreshed < self.place.pace:
            return
        try:
            self.place.refresh()
            self.trouble = False
        except BackendError as error:
            if not self.trouble:
                self.say(f"lost sight of the nodes: {error}")
            self.trouble, self.seen, self.sentry = True, None, None
        self.refreshed = time.monotonic()

    def _notice(self, status: Status, job: Job) -> None:
        """Records changes: why the job waits, and that it runs. From then on its ranks are watched, in each attempt anew."""
        if self.trouble:
            return
        before, self.seen = self.seen, status
        waited = before is not None and before.phase in WAITING
        if status.phase in WAITING:
            if not (waited and before and before.reason == status.reason):
                self.run.note("queued", phase=status.phase.value, reason=status.reason)
            self.sentry = None
        elif status.phase is Phase.RUNNING and (before is None or waited or before.attempt != status.attempt):
            if waited:
                self.run.note("running", attempt=status.attempt, hosts=list(status.hosts))
            attempt = fence.current(self.run.folder).order
            ranks, limits = job.nodes * job.ranks_per_node, Limits().later(self.place.lag)
            self.sentry = Sentry(self.run.folder, ranks, attempt, limits) if job.beats else None
            self.nccl = FabricLog(self.run, job.folder, self.kind) if job.torchrun and job.nodes > 1 else None

    def _hear_nccl(self) -> None:
        """Reports what is wrong with the fabric by NCCL's log: the run goes on, but slower than it could."""
        for why in self.nccl.wrong() if self.nccl else ():
            self.say(f"node 0: {why}")
            self.run.note("fabric", node=0, why=why)

    def _is_broken(self, status: Status, request: Request) -> bool:
        """Whether a part of the job has failed. A node that does not answer while its ranks beat has not: only SSH is down."""
        lost = set(status.lost)
        if lost and self.sentry:
            alive = status.silent & self.sentry.alive(ALIVE)
            for node in sorted(alive - self.unreachable):
                why = f"{status.lost[node]}; its ranks beat, and the run goes on"
                self.say(f"node {node} ({request.host(node)}): {why}")
                self.run.note("unreachable", node=node, host=request.host(node), why=why)
            self.unreachable = alive
            lost -= alive
        return bool(lost) or any(status.exits.values())

    def _still(self, status: Status, job: Job) -> Alarm | None:
        """An alarm where a job whose processes send no heartbeats, as tokenizing, has made no progress for STILL seconds."""
        done, now = self.progress(), time.monotonic()
        if job.beats or self.trouble or status.phase is not Phase.RUNNING or done != self.last_progress[0]:
            self.last_progress = done, now
        still = now - self.last_progress[1]
        return Alarm(f"no rank has moved for {still:.0f} s (limit {self.still:.0f} s)") if still > self.still else None

    def _is_concluded(self) -> bool:
        """Whether the ranks' last event is that they finished, or stopped as they were asked to."""
        names = [event["event"] for event in self.run.read_events()]
        return next((name for name in reversed(names) if name in TURNS), "") in CONCLUDED

    def _stops(self, handle: Handle, request: Request) -> bool:
        """Passes a request to stop on; True when all ends at once: it was the second one, or no rank runs that could save."""
        if self.interrupts.count > 1:
            self.say("stopping now, as asked twice")
            return True
        if self.sequel and self.sequel.is_asked_to_stop():  # what goes before it has nothing to save
            self.asked = True
            self.say("stopping")
            return True
        if not self.asked and (self.interrupts.count or self.run.is_asked_to_stop() or self._is_spent() or self._is_over()):
            self.asked = True
            gently = "stopping at the next step, with a checkpoint (Ctrl-C again: at once)"
            self.say(gently if request.job.beats else "stopping")
            self.run.ask_to_stop() if request.job.beats else self.backend.stop(handle, at_once=False)
        return self.asked and self.seen is not None and self.seen.phase is Phase.QUEUED

    def _is_over(self) -> bool:
        """Whether the machines are about to be reclaimed, at a time that was known from the start."""
        if over := self.ends is not None and time.time() > self.ends - TO_SAVE:
            self.say("the capacity block ends; next: make setup with another one, then make train resumes from the checkpoint")
        return over

    def _is_spent(self) -> bool:
        if spent := self.budget.is_spent(self.say):
            self.say(self.budget.words())
        return spent

    def _note_slow(self, request: Request) -> Alarm | None:
        """Records ranks and links that slow the others down; an alarm where a node with such links is to be replaced."""
        for beat in self.sentry.newly_slow() if self.sentry else ():
            self.run.note("slow", rank=beat.rank, node=beat.node, step=beat.step, busy_seconds=beat.busy_seconds)
        for node, why in self.sentry.slow_links().items() if self.sentry else ():
            who = "the link between the two nodes" if node is None else f"node {node} ({request.host(node)})"
            self.say(f"{who}: {why}")
            self.run.note("slow-link", node=node, host=request.host(node), why=why)
            if self.replaces and node is not None and self.sentry and self.sentry.slower and not self.asked:
                return Alarm(why, None, node)
        return None
