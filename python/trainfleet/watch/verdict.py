"""Verdict on a failure: which node or rank failed first and why, the last log lines, the action
taken, and the command to run next.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from signal import SIGTERM

from ..backends.base import Status
from ..health import fence
from ..health.heartbeat_format import Beat, read_beats
from ..node.supervisor import ASKED, LATE, SEVERED, UNLOGGED
from ..plan.job import Request
from ..run import records, run_folder
from ..run.claims import look_again
from .causes import CAUSES, Cause, Then
from .diagnosis import Diagnosis, diagnose, quote
from .evidence import SKEW
from .lines import TRACEBACK, LogLine, read_lines, time_of_day
from .monitor import AttemptOutcome

TAIL = 12  # maximum number of lines to quote
# Causes for which the node itself may be healthy.
FROM_OUTSIDE = ("cancelled", "preempted", "killed", "unknown")
# shell exit codes for commands that could not be run
UNRUN = {126: "a command could not be run", 127: "a command was not found"}
# lines that are only consequences of a failure
FOLLOWED = re.compile(r"\*\*\* STEP |Terminat|^srun: cluster configuration lacks|^trainfleet: ")
OURS = re.compile(
    r"^(trainfleet\.\S+\.)?((Data|Run|Backend|Config|Checkpoint|Trainfleet)Error|Broken|BadText): "
)


@dataclass(frozen=True)
class Start:
    """The state just before an attempt: the time, and each log's size. Older events and log lines
    don't count toward the attempt's verdict.
    """

    time: float
    ends: Mapping[Path, int]

    @property
    def earliest(self) -> float:
        """Returns the earliest timestamp that this attempt's events can have, allowing for clock
        skew.
        """
        return self.time - SKEW


def start_now(request: Request) -> Start:
    """Returns the Start of an attempt that begins now."""
    logs = (*request.logs, request.job_log)
    look_again(*{log.parent for log in logs})
    return Start(time.time(), {log: size for log in logs if (size := records.size_of(log))})


@dataclass(frozen=True)
class Verdict:
    """Report on a failure, as shown to the user. `sure` means certain enough to act on without
    reading the logs.
    """

    cause: str  # key of CAUSES
    words: str
    node: int | None
    rank: int | None
    host: str
    lines: tuple[str, ...]
    next: str
    done: str = ""
    sure: bool = False
    nodes: int = 1  # number of nodes that show the cause

    @property
    def who(self) -> str:
        where = (
            f"node {self.node}" + (f" ({self.host})" if self.host else "")
            if self.node is not None
            else ""
        )
        return (
            " on ".join(filter(None, (f"rank {self.rank}" if self.rank is not None else "", where)))
            or "the job"
        )

    @property
    def kind(self) -> Cause:
        return CAUSES[self.cause]

    @property
    def then(self) -> Then:
        """Returns the decision. Excludes a host only if the cause is certain and specific to that
        host.
        """
        then = self.kind.then_on(self.nodes)
        if then is Then.ELSEWHERE and not (self.host and self.sure):
            return Then.STOP if self.kind.of_a_node else Then.HERE
        return then

    def __str__(self) -> str:
        said = [line for line in self.lines if line != self.words]
        if said and said[-1] == f"{TRACEBACK}:":
            said.pop()  # The traceback's header line adds no information.
        quoted = [f"  | {line}" for line in said]
        doubt = "" if self.sure or self.cause == "unknown" else "most likely "
        head = f"failed: {self.who}: {doubt}{self.kind.words} ({self.cause})"
        block = [
            head,
            f"  why: {self.words.removeprefix('why: ')}",
            *quoted,
            f"  done: {self.done}" if self.done else "",
            f"  next: {self.next}",
        ]
        return "\n".join(filter(None, block))

    def record(self) -> run_folder.Record:
        """Returns the verdict as a record for events and results.json."""
        return {"who": self.who, "then": self.then.value, **asdict(self)}


def judge(request: Request, outcome: AttemptOutcome, run: run_folder.Run, since: Start) -> Verdict:
    """Returns the verdict on a failed attempt, based on the logs, events and status since its
    start.
    """
    request = placed(request, outcome.status)
    attempt = fence.current(run.folder)
    events = run.read_events()
    faults = [event for event in events if _is_fault_of(event, attempt.order, since)]
    lines = [*_logged(request, since), *_faults(faults), *_seen(outcome)]
    verdict = _found(request, lines, read_beats(run.folder, attempt.number))
    if verdict is None or verdict.cause == "unknown":
        verdict = _abstained(verdict, _unexplained(request, outcome.status, lines, since), request)
    verdict = _with_others(verdict, request, outcome)
    stops = [event["time"] for event in events if event["event"] == "stopped"]
    if verdict.cause in FROM_OUTSIDE and max(stops, default=0.0) < since.earliest:
        verdict = _with_stop(verdict, lines)
    told = (event.get("next") for event in faults if event.get("rank") == verdict.rank)
    return replace(verdict, next=next(filter(None, told), verdict.next))


def placed(request: Request, status: Status) -> Request:
    """Fills in the request's hosts from the scheduler's placement if the scheduler can exclude
    hosts from later attempts.
    """
    return request.placed(status.hosts if status.leaves else ())


def _found(request: Request, lines: list[LogLine], beats: Mapping[int, Beat]) -> Verdict | None:
    """Returns the verdict according to the log lines, or None if they show no failure."""
    hosts = {host: node for node, host in enumerate(request.hosts)}
    finding = diagnose(
        lines,
        {(beat.node, beat.pid): beat.rank for beat in beats.values()},
        hosts,
        request.job.nodes,
    )
    return of_finding(finding, lines, request.host(finding.node)) if finding else None


def _logged(request: Request, since: Start) -> Iterator[LogLine]:
    """Yields the attempt's lines in the node and scheduler logs."""
    count = len(request.logs)
    look_again(*{log.parent for log in request.logs})
    for node, log in enumerate(request.logs):
        yield from read_lines(log, node, since.ends.get(log, 0), logs=count)
    for node, log in enumerate(request.engine_logs):
        if log.exists() and log.stat().st_mtime >= since.earliest:
            yield from read_lines(log, node, logs=count)


