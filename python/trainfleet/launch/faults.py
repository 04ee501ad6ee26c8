"""Prepares a rehearsal's stage, injects the table's faults (health/faults.py) into its runs, and
judges the outcomes.

`stage_for` chooses the stage for a config: in jobs, on hosts, or on this machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..backends import backend_of, shared
from ..backends.base import Can
from ..backends.head import Head
from ..config import Config
from ..health.faults import CUT, DISK, FAULTS, KERNEL, MAJORITY, SPARE, Fault
from ..report.rehearsal_table import FaultOutcome
from ..run.run_folder import Record, take_lock
from ..trust.errors import BackendError, ConfigError, Problem, RunError
from ..trust.safe_output import is_agreed
from ..trust.spelling import suggest
from ..watch.causes import CAUSES, Then
from .execution import STOPPED
from .rehearsal import LACKING, SEEN, WHOLE, HostStage, RehearsalStage, nodes_of

CUT_RATE = "rate 1kbit burst 90 latency 1ms"
# Delays every packet, so that a step's few MB take half a second instead of a few hundredths of
# one.
SLOW_RATE = "rate 50mbit burst 32kb latency 2s"
SLOWED = 90  # maximum seconds for which a link or rank is slowed
LAG = 60.0  # extra seconds allowed for detection on other machines
USUAL = 30.0  # seconds of training until the usual step time is established (watchdog.RECENT)


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


def require_hosts(head: Head) -> Config:
    """Returns the config with the existing hosts, using the addresses that this machine can reach.

    Raises:
        ConfigError: the hosts are unsuitable for a rehearsal.
        BackendError: AWS does not list the hosts.
    """
    makes = Can.MACHINES in backend_of(head.config).can
    located, then, problem = head.located, "make rehearse SET='fleet.backend=local'", ""
    if head.by_agent:
        problem = (
            "a rehearsal needs SSH, but these hosts can be reached only through Session Manager; "
            "set fleet.aws.allow_ssh_from"
        )
    elif (count := len(located.fleet.hosts)) < 2:
        problem = f"a rehearsal needs two hosts, or three to cut one off; the fleet has {count}"
        then = "make setup NODES=4" if makes else then
    if problem:
        raise ConfigError.of("fleet.hosts", problem, next=then)
    return located


def lacking(config: Config, head: Head | None) -> dict[str, str]:
    """Returns the fault requirements that the config's nodes do not meet, with reasons."""
    if not head:
        shares = Can.SHARED in backend_of(config).can
        return LACKING if shares else LACKING | {DISK: "checkpoints are in S3"}
    found, nodes, row = dict[str, str](), nodes_of(config), config.fleet.node_type
    if len(config.fleet.hosts) < 3:
        found[SPARE] = "a run on two hosts can't continue on one"
    if nodes < 3:
        found[MAJORITY] = "with two nodes, the slow one can't be identified; use four hosts"
    elif row and row.efa:
        found[KERNEL] = "EFA traffic bypasses the kernel, so tc can't slow it down"
    return found


@contextmanager
def stage_for(config: Config, sure: bool) -> Iterator[RehearsalStage]:
    """Yields the stage on which to inject faults. Asks for consent before using real
    nodes, unless `sure` is set.

    Raises:
        ConfigError: the faults can't be injected on this fleet.
        RunError: the user did not consent, or the baseline run failed.
        BackendError: another rehearsal is running, or a host can't be reached or restored.
    """
    backend, parent = backend_of(config), Path(tempfile.gettempdir()).resolve()
    located = require_hosts(head) if (head := backend.harm()) else config
    if backend.hands_over and not head:
        host = next(iter(config.fleet.hosts), "the head node").partition("=")[0]
        problem = "a rehearsal must run on the machine that has sbatch"
        then = f"run ssh {host}, then make rehearse there"
        raise ConfigError.of("fleet.hosts", problem, next=then)
    if not backend.is_here:
        where = ", ".join(located.fleet.hosts) if head else f"{config.fleet.backend} nodes"
        what = "kill, stop and cut off processes of separate short runs"
        if not sure and not is_agreed(f"{what} on {where}?"):
            why = "a rehearsal disrupts real hosts and needs your consent"
            raise RunError(why, where=where, next="make rehearse YES=1")
        if not head and Can.SHARED in backend.can:
            parent = Path(config.fleet.shared_folder or Path.cwd())
    words = "the rehearsal uses separate runs in a separate folder, starting with a fault-free run"
    print(words)
    with own_folder(parent) as folder:
        stage = HostStage if head else RehearsalStage
        with prepared(stage(folder, shared(located), lacking(located, head))) as made:
            yield made


