"""What a rehearsal came to: rehearsal.json in the run folder that it leaves, and the rows of its
table.
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
    "noticed after",
    "verdict",
    "steps lost",
    "trains again in",
    "losses",
    "left over",
    "promise",
)
KEPT = ("config.yaml", "results.json", "metrics.jsonl")  # of the unbroken run
Seconds = Annotated[float, Range(0, 1e9)]


@dataclass(frozen=True)
class FaultOutcome:
    """What became of one fault. `broken` are the promises that were not kept; `skipped` says why it
    could not be played.
    """

    name: Name
    noticed: Seconds | None = None  # seconds after the fault
    verdict: Name = "none"
    right: bool = True  # the cause, and whom it blames
    lost: Count = 0  # steps done twice
    again: Seconds | None = None  # seconds until ranks trained again
    equal: bool = True  # the losses, to those of the unbroken run
    left: Count = 0  # processes, hosts with some, or jobs that were left over
    broken: tuple[Name, ...] = ()
    skipped: Name = ""
    what: Name = ""  # was done

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table, by HEAD."""
        if self.skipped:
            return (self.name, *("",) * (len(HEAD) - 2), f"not played here: {self.skipped}")
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
    """All of it: on which backend, and the faults in the order in which they were played."""

    backend: Name
    outcomes: tuple[FaultOutcome, ...]

    @property
    def is_broken(self) -> bool:
        """Whether a promise was."""
        return any(outcome.broken for outcome in self.outcomes)

    @property
    def summary(self) -> str:
        """How it went, in one line."""
        broken = sum(bool(outcome.broken) for outcome in self.outcomes)
        skipped = sum(bool(outcome.skipped) for outcome in self.outcomes)
        kept = len(self.outcomes) - broken - skipped
        return f"{kept} of {kept + broken} faults were survived as promised" + (
            f", {skipped} not played here" if skipped else ""
        )


def write(run: Run, unbroken: Path, backend: str, outcomes: Sequence[FaultOutcome]) -> None:
    """Leaves a rehearsal in a run's folder, which it makes, with what shows that the unbroken run
    was one.
    """
    run_folder.make_folder(run.folder)
    for name in KEPT:
        if (unbroken / name).is_file():
            run_folder.write_atomic(
                run.folder / name,
                untrusted_input.read_text(unbroken / name, 64 * untrusted_input.MEBIBYTE),
            )
    run_folder.write_json(run.rehearsal, asdict(Rehearsal(backend, tuple(outcomes))))


def read(run: Run) -> Rehearsal | None:
    """The rehearsal that a run's folder holds, None where it holds none; InputError where the file
    is not what one leaves.
    """
    record = run_folder.read_json(run.rehearsal)
    return (
        None
        if record is None
        else fit(Rehearsal, record, str(run.rehearsal), "make rehearse again")
    )
