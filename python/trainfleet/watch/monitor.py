"""Monitors one attempt: submits the job, shows progress, forwards stop requests, and stops all
nodes if one fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..backends.base import Backend, Handle, Phase, Status, save_job
from ..backends.run_storage import Place
from ..hardware.node_types import NodeType
from ..health import fence
from ..health.watchdog import Alarm, Limits, Sentry
from ..plan.fabric_environment import judge_nccl
from ..plan.job import Request
from ..process.processes import Interrupts
from ..run.records import size_of
from ..run.run_folder import Run, node_log
from ..trust import untrusted_input
from ..trust.errors import BackendError
from .budget import Budget

POLL = 0.2  # seconds between polls
# Environment variable with the unix time at which all machines are reclaimed.
ENDS = "TRAINFLEET_ENDS"
TO_SAVE = 300.0  # seconds before ENDS at which the run is asked to save and stop
CONCLUDED = ("finished", "stopped")  # events that ranks record after completing their work
TURNS = ("launched", "restarted", "queued", "began", *CONCLUDED)
WAITING = (Phase.QUEUED, Phase.STARTING)
# Seconds without progress before a job counts as stalled. Tokenizer training is the slowest case.
STILL = 1800.0
# Limit once the tokenizer is trained: shorter, because every MiB of text counts as progress.
STUCK = 300.0
# Maximum heartbeat age, in seconds, at which ranks on an unreachable node count as alive.
ALIVE = 5.0
CUT_OFF = 143  # exit code after SIGTERM
SILENT_GRACE = 60.0  # seconds to wait for unreachable nodes after the ranks have finished
# Seconds for the other nodes to report their errors after one node has failed.
FAILED_GRACE = 3.0
MOST = 1 << 22  # maximum bytes to read from the NCCL log
SAID = "NCCL INFO"


class CutOff(BackendError):
    """This launcher can't reach any other host, but a standby can take over."""


@dataclass(frozen=True)
class AttemptOutcome:
    """Outcome of an attempt: its last status, the alarm that ended it, if any, and the unreachable
    nodes whose ranks are alive.

    `concluded` means that the ranks had completed their work, so later node failures are ignored.
    `cut_off` is this machine's name if it could not reach any other host. `asked` means that the
    attempt was asked to stop.
    """

    status: Status
    alarm: Alarm | None
    alive: frozenset[int] = frozenset()
    concluded: bool = False
    cut_off: str = ""
    asked: bool = False

    @property
    def failed(self) -> bool:
        return not self.concluded and (self.alarm is not None or self.status.failed)


@dataclass(frozen=True)
class Sequel:
    """A job that starts once another job has succeeded.

    submitted         called with each attempt's job as soon as the job is submitted
    is_asked_to_stop  returns whether the sequel was asked to stop; the job before it stops, too
    """

    submitted: Callable[[Handle], None]
    is_asked_to_stop: Callable[[], bool]


@dataclass(frozen=True)
class Watch:
    """Context for monitoring all attempts of a job.

    show      shows progress; its argument is the reason why the job is waiting, or ""
    progress  returns a value that changes as a job without heartbeats makes progress, or None for
              jobs with heartbeats
    still     returns how many seconds `progress` may stay unchanged until the job counts as stalled
    replaces  whether to replace nodes with slow links (fleet.on_slow_node)
    ends      unix time at which all machines are reclaimed
    kind      node type
    confirm   ends this process if another launcher has taken over
    standby   returns the standby host that this machine sees
    """

    backend: Backend
    place: Place
    run: Run
    interrupts: Interrupts
    show: Callable[[str], None]
    say: Callable[[str], None]
    budget: Budget
    progress: Callable[[], object] = lambda: None
    still: Callable[[], float] = lambda: STILL
    replaces: bool = False
    ends: float | None = None
    sequel: Sequel | None = None
    kind: NodeType | None = None
    confirm: Callable[[], None] = lambda: None
    standby: Callable[[], str] = lambda: ""