@contextmanager
def prepared(made: RehearsalStage) -> Iterator[RehearsalStage]:
    """Yields the stage holding the training data and the losses of a fault-free baseline run.
    Removes its files, processes and jobs on exit.

    Raises:
        BackendError: something can't be removed, or a host can't be reached.
        RunError: the baseline run failed.
    """
    with _guarded(made):
        made.clear()
        made.furnish()
        if code := made.end(made.begin(WHOLE)):
            what = "the fault-free run failed before any fault was injected"
            why = f"it ended with exit code {code}: {made.said.strip()[-800:]}"
            raise RunError(what, where=str(made.folder), why=why, next="make doctor")
        made.whole = made.losses(WHOLE)
        yield made


@contextmanager
def _guarded(made: RehearsalStage) -> Iterator[None]:
    """Clears the stage on exit. If this process is killed, a child process clears the stage."""
    reader, writer = os.pipe()
    if (guard := os.fork()) == 0:
        os.setsid()
        os.close(writer)
        for descriptor in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        try:
            if not os.read(reader, 1):
                made.clear()
        finally:
            shutil.rmtree(made.folder, ignore_errors=True)
            os._exit(0)
    os.close(reader)
    try:
        yield
    finally:
        made.clear()
        os.write(writer, b".")
        os.close(writer)
        os.waitpid(guard, 0)


@contextmanager
def own_folder(parent: Path) -> Iterator[Path]:
    """Yields this user's rehearsal folder, and removes it afterwards. Raises BackendError if
    another rehearsal is running, or if the folder belongs to another user.
    """
    folder = parent / f"trainfleet-rehearsal-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        what = "the rehearsal folder belongs to another user"
        raise BackendError(what, where=str(folder), next=f"ls -ld {folder}")
    if (lock := take_lock(folder)) is None:
        then = "wait until it ends, or stop it with Ctrl-C"
        raise BackendError("another rehearsal is running", where=str(folder), next=then)
    with lock:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def rehearse(fault: Fault, stage: RehearsalStage) -> FaultOutcome:
    """Injects a fault and returns its outcome. If this stage can't inject the fault, the outcome is
    marked as skipped, with the reason.
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
    """Trains with a fault that a rank injects into itself. If a retry can't fix the failure, the
    command must fail without retrying, and rerunning it must resume the run.
    """
    code = stage.end(stage.begin(fault.name, fault.words, plays=True))
    began = stage.struck(fault.name)
    then = {CAUSES[cause].then for cause in fault.verdicts}
    wanted = [code for how in then for code in CODES[how]] or [STOPPED]
    broken = _ended(code, *wanted)
    if then == {Then.STOP} and _first(stage.events(fault.name, began), "restarted"):
        broken.append("the launcher retried a failure that a retry can't fix")
    if code and (again := stage.end(stage.begin(fault.name, fault.words))):
        broken.append(f"rerunning the command failed with exit code {again}")
    return _measure(fault, stage, began, broken)


# Acceptable exit codes after a failure, by the verdict's decision on retries.
CODES = {Then.HERE: (0,), Then.ELSEWHERE: (0, 1), Then.STOP: (1,)}


def _slow(fault: Fault, stage: Any) -> FaultOutcome:
    """Slows one rank or its network traffic. Training must continue with unchanged losses. The run
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
    if not fault.play:
        stage.free()
    stage.stop(fault.name, process)
    if why:
        return FaultOutcome(fault.name, skipped=why)
    broken = _ended(process.returncode, STOPPED)
    return _measure(fault, stage, began, broken, named=named, ends=False)


