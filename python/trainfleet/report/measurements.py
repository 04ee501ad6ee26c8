"""Prints the results of `make scaling` and `make profile` as tables. Results of `make scaling` are
also written to files and plotted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..plan.measurement import Measure, steady
from ..run.records import Profile
from ..run.run_folder import Run, read_json, write_atomic, write_json
from ..trust.errors import RunError
from ..trust.validation import fit
from .history import duration, percent, quantity, table
from .plots import BLUE, FAINT, INK, STYLE, note, save, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 24  # maximum length of a bar in characters
ROWS = 12


def describe_profile(run: Run) -> Iterator[str]:
    """Yields the share of a step that each part takes, the share of communication, and the longest
    operations.

    Raises:
        RunError: the run has no profile.
    """
    path = run.profile / "summary.json"
    if (record := read_json(path)) is None:
        raise RunError(
            "has no profile",
            where=str(run.profile),
            next="run make logs to see why, or make profile to measure again",
        )
    found = fit(Profile, record, str(path), "run make profile to measure again")
    total = found["seconds"] or 1.0
    first, last = found["steps"]
    yield (
        f"steps {first} to {last} of rank 0: {duration(total)} in total, "
        f"{duration(total / max(1, last - first + 1))} per step"
    )
    yield ""
    rest = total - sum(found["parts"].values())
    for name, seconds in [*found["parts"].items(), *([("the rest", rest)] if rest > 0 else [])]:
        yield (
            f"{name:<14} {percent(seconds / total):>7}  {duration(seconds):>8}  "
            f"{'█' * round(WIDTH * seconds / total)}"
        ).rstrip()
    talk = found["communication"]
    yield ""
    spent, shown = percent(talk["seconds"] / total), percent(talk["not_hidden"] / total)
    yield f"communication  {spent:>7}  of the time, {shown} not overlapped with computation"
    yield ""
    width = max((len(row["name"][:60]) for row in found["top"]), default=0)
    for row in found["top"][:ROWS]:
        name, seconds = row["name"][:60], row["seconds"]
        yield (
            f"{name:<{width}}  {percent(seconds / total):>7}  {duration(seconds):>8}  "
            f"{row['calls']:>6,} calls"
        )
    yield ""
    yield f"trace  {run.profile}/trace.json.gz  (open it in ui.perfetto.dev)"
    yield "next   make train, or make profile SET='...' to measure another setting"


HEAD = ("nodes", "ranks", "layout", "batch", "tokens/s", "per rank", "MFU", "efficiency")
STRONG, WEAK = "strong scaling: constant global batch", "weak scaling: constant work per rank"


def results_of(run: Run) -> dict[str, Any]:
    """Returns a run's results, with the median throughput and MFU over its steady-state steps."""
    lines: list[dict[str, Any]] = steady(list(run.read_metrics()))
    found = {
        key: [line[key] for line in lines if line.get(key) is not None]
        for key in ("tokens_per_second", "mfu")
    }
    return run.read_results() | {key: median(values) for key, values in found.items() if values}


def describe_scaling(measures: Sequence[Measure], weak: bool) -> list[str]:
    """Returns the scaling table as aligned lines."""
    lines = table(HEAD, [_row(measure) for measure in measures], ("layout",))
    return [WEAK if weak else STRONG, "", *lines]


def write(run: Run, measures: Sequence[Measure], weak: bool) -> None:
    """Writes scaling.md, scaling.json and plots/scaling.png to the run's folder."""
    table = [HEAD, ("---",) * len(HEAD), *map(_row, measures)]
    lines = [
        f"{(WEAK if weak else STRONG).capitalize()}.",
        "",
        *(f"| {' | '.join(row)} |" for row in table),
    ]
    write_atomic(run.folder / "scaling.md", "\n".join(lines) + "\n")
    rows = [asdict(measure) for measure in measures]
    write_json(
        run.folder / "scaling.json", {"scaling": "weak" if weak else "strong", "sizes": rows}
    )
    draw(run.plots / "scaling.png", measures, weak)


def draw(path: Path, measures: Sequence[Measure], weak: bool) -> None:
    """Plots measured and ideal throughput against node count, on log-log axes."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        kind = "weak" if weak else "strong"
        figure, axes = sheet(f"Throughput (tokens per second), {kind} scaling")
        _draw(axes, measures)
        for one in measures:
            text = f"{quantity(one.tokens_per_second)} · {percent(one.efficiency)}"
            at = (one.nodes, one.tokens_per_second)
            note(axes, text, at, (8, -8), color=INK, va="top")
        save(figure, path)


def _draw(axes: Axes, measures: Sequence[Measure]) -> None:
    nodes = [measure.nodes for measure in measures]
    speeds = [measure.tokens_per_second for measure in measures]
    best = [measure.tokens_per_second / measure.efficiency for measure in measures]
    axes.set(xlabel="nodes", xscale="log", yscale="log")
    axes.set_xticks(nodes, [str(count) for count in nodes])
    axes.set_yticks(best, [quantity(speed) for speed in best])
    axes.minorticks_off()
    axes.plot(nodes, best, color=FAINT, lw=1, ls=(0, (4, 3)), clip_on=False)
    axes.plot(nodes, speeds, color=BLUE, lw=2, marker="o", ms=5, clip_on=False)
    ideal = "ideal: the speed per rank of the first size"
    note(axes, ideal, (nodes[-1], best[-1]), (0, 6), ha="right", va="bottom")
    axes.margins(x=0.2, y=0.15)


def _row(measure: Measure) -> tuple[str, ...]:
    return (
        str(measure.nodes),
        str(measure.ranks),
        measure.layout,
        str(measure.global_batch),
        quantity(measure.tokens_per_second),
        quantity(measure.ranks_speed),
        percent(measure.mfu),
        percent(measure.efficiency),
    )
