"""What an input is, and how it is judged: no traceback, no hang, nothing taken that makes no sense, each refusal with its place."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainfleet.trust.errors import ConfigError, InputError, TrainfleetError

LIMIT = 4.0  # seconds of CPU for one input; a report with all its plots takes one on quiet cores
ASLEEP = 30.0  # seconds on the clock: what waits for ever uses none


@dataclass(frozen=True)
class Case:
    """One input. `run` feeds it to the program in a fresh folder; `refused`: whether it must be (else it only must not crash)."""

    group: str
    label: str
    run: Callable[[Path], object]
    refused: bool = True
    key: str | None = None  # that a refusal must name

    def __str__(self) -> str:
        return f"{self.group}: {self.label}"


class TooSlow(BaseException):
    """An input took longer than LIMIT."""


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Ends what uses more CPU than LIMIT, in the kernel's count of this process."""

    def stop(*_: object) -> None:
        raise TooSlow

    before = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    left, _ = signal.setitimer(signal.ITIMER_REAL, ASLEEP)  # what pytest-timeout has set
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, left)
        for number, handler in before.items():
            signal.signal(number, handler)


def judge(case: Case, folder: Path) -> str | None:
    """What is wrong with how the program took an input; None when it took it well.

    One that was too slow is tried again: a core that others share does less in a second of CPU.
    """
    fault = judge_once(case, folder)
    return (
        judge_once(case, folder.with_name(f"{folder.name}-again"))
        if fault == too_slow(case)
        else fault
    )


def too_slow(case: Case) -> str:
    return f"{case}: took more than {LIMIT} s"


def judge_once(case: Case, folder: Path) -> str | None:
    """As `judge`, at the first try."""
    here = Path.cwd()
    folder.mkdir(parents=True)
    os.chdir(folder)
    try:
        with (
            watched(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            case.run(folder)
    except TooSlow:
        return too_slow(case)
    except TrainfleetError as error:
        return _faults(case, error)
    except Exception as error:  # what a user would see as a traceback
        return f"{case}: {type(error).__name__}: {str(error)[:200]}"
    finally:
        os.chdir(here)
    return f"{case}: was taken" if case.refused else None


def _faults(case: Case, error: TrainfleetError) -> str | None:
    told = str(error)
    if not case.refused:
        return None
    if isinstance(error, ConfigError):
        if lost := [problem for problem in error.problems if not problem.where]:
            return f"{case}: no place: {lost[0]}"
        keys = [problem.key for problem in error.problems]
    else:
        if not error.where:
            return f"{case}: no place: {told[:200]}"
        keys = [error.key if isinstance(error, InputError) else error.why]
    if case.key and not any(case.key in key or key in case.key for key in keys if key):
        return f"{case}: names {keys}, not {case.key}: {told[:200]}"
    if any(ord(character) < 32 and character != "\n" for character in told):
        return f"{case}: its message holds a control character"
    return None


def judge_all(cases: list[Case], folder: Path) -> list[str]:
    """The faults of all. What tests before have left in this process is not walked by a garbage collection within a case."""
    gc.collect()
    gc.freeze()
    try:
        return [
            fault
            for number, case in enumerate(cases)
            if (fault := judge(case, folder / str(number)))
        ]
    finally:
        gc.unfreeze()
