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
from dataclasses import dataclass, replace

from ..backends.base import Backend, Handle, Status
from ..health import faults, fence
from ..health.heartbeat_format import read_beats
from ..plan.job import Job, Request
from ..run import run_folder
from ..trust.errors import BackendError, RunError
from .causes import CAUSES, Then, Weight, first_sign
from .monitor import AttemptOutcome, CutOff, MonitoredAttempt, Watch
from .verdict import Start, Verdict, judge, start_now

ATTEMPTS = 4  # maximum number of consecutive attempts without a new checkpoint
# Backoff in seconds before the second, third and later of these attempts.
BACK_OFF = (1.0, 5.0, 20.0)
PATIENCE = 900.0  # seconds to wait for lost nodes if no other nodes are available
ASK_AGAIN = 3.0
TAKEN_BACK = ("cancelled", "preempted")  # causes that a scheduler reports


@dataclass(frozen=True)
class Ended:
    """End of a job: the verdict if it failed, and whether it was asked to stop."""

    verdict: Verdict | None
    asked: bool


def persevere(
    watch: Watch,
    request: Request,
    jobs: Sequence[Job],
    refit: Callable[[Job], None],
    running: Handle | None = None,
) -> Ended:
    """Runs attempts until the job ends. The result has no verdict if every node succeeded or
    stopped on request.

    `jobs` lists the options for further attempts: the same job on the same number of nodes, then on
    fewer. `refit` writes the chosen job's config to the run folder. `running` is the request's job
    if another launcher has already submitted it.
    """
    run, broken, fruitless, restarts = watch.run, dict[str, str](), 0, 0
    while True:
        saved, since, noticed = progress(run), start_now(request), len(notices(run))
        if not running:
            watch.confirm()
            attempt = {fence.VARIABLE: str(fence.begin(run.folder))}
            request = request.with_environment(attempt | faults.environment(run.name))
        outcome, running = MonitoredAttempt(watch, request).follow(running), None
        if (
            not outcome.failed
            or watch.interrupts.count > 1
            or (outcome.asked and not request.job.beats)
        ):
            if following := without_taken(watch, request, outcome, jobs, broken, noticed):
                request, restarts = following, restarts + 1
                begin_again(run, request, refit, restarts, "preempted", ", ".join(broken))
                continue
            if not is_taken_back(watch, request, outcome):
                return Ended(None, outcome.asked)
        verdict, itself = explain(watch, request, outcome, since)
        fruitless = 1 if progress(run) > saved else fruitless + 1
        if not worth_it(verdict, fruitless, run) or outcome.asked:
            return Ended(conclude(run, verdict, "stopped all nodes"), outcome.asked)
        await_next(watch, verdict, fruitless, broken)
        lost = {} if itself else lost_hosts(request, outcome.status)
        request, restarts = another(watch, following_of(request, jobs), broken, lost), restarts + 1
        others = (
            "".join(f" and {host}" for host in lost if host != verdict.host)
            if verdict.host in lost
            else ""
        )
        begin_again(run, request, refit, restarts, verdict.cause, verdict.who + others)


def await_next(watch: Watch, verdict: Verdict, fruitless: int, broken: dict[str, str]) -> None:
    """Announces another attempt and waits before it. Adds the blamed host, if any, to `broken`."""
    if verdict.then is Then.ELSEWHERE:
        broken[verdict.host] = f"{verdict.kind.words}: {verdict.words}"
        watch.run.note("quarantined", host=verdict.host, evidence=broken[verdict.host])
    watch.say(
        str(
            conclude(
                watch.run,
                verdict,
                f"stopped all nodes; attempt {fruitless + 1} of {ATTEMPTS} follows",
            )
        )
    )
    pause(watch, BACK_OFF[min(fruitless, len(BACK_OFF)) - 1])


