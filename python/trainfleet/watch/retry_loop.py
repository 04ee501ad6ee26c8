"""Retries a job until it finishes, is stopped, or fails in a way that another attempt would not
fix.

The failure's cause decides (causes.py):
- Failures of machines and services are retried from the last checkpoint. Examples are a lost node,
  a killed or silent rank, and throttled storage.
- Failures specific to one node are retried on other nodes. Examples are a broken device and a
  missing environment.
- Failures that would recur are not retried. Examples are a bug, too little device memory, broken
  data, and non-finite numbers.

An attempt does not count as failed if its ranks saved and exited because a machine will soon be
reclaimed. The next attempt runs without that machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from ..backends.base import Backend, Handle, Status
from ..health import faults, fence
from ..health.heartbeat_format import read_beats
from ..plan.job import Job, Request
from ..run import run_folder
from ..trust.errors import BackendError, RunError
from .causes import CAUSES, Then, Weight, first_sign
from .monitor import AttemptOutcome, CutOff, MonitoredAttempt, Watch
from .verdict import Start, Verdict, judge, placed, start_now

ATTEMPTS = 4  # maximum number of consecutive attempts without a new checkpoint
# Backoff in seconds before the second, third and later of these attempts.
BACK_OFF = (1.0, 5.0, 20.0)
PATIENCE = 900.0  # seconds to wait for lost nodes if no other nodes are available
ASK_AGAIN = 3.0
T = TypeVar("T")
TAKEN_BACK = ("cancelled", "preempted")  # causes that a scheduler reports


@dataclass(frozen=True)
class Ended:
    """End of a job: the verdict if it failed, and whether it was asked to stop."""

    verdict: Verdict | None
    asked: bool


@dataclass
class Attempts:
    """Attempts at one job, and the state that decides about further attempts.

    Attributes:
        request: The current attempt's request.
        jobs: The options for further attempts: the same job on the same number of nodes, then on
            fewer.
        refit: Writes the chosen job's config to the run folder.
        broken: Hosts that no further attempt uses, with the reasons.
        fruitless: Consecutive attempts without a new checkpoint.
    """

    watch: Watch
    request: Request
    jobs: Sequence[Job]
    refit: Callable[[Job], None]
    broken: dict[str, str] = field(default_factory=dict)
    fruitless: int = 0

    def persevere(self, running: Handle | None = None) -> Ended:
        """Runs attempts until the job ends. The result has no verdict if every node succeeded or
        stopped on request.

        `running` is the request's job if another launcher has already submitted it.
        """
        watch, run = self.watch, self.watch.run
        while True:
            saved = progress(run)
            since = start_now(self.request)
            noticed = len(notices(run))
            outcome, running = self._follow(running), None
            if self._is_over(outcome):
                if self._continue_without_taken(outcome, noticed):
                    continue
                if not is_taken_back(watch, self.request, outcome):
                    return Ended(None, outcome.asked)
            verdict, itself = explain(watch, self.request, outcome, since)
            self.fruitless = 1 if progress(run) > saved else self.fruitless + 1
            if not worth_it(verdict, self.fruitless, run) or outcome.asked:
                return Ended(conclude(run, verdict, "stopped all nodes"), outcome.asked)
            self._await_next(verdict)
            self._restart(verdict, {} if itself else lost_hosts(self.request, outcome.status))

    def _follow(self, running: Handle | None) -> AttemptOutcome:
        """Follows the job that is running, or starts the next attempt."""
        if not running:
            self.watch.confirm()
            run = self.watch.run
            if not run.is_asked_to_stop():  # Nodes of an ended attempt may have left a request.
                run.stop.unlink(missing_ok=True)
            attempt = {fence.VARIABLE: str(fence.begin(run.folder))}
            self.request = self.request.with_environment(attempt | faults.environment(run.name))
        return MonitoredAttempt(self.watch, self.request).follow(running)

    def _is_over(self, outcome: AttemptOutcome) -> bool:
        """Returns whether no further attempt is due: the attempt did not fail, or its failure is
        ignored.
        """
        ignored = outcome.asked and not self.request.job.beats
        return not outcome.failed or self.watch.interrupts.count > 1 or ignored

    def _await_next(self, verdict: Verdict) -> None:
        """Announces the next attempt and waits for the backoff. Excludes the blamed host if a retry
        must use another node.
        """
        watch = self.watch
        if verdict.then is Then.ELSEWHERE:
            evidence = self.broken[verdict.host] = f"{verdict.kind.words}: {verdict.words}"
            watch.run.note("quarantined", host=verdict.host, evidence=evidence)
        done = f"stopped all nodes; attempt {self.fruitless + 1} of {ATTEMPTS} follows"
        watch.say(str(conclude(watch.run, verdict, done)))
        pause(watch, BACK_OFF[min(self.fruitless, len(BACK_OFF)) - 1])

    def _restart(self, verdict: Verdict, lost: Mapping[str, str]) -> None:
        """Begins the next attempt, if possible without the `lost` hosts."""
        following = another(self.watch, self._candidates(), self.broken, lost)
        who = verdict.who
        if verdict.host in lost:
            who += "".join(f" and {host}" for host in lost if host != verdict.host)
        self._begin(following, verdict.cause, who)

    def _candidates(self) -> list[Job]:
        """Returns candidate jobs for the next attempt, with the same launch and an incremented
        attempt number.
        """
        job = self.request.job
        return [replace(one, launch=job.launch, attempt=job.attempt + 1) for one in self.jobs]

    def _begin(self, request: Request, cause: str, who: str) -> None:
        """Records the next attempt and its reason in the run folder."""
        run, job = self.watch.run, request.job
        self.request = request
        restarts = int(run.read_results().get("restarts", 0)) + 1
        if job.nodes != run.read_results().get("nodes"):
            self.refit(job)
        run.update_results(restarts=restarts)
        run.note(
            "restarted",
            attempt=restarts,
            cause=cause,
            who=who,
            nodes=job.nodes,
            hosts=list(request.hosts),
        )

    def _continue_without_taken(self, outcome: AttemptOutcome, noticed: int) -> bool:
        """Begins the next attempt without the machines that AWS is reclaiming. Returns False if the
        attempt ended for another reason, or if too few machines are left.

        `noticed` is the number of reclaim notices before this attempt. Does not wait for
        replacements, because only `make setup` can create them.
        """
        watch = self.watch
        on = placed(self.request, outcome.status)
        hosts = [on.host(node) for node in notices(watch.run)[noticed:] if on.host(node)]
        finished = watch.run.read_results().get("status") == "finished"
        if finished or outcome.failed or outcome.asked or not hosts or watch.interrupts.count:
            return False
        self.broken |= dict.fromkeys(hosts, "AWS reclaims the machine")
        taken = f"AWS reclaims {', '.join(hosts)}"
        try:
            following = first_that_fits(watch.backend, self._candidates(), [self.broken])
        except BackendError as error:
            watch.say(f"saved and stopped: {taken}, and no others are left\n{error}")
            watch.say("next: run make setup to replace it, then make train to resume")
            return False
        watch.say(f"saved: {taken}; continuing with {following.job.nodes} nodes")
        self._begin(following, "preempted", ", ".join(self.broken))
        return True


def explain(
    watch: Watch, request: Request, outcome: AttemptOutcome, since: Start
) -> tuple[Verdict, bool]:
    """Returns the verdict on a failed attempt, and whether the verdict blames this machine.

    Raises:
        CutOff: the verdict blames this machine, and a standby host exists.
    """
    standby = watch.standby()
    # This machine is only at fault if other hosts are demonstrably alive.
    if not outcome.cut_off or not (standby or outcome.alive):
        return judge(request, outcome, watch.run, since), False
    verdict = blame_itself(request, outcome, standby)
    if standby:
        raise CutOff(str(conclude(watch.run, verdict, f"left the run to the standby {standby}")))
    return verdict, True


def blame_itself(request: Request, outcome: AttemptOutcome, standby: str) -> Verdict:
    """Returns a verdict that blames this machine because it can't reach any other host."""
    here = outcome.cut_off
    others = [str(request.host(node)) for node in sorted(outcome.alive)]
    lives = " and ".join(dict.fromkeys(filter(None, [standby, *others])))
    why = (
        "its launcher can't reach any other host over SSH, but the shared folder still gets "
        f"heartbeats from {lives}"
    )
    node = request.hosts.index(here) if here in request.hosts else None
    return Verdict("lost-node", why, node, None, here, (), CAUSES["lost-node"].next, sure=True)


