"""Injects the table's faults (health/faults.py) into a rehearsal's runs, and judges what came of
them.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ..backends.base import Can
from ..health.faults import BREAK_AT, CUT, FAULTS, Fault
from ..report.rehearsal_table import FaultOutcome
from ..run.run_folder import Record
from ..trust.errors import ConfigError, Problem
from ..trust.spelling import suggest
from ..watch.causes import CAUSES, Then
from .execution import STOPPED
from .rehearsal import EVERY, SEEN, RehearsalStage

CUT_RATE = "rate 1kbit burst 90 latency 1ms"
# Delays each packet, so that a step's few MB take half a second instead of a few hundredths.
SLOW_RATE = "rate 50mbit burst 32kb latency 2s"
SLOWED = 90  # maximum seconds for which a link or rank is slow
USUAL = 30.0  # seconds of training until the usual step time is known (watchdog.RECENT)


def chosen(names: str) -> list[Fault]:
    """Returns the named faults, or all faults if `names` is empty. Raises ConfigError if a name is
    unknown.
    """
    wanted = names.replace(",", " ").split()
    problems = [
        Problem(0, "FAULTS", "", f"{name} is not a fault{suggest(name, FAULTS)}")
        for name in wanted
        if name not in FAULTS
    ]
    if problems:
        raise ConfigError(problems, next=f"set FAULTS to one or more of: {' '.join(FAULTS)}")
    return [FAULTS[name] for name in wanted] or list(FAULTS.values())


def rehearse(fault: Fault, stage: RehearsalStage) -> FaultOutcome:
    """Injects a fault and returns its outcome. The outcome gives the reason if this stage can't
    inject the fault.
    """
    if why := next((stage.lacking[need] for need in fault.needs if need in stage.lacking), ""):
        return FaultOutcome(fault.name, skipped=why, what=fault.what)
    outcome, left = PLAYS.get(fault.name, _played)(fault, stage), stage.left_over()
    broken = (*outcome.broken, *([f"left running: {len(left)}"] if left else []))
    return replace(outcome, left=len(left), broken=broken, what=fault.what)


def _running(fault: Fault, stage: RehearsalStage) -> subprocess.Popen[str]:
    """Starts training and returns its process once the run has reached the fault's step."""
    process = stage.begin(fault.name, fault.words)
    stage.await_step(fault.name, process)
    return process


def _ended(code: int, *wanted: int) -> list[str]:
    """Returns a violation message if a command's exit code is not one of `wanted`."""
    return [] if code in wanted else [f"the command ended with exit code {code}"]


def _played(fault: Fault, stage: RehearsalStage) -> FaultOutcome:
    """Runs a run in which a rank injects the fault. If the failure can't be retried, the command
    must fail, and rerunning it must continue the run.
    """
    code = stage.end(stage.begin(fault.name, fault.words, plays=True))
    began = stage.struck(fault.name)
    then = {CAUSES[cause].then for cause in fault.verdicts}
    wanted = [code for how in then for code in CODES[how]] or [STOPPED]
    broken = _ended(code, *wanted)
    if then == {Then.STOP} and _first(stage.events(fault.name, began), "restarted"):
        broken.append("the launcher retried a failure that a retry can't fix")
    if code and (again := stage.again(fault.name, fault.words)):
        broken.append(f"the same command ended with exit code {again}")
    return _measure(fault, stage, began, broken)


# Exit codes that a command may have after a failure, by the decision
CODES = {Then.HERE: (0,), Then.ELSEWHERE: (0, 1), Then.STOP: (1,)}


def _slow(fault: Fault, stage: RehearsalStage) -> FaultOutcome:
    """Slows one rank or its network traffic. The run must continue with the same losses, until it
    is stopped once the slow node is detected.
    """
    process = stage.begin(fault.name, fault.words, plays=fault.play is not None)
    stage.await_step(fault.name, process)
    if fault.play:
        began, why = stage.struck(fault.name), ""
    else:
        time.sleep(USUAL)
        began, why = time.time(), stage.shape(fault.name, SLOW_RATE, SLOWED)
    named = None
    while not why and not named and process.poll() is None and time.time() - began < SLOWED:
        found = _first(stage.events(fault.name, began), "slow", "slow-link")
        named = found and found | {"cause": "slow"}
        time.sleep(0.5)
    stage.free()
    stage.stop(fault.name, process)
    if why:
        return FaultOutcome(fault.name, skipped=why)
    broken = _ended(process.returncode, STOPPED)
    return _measure(fault, stage, began, broken, named=named, ends=False)


def _cut_off(fault: Fault, stage: RehearsalStage) -> FaultOutcome:
    """Cuts one node off from the others for a while. The run must continue without that node."""
    process, began = _running(fault, stage), time.time()
    if why := stage.shape(fault.name, CUT_RATE, CUT):
        stage.stop(fault.name, process)
        return FaultOutcome(fault.name, skipped=why)
    return _measure(fault, stage, began, _ended(stage.end(process), 0))