def explain(
    watch: Watch, request: Request, outcome: AttemptOutcome, since: Start
) -> tuple[Verdict, bool]:
    """Returns the verdict on a failed attempt, and whether it blames this machine.

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
    here, others = outcome.cut_off, [str(request.host(node)) for node in sorted(outcome.alive)]
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
    placed = request.placed(status.hosts if status.leaves else ())
    return {placed.host(node): why for node, why in status.lost.items() if placed.host(node)}


def following_of(request: Request, jobs: Sequence[Job]) -> list[Job]:
    """Returns candidate jobs for the next attempt, with the same launch and an incremented attempt
    number.
    """
    return [
        replace(job, launch=request.job.launch, attempt=request.job.attempt + 1) for job in jobs
    ]


def begin_again(
    run: run_folder.Run,
    request: Request,
    refit: Callable[[Job], None],
    restarts: int,
    cause: str,
    who: str,
) -> None:
    """Records the next attempt and its reason in the run folder."""
    if request.job.nodes != run.read_results().get("nodes"):
        refit(request.job)
    run.update_results(restarts=restarts)
    run.note(
        "restarted",
        attempt=restarts,
        cause=cause,
        who=who,
        nodes=request.job.nodes,
        hosts=list(request.hosts),
    )


def notices(run: run_folder.Run) -> list[int]:
    """Returns the nodes that received a reclaim notice, in the order of the notices."""
    return [int(event["node"]) for event in run.read_events() if event["event"] == "notice"]


def without_taken(
    watch: Watch,
    request: Request,
    outcome: AttemptOutcome,
    jobs: Sequence[Job],
    broken: dict[str, str],
    noticed: int,
) -> Request | None:
    """Returns the next request without the machines that AWS is reclaiming, or None if the attempt
    ended for another reason.

    Adds these machines to `broken`. `noticed` is the number of reclaim notices before this attempt.
    Does not wait for replacements, because only `make setup` can create them.
    """
    status = outcome.status
    placed = request.placed(status.hosts if status.leaves else ())
    hosts = [placed.host(node) for node in notices(watch.run)[noticed:] if placed.host(node)]
    over = watch.run.read_results().get("status") == "finished" or outcome.failed or outcome.asked
    if over or not hosts or watch.interrupts.count:
        return None
    broken |= dict.fromkeys(hosts, "AWS reclaims the machine")
    try:
        following = first_that_fits(watch.backend, following_of(request, jobs), [broken])
    except BackendError as error:
        watch.say(
            f"saved and stopped: AWS reclaims {', '.join(hosts)}, and no others are left\n{error}"
        )
        watch.say("next: run make setup to replace it, then make train to resume")
        return None
    watch.say(
        f"saved: AWS reclaims {', '.join(hosts)}; continuing with {following.job.nodes} nodes"
    )
    return following


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
    return (
        verdict.then is not Then.STOP
        and fruitless < ATTEMPTS
        and (verdict.cause != "unknown" or has_started(run))
    )


def has_started(run: run_folder.Run) -> bool:
    """Returns whether ranks in the newest attempt have sent a heartbeat."""
    return bool(read_beats(run.folder, fence.current(run.folder).number))


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
    deadline, said = time.monotonic() + PATIENCE, False
    while True:
        try:
            return first_that_fits(
                watch.backend, jobs, [{**broken, **lost}, broken] if lost else [broken]
            )
        except BackendError as error:
            if (
                time.monotonic() > deadline
                or watch.interrupts.count
                or watch.run.is_asked_to_stop()
            ):
                raise
            if not said:
                watch.say(f"waiting for nodes: {error}")
                said = True
        pause(watch, ASK_AGAIN)


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
    """Waits while showing progress. A stop request ends the wait."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not watch.interrupts.count:
        watch.show("")
        time.sleep(0.1)


def progress(run: run_folder.Run) -> int:
    """Returns the number of checkpoints that this run has committed."""
    return sum(event["event"] == "checkpointed" for event in run.read_events())
