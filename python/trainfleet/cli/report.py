"""make report: draws the plots and report.html again from the run folder."""

from __future__ import annotations

from ..launch.command import run_named
from ..report import html, plots
from ..trust.errors import RunError
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    run = run_named(variables)
    if not run.metrics.exists():
        raise RunError(
            "nothing to report yet",
            where=str(run.folder),
            why="no step has been logged",
            next="make train",
        )
    drawn = plots.draw(run)
    print("\n".join(str(path) for path in (*drawn, html.write(run))))
    return 0