def _cut_off(fault: Fault, stage: HostStage) -> FaultOutcome:
    """Cuts one node off from the others for a while. The run must continue without that node."""
    process, began = _running(fault, stage), time.time()
    if why := stage.shape(fault.name, CUT_RATE, CUT):
        stage.stop(fault.name, process)
        return FaultOutcome(fault.name, skipped=why)
    return _measure(fault, stage, began, _ended(stage.end(process), 0))


def _headless(fault: Fault, stage: HostStage) -> FaultOutcome:
    """Kills the head's processes, including the launcher and a rank. The standby must take over."""
    process, began = _running(fault, stage), time.time()
    head = stage.lose_head()
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
    if code := stage.end(stage.begin(fault.name)):
        broken.append(f"rerunning the command failed with exit code {code}")
    return _measure(fault, stage, began, broken)


# Faults that need more than a rank injecting them. A stage skips them if it can't meet their needs.
PLAYS: dict[str, Callable[[Fault, Any], FaultOutcome]] = {
    "rank-slow": _slow,
    "link-slowed": _slow,
    "link-cut": _cut_off,
    "head-lost": _headless,
    "launcher-killed": _killed_launcher,
}


def _measure(
    fault: Fault,
    stage: RehearsalStage,
    began: float,
    broken: list[str],
    named: Record | None = None,
    ends: bool = True,
) -> FaultOutcome:
    """Computes a fault's outcome from the run's events since `began`. `named` replaces the
    verdict event if the fault produces no verdict. `ends` is whether the run must finish.
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
        broken.append(f"the run recorded no {fault.event} event")
    outcome = FaultOutcome(fault.name, seen, said, not wrong, lost, back, equal)
    return replace(outcome, broken=(*broken, *_unkept(fault, stage, outcome, wrong)))


def _unkept(
    fault: Fault, stage: RehearsalStage, outcome: FaultOutcome, wrong: str
) -> Iterator[str]:
    """Yields a message for each violated promise, out of those that all faults share."""
    if wrong:
        yield wrong
    if outcome.noticed is not None and outcome.noticed > fault.within + LAG * (
        not stage.backend.is_here
    ):
        yield f"the fault was detected only after {outcome.noticed:.0f} s"
    if not outcome.equal:
        yield "the losses differ from those of the fault-free run"
    if outcome.lost > fault.lost:
        yield f"{outcome.lost} steps ran twice"


def _seconds(began: float, event: Record | None) -> float | None:
    return max(0.0, round(event["time"] - began, 1)) if event else None


def _has_equal_losses(stage: RehearsalStage, name: str, ends: bool) -> bool:
    """Returns whether a run's losses equal those of the fault-free baseline. Compares only the
    steps it completed, unless the run must finish.
    """
    losses = stage.losses(name)
    expected = stage.whole.items()
    return all(losses.get(step) == loss for step, loss in expected if ends or step in losses)


def _first(events: Iterable[Record], *names: str, after: float = 0.0) -> Record | None:
    """Returns the first event after a given time that has one of these names, or None."""
    return next((one for one in events if one["event"] in names and one["time"] > after), None)


def _what_is_wrong(fault: Fault, verdict: Record | None, said: str) -> str:
    """Describes the verdict's error (wrong cause or wrong rank), or returns "" if the verdict is
    right.
    """
    if said not in (fault.verdicts or ("none",)):
        return f"the verdict was {said}, not {' or '.join(fault.verdicts) or 'none'}"
    # A rehearsal's node has exactly one rank, so node and rank numbers match.
    if verdict and fault.rank is not None and verdict["node"] != fault.rank:
        return f"the verdict blames {verdict.get('who') or verdict.get('host')}"
    return ""
