"""The time of the profiled steps by part, on one screen."""

from __future__ import annotations

from collections.abc import Iterator

from ..run.records import Profile
from ..run.run_folder import Run, read_json
from ..trust.errors import RunError
from ..trust.validation import fit
from .history import duration, percent

WIDTH = 24  # characters of the longest bar
ROWS = 12


def describe(run: Run) -> Iterator[str]:
    """Yields the parts of the steps, the collectives' share, and the operations that took longest,
    each with its share.

    Raises:
        RunError: the run has no profile.
    """
    path = run.profile / "summary.json"
    if (record := read_json(path)) is None:
        raise RunError(
            "has no profile",
            where=str(run.profile),
            next="make logs says why; make profile measures again",
        )
    found = fit(Profile, record, str(path), "make profile measures again")
    total = found["seconds"] or 1.0
    first, last = found["steps"]
    yield (
        f"steps {first} to {last} of rank 0: {duration(total)} in all, "
        f"{duration(total / max(1, last - first + 1))} per step"
    )
    yield ""
    rest = total - sum(found["parts"].values())
    for name, seconds in [*found["parts"].items(), *([("the rest", rest)] if rest > 0 else [])]:
        yield _bar(name, seconds, total)
    talk = found["communication"]
    yield ""
    spent, shown = percent(talk["seconds"] / total), percent(talk["not_hidden"] / total)
    yield f"communication  {spent:>7}  of the time, {shown} without computing in parallel"
    yield ""
    width = max((len(row["name"][:60]) for row in found["top"]), default=0)
    for row in found["top"][:ROWS]:
        name, seconds = row["name"][:60], row["seconds"]
        yield (
            f"{name:<{width}}  {percent(seconds / total):>7}  {duration(seconds):>8}  "
            f"{row['calls']:>6,} calls"
        )
    yield ""
    yield f"trace  {run.profile}/trace.json.gz  (drop it on ui.perfetto.dev)"
    yield "next   make train, or make profile SET='...' to see what another setting changes"


def _bar(name: str, seconds: float, total: float) -> str:
    return (
        f"{name:<14} {percent(seconds / total):>7}  {duration(seconds):>8}  "
        f"{'█' * round(WIDTH * seconds / total)}"
    ).rstrip()
