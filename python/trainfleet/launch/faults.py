"""Faults that a rehearsal injects, each with its expected verdicts. The rehearsal's stage
(rehearsal.py) defines how and where to inject them.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ..backends.base import LINKS, OWN_HEAD
from ..report.rehearsal_table import FaultOutcome
from ..run.run_folder import Record
from ..watch.causes import CAUSES, Then
from .execution import STOPPED
from .rehearsal import (
    BREAK_AT,
    EVERY,
    KERNEL,
    LONGEST,
    MAJORITY,
    MOUNTS,
    PYTHON_OF_NODES,
    SPARE,
    STRUCK,
    RehearsalStage,
)

# File size limit in bytes: below the size of a checkpoint's files, above that of any of the run's
# logs.
SMALL = 600_000
# Duration in seconds, longer than the timeout for a silent node.
CUT, CUT_RATE = (30, "rate 1kbit burst 90 latency 1ms")
# Delays each packet, so that a step's few MB take half a second instead of a few hundredths. SLOWED
# is the maximum duration in seconds.
SLOWED, SLOW_RATE = 90, "rate 50mbit burst 32kb latency 2s"
SLOWLY = (
    f"train.steps={LONGEST} train.log_every=10 checkpoint.every={LONGEST} fleet.on_slow_node=warn"
)
USUAL = 30.0  # seconds of training until the usual step time is known (watchdog.RECENT)
FULL = f"prlimit --pid $p --fsize={SMALL}:{SMALL} 2>&1 && echo {STRUCK}"
# File permissions don't stop root, so if the rank runs as root, the checkpoint folder is remounted
# read-only over itself.
READ_ONLY = f"""[ "$(id -u)" = 0 ] || {{ chmod 555 "$c" && echo {STRUCK}; exit; }}
nsenter --target $p --mount --root --wd sh -c 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"' "$c" 2>&1 &&
echo {STRUCK}"""  # noqa: E501
# Hides the package on one host only, initially node 1's, so that a replacement host has it.
BROKEN_NODE = """
import os, sys
def is_here():
    own = os.uname().nodename
    mark = os.path.join(os.path.dirname(os.path.abspath(__file__)), "host")
    if os.environ.get("GROUP_RANK") != "1":
        return False
    try:
        with open(mark, "x") as file:
            file.write(own)
    except FileExistsError:
        with open(mark) as file:
            own = file.read() or own
    return own == os.uname().nodename
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "safetensors" and is_here():
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Missing())
"""
BROKEN_NUMBERS = f"""
import importlib.util, os, sys
class Poison:
    def find_spec(self, name, path=None, target=None):
        if name != "trainfleet.engine.step_guard" or os.environ.get("RANK") != "1":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        def exec_module(module):
            load(module)
            skips = module.Guard.skips
            def poisoned(self, step, loss, norm):
                return skips(self, step, loss * float("nan") if step > {BREAK_AT} else loss, norm)
            module.Guard.skips = poisoned
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Poison())
"""


@dataclass(frozen=True)
class Fault:
    """A named fault, its description, its expected verdicts, and the function that injects it."""

    name: str
    what: str
    verdicts: tuple[str, ...]
    play: Callable[[Fault, RehearsalStage], FaultOutcome]
    rank: int | None = None  # rank that the verdict must blame
    # Features that the stage must support (RehearsalStage.lacking).
    needs: tuple[str, ...] = ()


def rehearse(fault: Fault, stage: RehearsalStage) -> FaultOutcome:
    """Injects a fault and returns its outcome. The outcome gives the reason if this stage can't
    inject the fault.
    """
    if why := next((stage.lacking[need] for need in fault.needs if need in stage.lacking), ""):
        return FaultOutcome(fault.name, skipped=why, what=fault.what)
    outcome, left = fault.play(fault, stage), stage.left_over()
    broken = (*outcome.broken, *([f"leftover {stage.things}: {len(left)}"] if left else []))
    return replace(outcome, left=len(left), broken=broken, what=fault.what)


def _running(fault: Fault, stage: RehearsalStage, words: str = "") -> subprocess.Popen[str]:
    """Starts training and returns its process once the run has reached the fault's step."""
    process = stage.begin(fault.name, words)
    stage.await_step(fault.name, process)
    return process


def _ended(code: int, wanted: int = 0) -> list[str]:
    """Returns a violation message if a command's exit code is not `wanted`."""
    return [] if code == wanted else [f"the command ended with exit code {code}"]


def _signalled(
    number: signal.Signals, whom: str
) -> Callable[[Fault, RehearsalStage], FaultOutcome]:
    """Sends a signal to one process. The run must recover automatically and reach the same
    losses.
    """

    def play(fault: Fault, stage: RehearsalStage) -> FaultOutcome:
        process, began = _running(fault, stage), time.time()
        stage.strike(fault.name, whom, number)
        return _measure(fault, stage, began, _ended(stage.end(process)))

    return play