def lost_hosts(request: Request, status: Status) -> dict[str, str]:
    """Returns the unreachable hosts with reasons. Includes hosts that a scheduler chose, if the
    scheduler can exclude them.
    """
    on = placed(request, status)
    return {on.host(node): why for node, why in status.lost.items() if on.host(node)}


def notices(run: run_folder.Run) -> list[int]:
    """Returns the nodes that received a reclaim notice, in the order of the notices."""
    return [int(event["node"]) for event in run.read_events() if event["event"] == "notice"]


def is_taken_back(watch: Watch, request: Request, outcome: AttemptOutcome) -> bool:
    """Returns whether ranks saved and exited because the scheduler ended their job (`slurm: job 7
    CANCELLED`) without a stop request from this machine.
    """
    status, asked = outcome.status, outcome.asked or watch.interrupts.count
    sign = (
        first_sign(("agent",), status.reason)
        if status.ended and request.job.torchrun and not asked
        else None
    )
    stopped = watch.run.read_results().get("status") == "stopped"
    return (
        stopped
        and sign is not None
        and sign[0].cause in TAKEN_BACK
        and sign[0].weight == Weight.PROOF
    )


def worth_it(verdict: Verdict, fruitless: int, run: run_folder.Run) -> bool:
    """Returns whether another attempt could succeed. Unexplained failures are retried only if ranks
    had started.
    """
    if verdict.then is Then.STOP or fruitless >= ATTEMPTS:
        return False
    started = fence.current(run.folder).number
    return verdict.cause != "unknown" or bool(read_beats(run.folder, started))