def _with_others(verdict: Verdict, request: Request, outcome: AttemptOutcome) -> Verdict:
    """Adds the other lost nodes to a verdict that blames a lost node."""
    lost = outcome.status.lost
    others = [node for node in lost if node not in {verdict.node, *outcome.alive}]
    if verdict.node not in lost or not others:
        return verdict
    named = "; ".join(f"lost node {node} ({request.host(node)}): {lost[node]}" for node in others)
    return replace(verdict, words=f"{verdict.words}; {named}", nodes=1 + len(others))


def _with_stop(verdict: Verdict, lines: list[LogLine]) -> Verdict:
    """Adds a remark to the verdict if the blamed node was asked to save but ended first. If no node
    is blamed, any node that was asked qualifies.
    """
    for line in lines:
        asked = line.who == "node" and line.text.startswith(ASKED)
        if asked and verdict.node in (None, line.node):
            return replace(verdict, words=f"{verdict.words}; {_cut_short(lines, line)}")
    return verdict


def _cut_short(lines: list[LogLine], asked: LogLine) -> str:
    after = [line for line in lines if line.node == asked.node and line.time >= asked.time]
    if any(line.text.startswith(LATE) for line in after):
        return (
            f"node {asked.node} did not finish saving before its deadline; training "
            "resumes from the last checkpoint"
        )
    lived = max(line.time for line in after) - asked.time
    limit = (
        "the scheduler kills a job before the grace time ends (ECS_CONTAINER_STOP_TIMEOUT on its "
        "instances, Slurm's KillWait)"
    )
    return (
        f"node {asked.node} was {asked.text}, and ended within {lived:.0f} s without a "
        f"checkpoint: {limit}"
    )


def _is_fault_of(event: run_folder.Record, order: int, since: Start) -> bool:
    """Returns whether an event is a `fault` event from this attempt. Compares attempt numbers if
    possible, because a node's clock may lag behind this machine's.
    """
    if event["event"] != "fault":
        return False
    own = event.get("order")
    return bool(event["time"] >= since.earliest) if own is None else own == order


def of_finding(finding: Diagnosis, lines: list[LogLine], host: str) -> Verdict:
    """Creates the verdict from a diagnosis. `host` is the name of the blamed node, or "" if
    unknown.
    """
    words = plain(finding.words)
    quoted = tuple(map(plain, quote(finding, lines)))
    return Verdict(
        finding.cause,
        words,
        finding.node,
        finding.rank,
        host,
        quoted,
        CAUSES[finding.cause].next_for("\n".join([words, *quoted])),
        sure=finding.sure,
        nodes=len(finding.nodes),
    )


def _abstained(named: Verdict | None, silent: Verdict, request: Request) -> Verdict:
    """Creates a verdict without a cause, with the rank that probably failed first, its exception,
    and all writers' last lines. If another node was killed without a message, blames that node
    instead.
    """
    if named is None or (silent.cause == "killed" and silent.node != named.node):
        return silent
    others = tuple(line for line in silent.lines if named.words not in line)
    return replace(
        named, lines=(*named.lines, *others), next=f"less {request.logs[named.node or 0]}"
    )


def plain(words: str) -> str:
    """Removes the exception class name from trainfleet's own messages, because it does not help the
    user.
    """
    return OURS.sub("", words)