def _cut_off(fault: Fault, stage: RehearsalStage) -> FaultOutcome:
    """Cuts one node off from the others for a while. The run must continue without that node."""
    process, began = _running(fault, stage), time.time()
    if why := stage.shape(fault.name, CUT_RATE, CUT):
        stage.stop(fault.name, process)
        return FaultOutcome(fault.name, skipped=why)
    return _measure(fault, stage, began, _ended(stage.end(process)))


def _slowed(fault: Fault, stage: RehearsalStage) -> FaultOutcome:
    """Slows one node's network traffic. The run must continue with the same losses. The outcome
    reports whether the slow node was detected but does not require it, because steps on a loaded
    machine may take no longer than usual.
    """
    process = _running(fault, stage, SLOWLY)
    time.sleep(USUAL)
    began, named = time.time(), None
    why = stage.shape(fault.name, SLOW_RATE, SLOWED)
    while not why and not named and process.poll() is None and time.time() - began < SLOWED:
        found = next(
            (event for event in stage.events(fault.name, began) if event["event"] == "slow-link"),
            None,
        )
        named = found and found | {"cause": "slow"}
        time.sleep(0.5)
    stage.free()
    stage.stop(fault.name, process)
    if why:
        return FaultOutcome(fault.name, skipped=why)
    return _measure(
        fault, stage, began, _ended(process.returncode, STOPPED), named=named, ends=False
    )


def _headless(fault: Fault, stage: RehearsalStage) -> FaultOutcome:
    """Kills the head's processes, including the launcher and a rank. The standby must take over."""
    process, began = _running(fault, stage), time.time()
    head = stage.lose_head(fault.name)
    code = stage.end(process)
    took = next(
        (event for event in stage.events(fault.name, began) if event["event"] == "restarted"), None
    )
    named = took and took | {"node": 0 if took["who"] == f"the launcher on {head}" else None}
    return _measure(fault, stage, began, _ended(code), named=named)


def _measure(
    fault: Fault,
    stage: RehearsalStage,
    began: float,
    broken: list[str],
    most_lost: int | None = None,
    named: Record | None = None,
    ends: bool = True,
) -> FaultOutcome:
    """Returns a fault's outcome from the run's events since `began`. Checks what every fault
    requires: the right verdict, unchanged losses and a bounded number of repeated steps. `named`
    replaces the verdict event for faults that have no verdict. `ends` specifies whether the run
    must finish without being restarted by the user.
    """
    events = stage.events(fault.name, began)
    verdict = named or _first(events, "verdict")
    first = verdict or (_first(events, "damaged", "unsaved", "stopped") if ends else None)
    again = _first(events, "began", after=first["time"] if first else began)
    said = str(verdict["cause"]) if verdict else "none"
    wrong = _what_is_wrong(fault, verdict, said)
    equal = _has_equal_losses(stage, fault.name, ends)
    lost = sum(int(event.get("steps", 0)) for event in events if event["event"] == "lost")
    most = stage.steps if most_lost is None else most_lost
    failed = (*broken, *_unkept(wrong, equal, lost, most))
    seen, back = _seconds(began, first), _seconds(began, again)
    return FaultOutcome(fault.name, seen, said, not wrong, lost, back, equal, broken=failed)


def _unkept(wrong: str, equal: bool, lost: int, most_lost: int) -> Iterator[str]:
    """Yields a message for each violated requirement that is common to all faults."""
    if wrong:
        yield wrong
    if not equal:
        yield "the losses differ from those of the unbroken run"
    if lost > most_lost:
        yield f"{lost} steps ran twice"


def _seconds(began: float, event: Record | None) -> float | None:
    return max(0.0, round(event["time"] - began, 1)) if event else None


def _has_equal_losses(stage: RehearsalStage, name: str, ends: bool) -> bool:
    """Returns whether a run's losses equal those of the fault-free baseline. Compares only the
    steps it completed, unless the run must finish without being restarted by the user.
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


def _killed_launcher(fault: Fault, stage: RehearsalStage) -> FaultOutcome:
    process, began = _running(fault, stage), time.time()
    process.kill()
    process.communicate()
    outlived = not stage.outlives and stage.left_over()
    broken = ["ranks kept running without their launcher"] if outlived else []
    if code := stage.again(fault.name):
        broken.append(f"the same command ended with exit code {code}")
    return _measure(fault, stage, began, broken)


def _noticed(fault: Fault, stage: RehearsalStage) -> FaultOutcome:
    """Sends SIGUSR1 to a rank, as Slurm and AWS Batch do before they reclaim a machine."""
    process, began = _running(fault, stage), time.time()
    stage.strike(fault.name, "rank", signal.SIGUSR1)
    stage.end(process)
    status = stage.run(fault.name).read_results().get("status")
    broken = [] if status == "stopped" else [f"the run's status was {status}, not stopped"]
    if code := stage.again(fault.name):
        broken.append(f"the same command ended with exit code {code}")
    return _measure(fault, stage, began, broken, most_lost=0)


def _damaged(fault: Fault, stage: RehearsalStage) -> FaultOutcome:
    """Truncates the largest file in a stopped run's newest checkpoint to half its size."""
    process = _running(fault, stage)
    stage.stop(fault.name, process)
    stage.damage(fault.name)
    began = time.time()
    broken = [] if stage.again(fault.name) == 0 else ["the same command failed"]
    if not any(event["event"] == "damaged" for event in stage.events(fault.name, began)):
        broken.append("the damage was not detected")
    return _measure(fault, stage, began, broken)


