"""Reads and writes a rehearsal's results (rehearsal.json in its run folder), and builds the rows of
the results table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from ..run import run_folder
from ..run.run_folder import Run
from ..trust import untrusted_input
from ..trust.validation import Count, Name, Range, fit
from .history import duration

HEAD = (
    "fault",
    "detected after",
    "verdict",
    "steps lost",
    "recovered in",
    "losses",
    "left over",
    "promise",
)
KEPT = ("config.yaml", "results.json", "metrics.jsonl")  # files copied from the fault-free run
Seconds = Annotated[float, Range(0, 1e9)]


@dataclass(frozen=True)
class FaultOutcome:
    """Result of one injected fault. `broken` lists the broken promises, and `skipped` is the reason
    if the fault was not injected.
    """

    name: Name
    noticed: Seconds | None = None  # seconds from the fault to its detection
    verdict: Name = "none"
    right: bool = True  # whether the verdict names the right cause and the right rank or host
    lost: Count = 0  # number of repeated steps
    again: Seconds | None = None  # seconds until the ranks resumed training
    equal: bool = True  # whether the losses match those of the fault-free run
    left: Count = 0  # number of leftover processes, hosts with leftover processes, or jobs
    broken: tuple[Name, ...] = ()
    skipped: Name = ""
    what: Name = ""  # description of the injected fault

    @property
    def cells(self) -> tuple[str, ...]:
        """Returns the table row, with the columns of HEAD."""
        if self.skipped:
            return (self.name, *("",) * (len(HEAD) - 2), f"not tried here: {self.skipped}")
        return (
            self.name,
            duration(self.noticed),
            f"{self.verdict}, {'right' if self.right else 'wrong'}",
            str(self.lost),
            duration(self.again),
            "equal" if self.equal else "not equal",
            str(self.left),
            f"BROKEN: {'; '.join(self.broken)}" if self.broken else "kept",
        )


@dataclass(frozen=True)
class Rehearsal:
    """Backend of a rehearsal and the outcomes of its faults, in order."""

    backend: Name
    outcomes: tuple[FaultOutcome, ...]

    @property
    def is_broken(self) -> bool:
        """Returns whether any fault broke a promise."""
        return any(outcome.broken for outcome in self.outcomes)

    @property
    def summary(self) -> str:
        """Returns the rehearsal's outcome as one line."""
        broken = sum(bool(outcome.broken) for outcome in self.outcomes)
        skipped = sum(bool(outcome.skipped) for outcome in self.outcomes)
        kept = len(self.outcomes) - broken - skipped
        return f"survived {kept} of {kept + broken} faults as promised" + (
            f", {skipped} not tried here" if skipped else ""
        )


def write(run: Run, unbroken: Path, backend: str, outcomes: Sequence[FaultOutcome]) -> None:
    """Writes a rehearsal to a new run folder, together with files from the fault-free run."""
    run_folder.make_folder(run.folder)
    for name in KEPT:
        if (unbroken / name).is_file():
            run_folder.write_atomic(
                run.folder / name,
                untrusted_input.read_text(unbroken / name, 64 * untrusted_input.MEBIBYTE),
            )
    run_folder.write_json(run.rehearsal, asdict(Rehearsal(backend, tuple(outcomes))))


def read(run: Run) -> Rehearsal | None:
    """Returns the rehearsal in a run folder, or None if the folder does not contain one. Raises
    InputError if the file is malformed.
    """
    record = run_folder.read_json(run.rehearsal)
    return (
        None
        if record is None
        else fit(Rehearsal, record, str(run.rehearsal), "run make rehearse again")
    )
