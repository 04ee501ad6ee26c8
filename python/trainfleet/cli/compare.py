"""make compare: the differences of runs in configs and results, with their loss curves in one
plot.
"""

from __future__ import annotations

from ..report import listing
from ..run.run_folder import Run
from ..trust.errors import ConfigError, Problem
from ..trust.spelling import suggest
from .variables import Variables

MOST = 7  # runs that a reader can tell apart in a plot


def main(variables: Variables, started: float) -> int:
    runs = runs_of(variables.get("RUNS", ""))
    print("\n".join(listing.describe_differences(runs)))
    picture = runs[0].plots / "compare.png"
    listing.draw(runs, picture)
    print(f"\nplot  {picture}\nnext  make report RUN={runs[0].name} draws a run's own page")
    return 0


def runs_of(text: str) -> list[Run]:
    """Returns the runs that RUNS names; ConfigError for fewer than two, more than MOST, or one that
    is not here.
    """
    here = {run.name: run for run in listing.known()}
    names = list(dict.fromkeys(text.replace(",", " ").split()))
    problems = [
        Problem(0, "RUNS", "", f"no run is called {name!r}{suggest(name, here)}")
        for name in names
        if name not in here
    ]
    if not problems and not 2 <= len(names) <= MOST:
        problems = [Problem(0, "RUNS", "", f"must name two to {MOST} runs, not {len(names)}")]
    if problems:
        raise ConfigError(problems, next="make runs lists them; make compare RUNS='one another'")
    return [here[name] for name in names]
