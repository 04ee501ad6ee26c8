"""Prints the results of `make scaling` and `make profile` as tables. Results of `make scaling` are
also written to files and plotted.

Also extracts the result of ahead-of-time compilation from node logs: the number of programs, and
the errors of failed programs. The patterns match messages of neuron_parallel_compile and neuronx-cc
(awsdocs-neuron.readthedocs-hosted.com/en/v2.31.0: pytorch-neuron-parallel-compile,
compiler/error-codes; aws-neuron-sdk issue 1081). Because programs are compiled in parallel, an
error is blamed on the last program named before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..plan.measurement import Measure, steady
from ..run.records import Profile
from ..run.run_folder import Run, read_json, write_atomic, write_json
from ..trust import untrusted_input
from ..trust.errors import RunError
from ..trust.safe_output import visible
from ..trust.validation import fit
from .history import duration, number, percent, quantity, table
from .plots import BLUE, FAINT, INK, STYLE, by_nodes, note, save, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 24  # maximum length of a bar in characters
ROWS = 12


def describe_profile(run: Run) -> Iterator[str]:
    """Yields each part's share of a step, the share of communication, and the longest operations.

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
    spent = percent(talk["seconds"] / total)
    shown = percent(talk["not_hidden"] / total)
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
STRONG = "strong scaling: constant global batch"
WEAK = "weak scaling: constant work per rank"


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
        axes.margins(x=0.2, y=0.15)
        save(figure, path)


def _draw(axes: Axes, measures: Sequence[Measure]) -> None:
    points = [(measure.nodes, measure.tokens_per_second) for measure in measures]
    nodes, speeds = zip(*points, strict=True)
    best = [measure.tokens_per_second / measure.efficiency for measure in measures]
    axes.set_yscale("log", base=2)
    by_nodes(axes)
    axes.set_xticks(nodes, map(str, nodes))
    axes.set_yticks(best, map(quantity, best))
    axes.plot(nodes, best, color=FAINT, lw=1, ls=(0, (4, 3)), clip_on=False)
    axes.plot(nodes, speeds, color=BLUE, lw=2, marker="o", ms=5, clip_on=False)
    for measure, point in zip(measures, points, strict=True):
        reached = f"{quantity(point[1])} · {percent(measure.efficiency)}"
        note(axes, reached, point, (8, -8), color=INK, va="top")
    text = "ideal: constant throughput per rank"
    note(axes, text, (nodes[-1], best[-1]), (0, 6), ha="right", va="bottom")


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


GRAPH = re.compile(r"(MODULE_\d{1,24}\+[0-9a-f]{1,16})/")
STATUS = re.compile(r'"status": (true|false)')
SECONDS = re.compile(r'"compile_time": (\d{1,7}(?:\.\d{1,12})?)')
NAME = r"['\"`]?([\w.:-]{1,80})['\"`]?"
OPERATOR = re.compile(rf"[Uu]nsupported operator:? *{NAME}|[Oo]perator {NAME} is not supported")
CODE = re.compile(r"\bNCC_[A-Z]{1,8}\d{1,5}\b")
LETTERS = 200  # maximum characters of an error to show


@dataclass
class Compilation:
    """Results per program: whether it compiled (true if it was cached), how many seconds that took,
    and the errors.
    """

    compiled: dict[str, bool] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, list[str]] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        return sorted(name for name, done in self.compiled.items() if not done)

    def explained(self) -> Iterator[str]:
        """Yields one line per failed program with the unsupported operator or the compiler's
        message. Errors that can't be attributed to a program come last.
        """
        for name in self.failed:
            yield (
                f"{name}: {'; '.join(self.errors.get(name, ())) or 'the compiler printed no error'}"
            )
        for words in self.errors.get("", ()):
            yield f"unknown program: {words}"


def compilation_in(logs: Iterable[Iterable[str]]) -> Compilation:
    """Parses the compilation result from the lines of the node logs."""
    found = Compilation()
    for lines in logs:
        name = ""
        for line in lines:
            text = line.partition(" | ")[2] or line
            if named := GRAPH.findall(text):
                name = named[-1]
            if said := STATUS.search(text):
                found.compiled[name] = found.compiled.get(name, False) or said[1] == "true"
            elif took := SECONDS.search(text):
                found.seconds[name] = float(took[1])
            elif words := error_in(text):
                found.errors.setdefault(name, [])
                found.errors[name] += [words] if words not in found.errors[name] else []
    return found


def error_in(line: str) -> str:
    """Returns the compiler error in a log line, or "" if the line does not contain one."""
    operator, code = OPERATOR.search(line), CODE.search(line)
    words = visible(line[code.start() :].strip())[:LETTERS] if code else ""
    if not operator:
        return words
    return (
        f"operator {operator[1] or operator[2]} is not supported{f' ({code[0]})' if code else ''}"
    )


def compilation_of(run: Run) -> Compilation:
    """Parses the compilation result from a run's node logs."""
    return compilation_in(map(_lines, sorted(run.logs.glob("node-*.log"))))


def _lines(path: Path) -> Iterator[str]:
    with untrusted_input.open_regular(path) as stream:
        for line in untrusted_input.lines_of(stream):
            yield line.decode(errors="replace")


def describe_compilation(run: Run) -> Iterator[str]:
    """Yields a summary of a finished compilation and the next command."""
    found = compilation_of(run)
    seconds = number((run.read_results().get("seconds") or {}).get("compile"))
    programs = (
        f"{len(found.compiled)} programs" if found.compiled else "the step and validation programs"
    )
    longest = (
        f"; the longest took {duration(int(max(found.seconds.values())))}" if found.seconds else ""
    )
    yield (
        "compiled "
        f"{programs}{f' in {duration(int(seconds))}' if seconds is not None else ''}{longest}"
    )
    yield "next: make train"