def _headless(fault: Fault, stage: RehearsalStage) -> FaultOutcome:
    """Kills the head's processes, including the launcher and a rank. The standby must take over."""
    process, began = _running(fault, stage), time.time()
    head = stage.lose_head(fault.name)
    code = stage.end(process)
    took = _first(stage.events(fault.name, began), "restarted")
    named = took and took | {"node": 0 if took["who"] == f"the launcher on {head}" else None}
    return _measure(fault, stage, began, _ended(code, 0), named=named)


def _killed_launcher(fault: Fault, stage: RehearsalStage) -> FaultOutcome:
    process, began = _running(fault, stage), time.time()
    process.kill()
    process.communicate()
    outlived = Can.OUTLIVES not in stage.backend.can and stage.left_over()
    broken = ["ranks kept running without their launcher"] if outlived else []
    if stage.prefixes:
        time.sleep(SEEN)  # another launcher may lead only once this one's lease has expired
    if code := stage.again(fault.name):
        broken.append(f"the same command ended with exit code {code}")
    return _measure(fault, stage, began, broken)


# Faults that aren't injected by a rank alone.
PLAYS: dict[str, Callable[[Fault, RehearsalStage], FaultOutcome]] = {
    "rank-slow": _slow,
    "link-slowed": _slow,
    "link-cut": _cut_off,
    "head-lost": _headless,
    "launcher-killed": _killed_launcher,
}
assert BREAK_AT % EVERY, "a fault must cost at least one step"
assert all(fault.play or fault.name in PLAYS for fault in FAULTS.values())


def _measure(
    fault: Fault,
    stage: RehearsalStage,
    began: float,
    broken: list[str],
    named: Record | None = None,
    ends: bool = True,
) -> FaultOutcome:
    """Returns a fault's outcome from the run's events since `began`. `named` replaces the verdict
    event for faults that have no verdict. `ends` specifies whether the run must finish.
    """
    events = stage.events(fault.name, began)
    verdict = named or _first(events, "verdict")
    first = verdict or (_first(events, "damaged", "unsaved", "stopped") if ends else None)
    again = _first(events, "began", after=first["time"] if first else began)
    said = str(verdict["cause"]) if verdict else "none"
    wrong = _what_is_wrong(fault, verdict, said)
    lost = sum(int(event.get("steps", 0)) for event in events if event["event"] == "lost")
    equal = _has_equal_losses(stage, fault.name, ends)
    seen, back = _seconds(began, first), _seconds(began, again)
    if fault.event and not _first(events, fault.event):
        broken.append(f"the run has no event {fault.event}")
    outcome = FaultOutcome(fault.name, seen, said, not wrong, lost, back, equal)
    return replace(outcome, broken=(*broken, *_unkept(fault, stage, outcome, wrong)))


def _unkept(
    fault: Fault, stage: RehearsalStage, outcome: FaultOutcome, wrong: str
) -> Iterator[str]:
    """Yields a message for each violated promise that is common to all faults."""
    if wrong:
        yield wrong
    if outcome.noticed is not None and outcome.noticed > fault.within + stage.lag:
        yield f"it was noticed only after {outcome.noticed:.0f} s"
    if not outcome.equal:
        yield "the losses differ from those of the unbroken run"
    if outcome.lost > fault.lost:
        yield f"{outcome.lost} steps ran twice"


def _seconds(began: float, event: Record | None) -> float | None:
    return max(0.0, round(event["time"] - began, 1)) if event else None


def _has_equal_losses(stage: RehearsalStage, name: str, ends: bool) -> bool:
    """Returns whether a run's losses equal those of the fault-free baseline. Compares only the
    steps it completed, unless the run must finish.
    """
    losses = stage.losses(name)
    return all(
        losses.get(step) == loss for step, loss in stage.whole.items() if ends or step in losses
    )


def _first(events: Iterable[Record], *names: str, after: float = 0.0) -> Record | None:
    """Returns the first event after a given time that has one of these names, or None."""
    return next((one for one in events if one["event"] in names and one["time"] > after), None)


def _what_is_wrong(fault: Fault, verdict: Record | None, said: str) -> str:
    """Describes what is wrong with a verdict (its cause or the blamed rank), or returns "" if it is
    right.
    """
    if said not in (fault.verdicts or ("none",)):
        return f"the verdict was {said}, not {' or '.join(fault.verdicts) or 'none'}"
    # A rehearsal's node has exactly one rank, so node and rank numbers match.
    if verdict and fault.rank is not None and verdict["node"] != fault.rank:
        return f"the verdict blames {verdict.get('who') or verdict.get('host')}"
    return ""