def _at_checkpoints(command: str) -> Callable[[Fault, RehearsalStage], FaultOutcome]:
    """Runs a shell command that makes checkpoint writes fail on rank 1, then makes them work
    again.
    """

    def play(fault: Fault, stage: RehearsalStage) -> FaultOutcome:
        process = _running(fault, stage)
        began, said = time.time(), stage.at_rank(fault.name, command)
        if said == STRUCK:
            code = stage.end(process)
        else:
            stage.stop(fault.name, process)
        stage.let_write(fault.name)
        if said != STRUCK:
            return FaultOutcome(
                fault.name, skipped=" ".join(said.split()) or "the host printed nothing"
            )
        return _mended(fault, stage, began, code)

    return play


def _mended(
    fault: Fault, stage: RehearsalStage, began: float, code: int, words: str = ""
) -> FaultOutcome:
    """Measures the outcome of a fault that persists across attempts, after the stage has undone it.
    The command must fail with the fault's cause, and rerunning it must continue the run.
    Alternatively, the run may continue without the faulty node.
    """
    restarted = any(event["event"] == "restarted" for event in stage.events(fault.name, began))
    elsewhere = (
        code == 0
        and restarted
        and any(CAUSES[cause].then is Then.ELSEWHERE for cause in fault.verdicts)
    )
    broken = [] if code == 1 or elsewhere else [f"the command ended with exit code {code}, not 1"]
    stops = all(CAUSES[cause].then is Then.STOP for cause in fault.verdicts)
    broken += (
        ["the launcher retried a failure that a retry can't fix"] if restarted and stops else []
    )
    if again := stage.again(fault.name, words):
        broken.append(f"after the correction, the same command ended with exit code {again}")
    return _measure(fault, stage, began, broken)


def _changed(program: str, words: str = "") -> Callable[[Fault, RehearsalStage], FaultOutcome]:
    """Returns a function that injects the fault: the nodes' Python runs `program` at startup, as if
    the installation were broken, until the command ends.
    """

    def play(fault: Fault, stage: RehearsalStage) -> FaultOutcome:
        began = time.time()
        stage.alter(fault.name, program)
        code = stage.end(stage.begin(fault.name, words))
        stage.restore()
        return _mended(fault, stage, began, code, words)

    return play


KILLED = ("killed", "lost-node")
FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "rank-killed",
            f"rank 1 is killed (kill -9) at step {BREAK_AT}",
            ("killed",),
            _signalled(signal.SIGKILL, "rank"),
            1,
        ),
        Fault(
            "agent-killed",
            "node 1's torchrun is killed (kill -9)",
            KILLED,
            _signalled(signal.SIGKILL, "agent"),
            1,
        ),
        Fault(
            "rank-stopped",
            "rank 1 hangs (SIGSTOP)",
            ("hang",),
            _signalled(signal.SIGSTOP, "rank"),
            1,
        ),
        Fault(
            "link-cut",
            f"node 1 is cut off from the network for {CUT} s",
            ("lost-node", "slow"),
            _cut_off,
            1,
            (LINKS, SPARE),
        ),
        Fault(
            "link-slowed",
            "node 1 sends at only 50 Mbit/s",
            ("slow", "none"),
            _slowed,
            1,
            (LINKS, MAJORITY, KERNEL),
        ),
        Fault(
            "launcher-killed",
            "make train is killed (kill -9) and run again",
            (),
            _killed_launcher,
        ),
        Fault(
            "head-lost",
            "all processes on the head are killed (kill -9), including the launcher",
            KILLED,
            _headless,
            0,
            (OWN_HEAD,),
        ),
        Fault(
            "notice", "rank 1's machine will be reclaimed; make train is run again", (), _noticed
        ),
        Fault(
            "checkpoint-damaged",
            "the newest checkpoint's largest file is cut to half its size",
            (),
            _damaged,
        ),
        Fault(
            "disk-full",
            "the disk is full for checkpoints, then has space again",
            ("disk",),
            _at_checkpoints(FULL),
            1,
        ),
        Fault(
            "read-only",
            "the checkpoint folder is read-only, then writable again",
            ("disk",),
            _at_checkpoints(READ_ONLY),
            needs=(MOUNTS,),
        ),
        Fault(
            "nan",
            f"rank 1's loss is NaN from step {BREAK_AT + 1}, and normal in the next attempt",
            ("nan",),
            _changed(BROKEN_NUMBERS, "train.max_consecutive_skips=3"),
            needs=(PYTHON_OF_NODES,),
        ),
        Fault(
            "no-environment",
            "node 1 lacks a Python package, then has it again",
            ("environment",),
            _changed(BROKEN_NODE),
            1,
            (PYTHON_OF_NODES,),
        ),
    )
}
assert BREAK_AT % EVERY, "a fault must cost at least one step"
