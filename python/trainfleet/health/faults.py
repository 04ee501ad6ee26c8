"""Faults that `make rehearse` and the drills inject, and what a run promises for each of them.

A rank injects its own faults, so they work on every backend. TRAINFLEET_FAULT=name@step:rank
selects the fault, the step and the rank. The variable is accepted only by a run that is named after
the fault. Only the first attempt injects the fault, unless it persists (`stays`). Faults without
`play` must be injected from outside the ranks, by launch/faults.py.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from ..run import records
from ..run.run_folder import Run, step_name
from ..trust.errors import RunError
from . import fence

VARIABLE = "TRAINFLEET_FAULT"
PREFIX = "rehearsal-"  # name prefix of the runs in which faults may be injected
BREAK_AT, RANK = 50, 1  # step after which the fault is injected, and the rank
# File size limit in bytes, below the size of a checkpoint's files.
SMALL = 600_000
SLOWNESS = 0.2  # seconds added to each forward pass of a slow rank
LONGEST = 8000  # steps of a run that is stopped once its fault is detected
SLOWLY = (
    f"train.steps={LONGEST} train.log_every=10 checkpoint.every={LONGEST} fleet.on_slow_node=warn"
)
CUT = 30  # seconds for which a link is cut, longer than the timeout for a silent node
# Requirements that a fleet may not meet: links that only the run uses, a head that only the run
# uses, enough nodes to continue without one or to identify a slow one, a network that tc can slow
# down, and checkpoints in a folder.
LINKS, OWN_HEAD, SPARE = "links", "head", "spare"
MAJORITY, KERNEL, DISK = "majority", "kernel network", "disk"
KILLED = ("killed", "lost-node")
Play = Callable[[Any], object]  # injects a fault into the rank of an engine.trainer.Trainer


@dataclass(frozen=True)
class Fault:
    """A fault, and what a run promises if it occurs."""

    name: str
    what: str
    verdicts: tuple[str, ...] = ()  # causes that the verdict may name, or none for no verdict
    rank: int | None = None  # rank that the verdict must blame
    needs: tuple[str, ...] = ()  # requirements that the fleet must meet
    play: Play | None = None  # None if a rank can't inject the fault itself
    within: float = 60.0  # maximum seconds until it is detected
    lost: int = BREAK_AT  # maximum number of steps that run twice
    event: str = ""  # event that must be recorded
    words: str = ""  # config overrides of the run
    stays: bool = False  # whether it persists: from the start of each attempt on the same host


def _send(number: signal.Signals, whom: Callable[[], int] = os.getpid) -> Play:
    return lambda trainer: os.kill(whom(), number)


def _fill_disk(trainer: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, SMALL))


def _forbid_writes(trainer: Any) -> None:
    """Makes the checkpoint folder read-only for this rank, even if the rank runs as root."""
    folder = str(trainer.checkpoints.store.files.folder)

    def refuse(event: str, given: tuple[Any, ...]) -> None:
        writes = event == "os.mkdir" or (event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR))
        if writes and str(given[0]).startswith(folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), given[0])

    sys.addaudithook(refuse)


def _poison(trainer: Any) -> None:
    skips = trainer.guard.skips
    trainer.guard.skips = lambda step, loss, norm: skips(step, loss * float("nan"), norm)


def _slow_down(trainer: Any) -> None:
    own_work = trainer.watch.own_work

    @contextmanager
    def slow() -> Iterator[None]:
        with own_work():
            time.sleep(SLOWNESS)
            yield

    trainer.watch.own_work = slow


def _tear(trainer: Any) -> None:
    """Truncates the newest checkpoint's largest file to half its size, and kills this rank."""
    if save := trainer.checkpoints.under_way:
        save.join()
    store = trainer.checkpoints.store
    folder = step_name(store.steps()[-1])
    files = {
        name: size
        for place in store.places
        for name, size in store.files.sizes(f"{place}{folder}").items()
    }
    name = max(files, key=files.__getitem__)
    with store.files.open(name) as stream:
        half = stream.read(files[name] // 2)
    store.files.remove(name)
    with store.files.create(name) as stream:
        stream.write(half)
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(error: Callable[[], Exception]) -> Play:
    def play(trainer: Any) -> None:
        raise error()

    return play


ROWS = (
    Fault("rank-killed", f"rank 1 is killed (kill -9) at step {BREAK_AT}", ("killed",), 1,
          play=_send(signal.SIGKILL)),
    Fault("agent-killed", "node 1's torchrun is killed (kill -9)", KILLED, 1,
          play=_send(signal.SIGKILL, os.getppid)),
    Fault("rank-stopped", "rank 1 hangs (SIGSTOP)", ("hang",), 1, play=_send(signal.SIGSTOP)),
    Fault("rank-slow", f"rank 1 takes {SLOWNESS} s longer per step", ("slow",), 1,
          play=_slow_down, within=90.0, words=SLOWLY),
    Fault("rank-raised", "rank 1 raises an exception", ("code",), 1,
          play=_raise(lambda: IndexError("an exception raised by the rehearsal"))),
    Fault("out-of-memory", "rank 1 runs out of host memory", ("host-memory",), 1,
          play=lambda trainer: bytearray(sys.maxsize - 1)),
    Fault("link-cut", f"node 1 is cut off from the network for {CUT} s",
          ("lost-node", "slow"), 1, (LINKS, SPARE)),
    Fault("link-slowed", "node 1 sends at only 50 Mbit/s", ("slow", "none"), 1,
          (LINKS, MAJORITY, KERNEL), within=90.0, words=SLOWLY),
    Fault("launcher-killed", "make train is killed (kill -9) and run again"),
    Fault("head-lost", "all processes on the head are killed (kill -9), with the launcher",
          KILLED, 0, (OWN_HEAD,)),
    Fault("notice", "rank 1's machine is about to be reclaimed; make train is run again",
          play=_send(signal.SIGUSR1), lost=0, event="stopped"),
    Fault("checkpoint-damaged", "rank 1 is killed and the newest checkpoint's largest file is "
          "cut to half its size", ("killed",), 1, play=_tear, event="damaged"),
    Fault("disk-full", "the checkpoints' disk fills up, then has space again", ("disk",), 1,
          (DISK,), _fill_disk, within=180.0, lost=LONGEST),
    Fault("read-only", "the checkpoint folder is read-only, then writable again", ("disk",),
          None, (DISK,), _forbid_writes, within=180.0, lost=LONGEST),
    Fault("nan", f"rank 1's loss is NaN from step {BREAK_AT + 1}, and normal in the next "
          "attempt", ("nan",), play=_poison, words="train.max_consecutive_skips=3"),
    Fault("no-environment", "node 1 lacks a Python package, then has it again",
          ("environment",), 1, stays=True,
          play=_raise(lambda: ModuleNotFoundError("No module named 'safetensors'"))),
)  # fmt: skip
FAULTS = {fault.name: fault for fault in ROWS}


@dataclass(frozen=True)
class FaultOrder:
    """Request to inject a fault, as encoded in VARIABLE."""

    fault: Fault
    step: int
    rank: int

    def __str__(self) -> str:
        return f"{self.fault.name}@{self.step}:{self.rank}"

    def is_due(self, run: Run) -> bool:
        """Returns whether this process must inject the fault: in the run's first attempt, and also
        in later ones on the same host if the fault persists.
        """
        if int(os.environ.get("RANK", "0")) != self.rank:
            return False
        order, again = (os.environ.get(name) or "0" for name in (fence.VARIABLE, fence.AGAIN))
        if (order, again) == ("1", "0"):
            return True
        hosts = [event["host"] for event in run.read_events() if event["event"] == "struck"]
        return self.fault.stays and platform.node() in hosts

    def play(self, run: Run, trainer: Any = None) -> None:
        """Records the fault, and injects it."""
        run.record("struck", fault=self.fault.name, rank=self.rank, host=platform.node())
        assert self.fault.play
        self.fault.play(trainer)


UNSET = f"unset {VARIABLE}; make rehearse sets it"


def ordered(run: str) -> FaultOrder | None:
    """Returns the fault that VARIABLE requests, or None if it is not set.

    Raises:
        RunError: the request is malformed, or was made for another run than `run`.
    """
    if not (text := os.environ.get(VARIABLE)):
        return None
    match = re.fullmatch(r"([a-z-]{1,40})@([0-9]{1,9}):([0-9]{1,9})", text)
    fault = FAULTS.get(match[1]) if match else None
    if not match or fault is None or fault.play is None:
        why = f"use name@step:rank with one of {' '.join(FAULTS)}"
        raise RunError(f"{VARIABLE}={text[:80]!a} is not a fault", where=run, why=why, next=UNSET)
    if run != PREFIX + fault.name:
        why = f"{VARIABLE}={text} is set, but only the run {PREFIX}{fault.name} injects this fault"
        raise RunError("the run is not a rehearsal", where=run, why=why, next=UNSET)
    return FaultOrder(fault, int(match[2]), int(match[3]))


def environment(run: str, ranks: float = inf, steps: float = inf) -> dict[str, str]:
    """Returns the environment variable that makes the nodes inject the requested fault, or {} if
    none is requested.

    Raises:
        RunError: the run is not the fault's rehearsal, or has too few ranks or steps.
    """
    if not (order := ordered(run)):
        return {}
    if order.rank >= ranks or not 0 < order.step < steps:
        why = f"the run has {ranks} ranks and {steps} steps"
        raise RunError(f"can't inject the fault {order}", where=run, why=why, next=UNSET)
    return {VARIABLE: str(order)}


def arm(run: Run, trainer: Any) -> None:
    """Makes an engine.trainer.Trainer inject the fault that VARIABLE requests, if it is set.

    Raises RunError if the run is not the fault's rehearsal.
    """
    if not (order := ordered(run.name)):
        return

    def play(step: int, trainer: Any) -> None:
        if step == order.step and order.is_due(run):
            order.play(run, trainer)

    trainer.after_step = play


def begin() -> None:
    """Injects a fault that exists from the start. Called when a rank imports the engine.

    Ignores malformed requests, because `main` raises their errors later.
    """
    if VARIABLE not in os.environ:
        return
    node, attempt = (int(os.environ.get(name) or 0) for name in ("GROUP_RANK", fence.VARIABLE))
    run = Run(Path(sys.argv[-1]), records.node(node, attempt))
    with suppress(RunError):
        if (order := ordered(run.name)) and order.fault.stays and order.is_due(run):
            order.play(run)