def _unexplained(request: Request, status: Status, lines: list[LogLine], since: Start) -> Verdict:
    """Creates the verdict for a failure that no log line explains. Blames a node that was killed by
    a signal, or else the lowest-numbered failed node, and quotes each writer's last line.

    Nodes killed by SIGTERM are blamed last, because a scheduler sends SIGTERM to the other nodes of
    a failed job.
    """
    ended = sorted(
        (code == 128 + SIGTERM, _exit(code)[1] != "killed", node)
        for node, code in status.exits.items()
        if code
    )
    node = ended[0][2] if ended else None
    words, cause = _exit(status.exits.get(node) if node is not None else None)
    log = request.logs[node or 0]
    said = last_words([*lines, *_said_of_all(request.job_log, since)])
    # The status reason is already shown as the explanation.
    said = tuple(line for line in said if line != status.reason)
    reason, _, remedy = status.reason.partition(" next: ")
    then = (
        remedy
        or f"less {request.job_log if request.job_log.exists() and not log.exists() else log}"
    )
    return Verdict(cause, reason or words, node, None, request.host(node), said, then)


def _exit(code: int | None) -> tuple[str, str]:
    if code is None:
        return "it was stopped", "unknown"
    if code < 0 or code > 128:
        return f"it was killed by signal {code - 128 if code > 128 else -code}", "killed"
    if code in UNRUN:
        return f"it ended with exit code {code}: {UNRUN[code]}", "environment"
    return f"it ended with exit code {code} without an error message", "unknown"


def last_words(lines: list[LogLine]) -> tuple[str, ...]:
    """Returns the last line of each rank and other writer, newest TAIL only. If there is only one
    writer, returns its last TAIL lines.
    """
    last = {(line.node, line.rank, line.who): line for line in lines if line.text.strip()}
    newest = sorted(last.values(), key=lambda line: line.time)[-TAIL:]
    if len(newest) == 1:
        return tuple(
            [line.text for line in lines if (line.node, line.rank, line.who) in last][-TAIL:]
        )
    return tuple(f"{_writer(line)}: {line.text}" for line in newest)


def _writer(line: LogLine) -> str:
    who = line.who if line.rank is None else f"rank {line.rank}"
    return who if line.node is None else f"{who} on node {line.node}"


def _said_of_all(log: Path, since: Start) -> Iterator[LogLine]:
    """Yields the lines of the scheduler's job log, which has no timestamps. Skips lines about nodes
    killed because another node failed.
    """
    lines = read_lines(log, None, since.ends.get(log, 0))
    moment = time_of_day(log.stat().st_mtime) if lines else 0.0
    yield from (replace(line, time=moment) for line in lines if not FOLLOWED.search(line.text))


def _seen(outcome: AttemptOutcome) -> Iterator[LogLine]:
    """Yields the backend's and watchdog's observations as timestamped log lines."""
    now, status, alarm = time_of_day(time.time()), outcome.status, outcome.alarm
    if alarm:
        yield LogLine(now, alarm.node, alarm.rank, "watch", alarm.words)
    # Reasons from the scheduler: AWS Batch's statusReason, SageMaker's FailureReason, Slurm's
    # state.
    for words in status.reason.splitlines():
        yield LogLine(now - 1, None, None, "agent", words)
    for node, why in status.lost.items():
        how = (
            f"slow node {node}: its ranks send heartbeats, but it answers late"
            if node in outcome.alive
            else f"lost node {node}"
        )
        yield LogLine(now - 1, node, None, "watch", f"{how}: {why}")
    for node, code in status.exits.items():
        if code == UNLOGGED:
            yield LogLine(
                now - 1,
                node,
                None,
                "watch",
                f"node {node} failed, and its log can't be written",
            )
    severed = [node for node, code in status.exits.items() if code == SEVERED]
    if severed and len(severed) == len(status.exits):
        yield LogLine(
            now - 1,
            None,
            None,
            "watch",
            "all nodes failed, and they can't reach the run folder",
        )
        severed = []
    for node in severed:
        yield LogLine(
            now - 1,
            node,
            None,
            "watch",
            f"node {node} failed, and it can't reach the run folder",
        )


def _faults(faults: list[run_folder.Record]) -> Iterator[LogLine]:
    """Yields the faults that ranks recorded, formatted as the last lines of their tracebacks."""
    for event in faults:
        words = f"{event['error']}: {event['message']}" + (
            f"; why: {event['why']}" if event.get("why") else ""
        )
        for text in (f"{TRACEBACK}:", *event.get("traceback", ())[:-1], words):
            yield LogLine(
                time_of_day(event["time"]), event.get("node"), event.get("rank"), "rank", text
            )