class MonitoredAttempt:
    """Monitors one attempt at a request's job."""

    def __init__(self, watch: Watch, request: Request) -> None:
        self.watch, self.request = watch, request
        self.run, self.backend, self.say = watch.run, watch.backend, watch.say
        self.asked = False  # whether the attempt was asked to stop
        # last progress value, and the time of its last change
        self.progress: tuple[object, float] = (None, time.monotonic())
        self.seen: Status | None = None
        self.sentry: Sentry | None = None
        self.nccl: FabricLog | None = None
        self.refreshed = 0.0  # monotonic time of the last refresh
        self.trouble = False  # whether the run folder can't be updated
        # unresponsive nodes whose ranks still send heartbeats
        self.unreachable = frozenset[int]()

    def follow(self, running: Handle | None = None) -> AttemptOutcome:
        """Submits the job or follows a running one, and returns its outcome. On return or
        exception, all of the job's processes on reachable nodes have exited.
        """
        self.watch.place.refresh()
        self.watch.confirm()
        handle = running or self.backend.submit(self.request)
        try:
            save_job(self.run, handle, self.request)
            if self.watch.sequel:
                self.watch.sequel.submitted(handle)
            outcome = self._stay(handle)
            self.watch.place.refresh()
            if outcome.failed:
                self._supplement()
            if outcome.concluded:
                self._await_silent(handle, outcome.status.silent)
            return outcome
        finally:
            self.watch.confirm()
            self.backend.stop(handle, at_once=True)

    def _stay(self, handle: Handle) -> AttemptOutcome:
        failed_at, alarm = None, None
        while not (status := self.backend.status(handle)).ended:
            self.watch.confirm()
            self._refresh()
            self._notice(status)
            self._hear_nccl()
            self.watch.show(status.reason if status.phase in WAITING else "")
            if self._stops(handle):
                break
            failed = self._is_broken(status)
            alarm = None if failed else self.sentry.look() if self.sentry else self._still(status)
            if alarm:
                status = self.backend.status(handle)  # A lost node may explain a silent rank.
                break
            if failed:
                failed_at = failed_at or time.monotonic()
                if time.monotonic() - failed_at > FAILED_GRACE:
                    break
            if (slow := self._note_slow()) and slow.node is not None:
                alarm = slow
                status = replace(
                    status, lost={slow.node: slow.words}, silent=frozenset({slow.node})
                )
                break
            time.sleep(POLL)
        self.watch.show("")
        return self._outcome(handle, status, alarm)

    def _outcome(self, handle: Handle, status: Status, alarm: Alarm | None) -> AttemptOutcome:
        """Returns the outcome, based on the status from before the other nodes were stopped, so
        that the resulting exit codes don't count.
        """
        status = self._with_cut_off(status)
        failed = alarm is not None or status.failed
        if failed:
            status = self._with_absent(status)
        alive = (
            status.silent & self.sentry.alive(ALIVE)
            if self.sentry and status.silent
            else frozenset[int]()
        )
        concluded = failed and self.request.job.beats and self._is_concluded()
        if concluded:
            self.say(
                "the ranks have finished; stopping the remaining processes on their nodes"
                f"{f' ({alarm.words})' if alarm else ''}"
            )
        cut_off = self.backend.cut_off(handle) if failed and not concluded else ""
        return AttemptOutcome(status, alarm, alive, concluded, cut_off, self.asked)

    def _await_silent(self, handle: Handle, silent: frozenset[int]) -> None:
        """Waits for unreachable nodes after the ranks have finished, because their remaining
        processes can only be stopped once the nodes respond.
        """
        deadline = time.monotonic() + SILENT_GRACE
        who = ", ".join(str(self.request.host(node)) for node in sorted(silent))
        if silent:
            self.say(
                f"no answer from {who}: waiting up to {SILENT_GRACE:.0f} s to end the processes "
                "there"
            )
        while silent and time.monotonic() < deadline:
            time.sleep(POLL)
            silent = self.backend.status(handle).silent
        if silent:
            self.say(f"still no answer from {who}: run make clean to end the processes there")

    def _with_cut_off(self, status: Status) -> Status:
        """Adds exit code CUT_OFF to the status if someone else ended the job through the scheduler
        before its ranks had finished.
        """
        if not status.ended_by or self.asked:
            return status
        self.watch.place.refresh()
        concluded = (self.request.job.beats and self._is_concluded()) or self.run.is_asked_to_stop()
        return status if concluded else replace(status, exits={**status.exits, 0: CUT_OFF})

    def _with_absent(self, status: Status) -> Status:
        """Extends the status with lost nodes that the scheduler has not noticed: those without an
        exit code, a recent heartbeat or a response.
        """
        if status.ended or not (
            unheard := set(range(len(status.hosts))) - set(status.exits) - set(status.lost)
        ):
            return status
        unheard -= self.sentry.alive(ALIVE) if self.sentry else frozenset()
        gone = (
            {
                node: why
                for node, why in self.backend.absent(status.hosts).items()
                if node in unheard
            }
            if unheard
            else {}
        )
        return replace(status, lost={**status.lost, **gone})

    def _supplement(self) -> None:
        """Fetches output that only the scheduler has, because the verdict needs it."""
        try:
            self.watch.place.supplement(self.request.job.folder)
        except BackendError as error:
            self.say(f"the scheduler's copy of the nodes' output can't be read: {error}")

    def _refresh(self) -> None:
        """Updates the run folder. Ignores the ranks' stale heartbeats while updates fail."""
        if time.monotonic() - self.refreshed < self.watch.place.pace:
            return
        try:
            self.watch.place.refresh()
            self.trouble = False
        except BackendError as error:
            if not self.trouble:
                self.say(f"the run folder can't be updated: {error}")
            self.trouble, self.seen, self.sentry = True, None, None
        self.refreshed = time.monotonic()

    def _notice(self, status: Status) -> None:
        """Records why the job is waiting and when it starts running. Watches the ranks' heartbeats
        from the start of each attempt.
        """
        if self.trouble:
            return
        before = self.seen or replace(status, phase=Phase.ENDED, attempt=0)
        self.seen, waited, run = status, before.phase in WAITING, self.run
        if status.phase in WAITING:
            if (waited, before.reason) != (True, status.reason):
                run.note("queued", phase=status.phase.value, reason=status.reason)
            self.sentry = None
        elif status.phase is Phase.RUNNING and (waited or before.attempt != status.attempt):
            if waited:
                run.note("running", attempt=status.attempt, hosts=list(status.hosts))
            self._begin_watching()

    def _begin_watching(self) -> None:
        """Watches the ranks' heartbeats, and NCCL's log if there are several nodes."""
        run, job = self.run, self.request.job
        limits = Limits().later(self.watch.place.lag, self.backend.terms.wait)
        ranks, order = job.nodes * job.ranks_per_node, fence.current(run.folder).order
        self.sentry = Sentry(run.folder, ranks, order, limits) if job.beats else None
        several = job.torchrun and job.nodes > 1
        self.nccl = FabricLog(run, job.folder, self.watch.kind) if several else None

    def _hear_nccl(self) -> None:
        """Reports fabric problems that NCCL logged, because they slow the run down."""
        for why in self.nccl.wrong() if self.nccl else ():
            self.say(f"node 0: {why}")
            self.run.note("fabric", node=0, why=why)

    def _is_broken(self, status: Status) -> bool:
        """Returns whether any node has failed. An unreachable node with live ranks has not failed,
        because only SSH is down.
        """
        lost = set(status.lost)
        if lost and self.sentry:
            alive = status.silent & self.sentry.alive(ALIVE)
            for node in sorted(alive - self.unreachable):
                why = f"{status.lost[node]}; its ranks still send heartbeats, so the run continues"
                self.say(f"node {node} ({self.request.host(node)}): {why}")
                self.run.note("unreachable", node=node, host=self.request.host(node), why=why)
            self.unreachable = alive
            lost -= alive
        return bool(lost) or any(status.exits.values())

    def _still(self, status: Status) -> Alarm | None:
        """Returns an alarm if a job without heartbeats, such as tokenizing, has stalled."""
        done, now = self.watch.progress(), time.monotonic()
        if (
            self.request.job.beats
            or self.trouble
            or status.phase is not Phase.RUNNING
            or done != self.progress[0]
        ):
            self.progress = done, now
        still, limit = now - self.progress[1], self.watch.still()
        return (
            Alarm(f"no rank made progress for {still:.0f} s (limit {limit:.0f} s)")
            if still > limit
            else None
        )

    def _is_concluded(self) -> bool:
        """Returns whether the ranks' last event reports that they have finished or stopped."""
        names = [event["event"] for event in self.run.read_events()]
        return next((name for name in reversed(names) if name in TURNS), "") in CONCLUDED

    def _stops(self, handle: Handle) -> bool:
        """Forwards a stop request. Returns True if everything must end at once: after a second
        request, or if no rank is running that could save.
        """
        if self.watch.interrupts.count > 1:
            self.say("stopping now after a second stop request")
            return True
        # The job that a sequel follows is a compile job, which has no state to save.
        if self.watch.sequel and self.watch.sequel.is_asked_to_stop():
            self.asked = True
            self.say("stopping")
            return True
        if not self.asked and (
            self.watch.interrupts.count
            or self.run.is_asked_to_stop()
            or self._is_spent()
            or self._is_over()
        ):
            self.asked = True
            if self.request.job.beats:
                self.say(
                    "stopping at the next step, with a checkpoint (press Ctrl-C again to stop at "
                    "once)"
                )
                self.run.ask_to_stop()
            else:
                self.say("stopping")
                self.backend.stop(handle, at_once=False)
        return self.asked and self.seen is not None and self.seen.phase is Phase.QUEUED

    def _is_over(self) -> bool:
        """Returns whether the machines' known reclaim time is near."""
        if over := self.watch.ends is not None and time.time() > self.watch.ends - TO_SAVE:
            self.say(
                "the capacity block ends soon; next: run make setup with another capacity block, "
                "then make train to resume from the checkpoint"
            )
        return over

    def _is_spent(self) -> bool:
        if spent := self.watch.budget.is_spent(self.say):
            self.say(self.watch.budget.words())
        return spent

    def _note_slow(self) -> Alarm | None:
        """Records ranks and links that slow the others down. Returns an alarm if a node must be
        replaced because of its links.
        """
        for beat in self.sentry.newly_slow() if self.sentry else ():
            self.run.note(
                "slow",
                rank=beat.rank,
                node=beat.node,
                step=beat.step,
                busy_seconds=beat.busy_seconds,
            )
        for node, why in self.sentry.slow_links().items() if self.sentry else ():
            who = (
                "the link between the two nodes"
                if node is None
                else f"node {node} ({self.request.host(node)})"
            )
            self.say(f"{who}: {why}")
            self.run.note("slow-link", node=node, host=self.request.host(node), why=why)
            if (
                self.watch.replaces
                and node is not None
                and self.sentry
                and self.sentry.slower
                and not self.asked
            ):
                return Alarm(why, None, node)
        return None


class FabricLog:
    """New NCCL log lines on node 0 about the fabric, its interfaces and GPUDirect.

    AWS Batch and SageMaker jobs set NCCL_DEBUG=INFO (backends/node_script.py) because no preflight
    tests their nodes. Jobs on hosts do not, because `make doctor` and the preflight have already
    checked the fabric (hosts/preflight.py).
    """

    def __init__(self, run: Run, folder: Path, kind: NodeType | None) -> None:
        self.run, self.log, self.kind = run, node_log(folder, 0), kind
        self.start = size_of(self.log)
        self.since, self.heard = time.time(), False

    def wrong(self) -> list[str]:
        """Returns the fabric problems in the log, but only once after the first step, because NCCL
        connects during the first collective.
        """
        if (
            self.heard
            or not (self.run.metrics.exists() and self.log.exists())
            or self.run.metrics.stat().st_mtime < self.since
        ):
            return []
        self.heard = True
        with untrusted_input.open_regular(self.log) as file:
            file.seek(self.start)
            said = file.read(MOST).decode(errors="replace").splitlines()
        return judge_nccl(said, self.kind) if any(SAID in line for line in said) else []