def conclude(run: run_folder.Run, verdict: Verdict, done: str) -> Verdict:
    """Adds the action taken to the verdict. Records the verdict as an event and, if possible, in
    results.json.
    """
    verdict = replace(verdict, done=done)
    run.note("verdict", **verdict.record())
    with suppress(RunError):
        run.update_results(verdict=verdict.record())
    return verdict


def another(
    watch: Watch, jobs: Sequence[Job], broken: Mapping[str, str], lost: Mapping[str, str]
) -> Request:
    """Returns the request for the next attempt. Excludes the `broken` hosts and, if possible, the
    `lost` hosts.

    Waits for lost nodes to return if no other nodes can replace them.

    Raises:
        BackendError: the lost nodes did not return in time, or the run was stopped in the meantime.
    """
    choices = [{**broken, **lost}, broken] if lost else [broken]
    return when_nodes_return(
        lambda: first_that_fits(watch.backend, jobs, choices),
        lambda: watch.interrupts.count > 0 or watch.run.is_asked_to_stop(),
        watch.say,
        partial(pause, watch),
    )


def when_nodes_return(
    plan: Callable[[], T],
    is_stopped: Callable[[], bool],
    say: Callable[[str], object],
    wait: Callable[[float], object],
) -> T:
    """Calls `plan` until it finds enough nodes.

    Raises: BackendError: there were too few nodes for PATIENCE seconds, or the run was stopped.
    """
    deadline, said = time.monotonic() + PATIENCE, False
    while True:
        try:
            return plan()
        except BackendError as error:
            if time.monotonic() > deadline or is_stopped():
                raise
            if not said:
                say(f"waiting for nodes: {error}")
            said = True
        wait(ASK_AGAIN)


def first_that_fits(
    backend: Backend, jobs: Sequence[Job], choices: Iterable[Mapping[str, str]]
) -> Request:
    """Plans the first job for which enough nodes are available. `choices` are sets of hosts to
    exclude, in order of preference.

    Raises:
        BackendError: no job has enough nodes. The error is the last job's.
    """
    refused = BackendError("no job fits the available hosts")
    for without in choices:
        for job in jobs:
            try:
                return backend.plan(job, without)
            except BackendError as error:
                refused = error
    raise refused


def pause(watch: Watch, seconds: float) -> None:
    """Waits while showing progress. Returns early on a stop request."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not watch.interrupts.count:
        watch.show("")
        time.sleep(0.1)


def progress(run: run_folder.Run) -> int:
    """Returns the number of checkpoints that this run has committed."""
    return sum(event["event"] == "checkpointed" for event in run.read_events())
