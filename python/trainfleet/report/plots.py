"""Draws a run's two plots, as PNG files and as SVG whose colors the page can override.

The colors are Okabe and Ito's blue and vermilion, which are distinguishable with every common type
of color vision (jfly.uni-koeln.de/color). Lines are labeled directly at their ends instead of in a
legend.
"""

from __future__ import annotations

import io
import math
import os
import re
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from shlex import quote
from statistics import median
from typing import TYPE_CHECKING, Any

from ..run.records import SOURCE_LOSS
from ..run.run_folder import Run, make_folder
from ..trust.errors import RunError
from .history import BREAKS, LISTED, History, decimal, quantity, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..data.manifest import Manifest


BLUE, VERMILION, INK, FAINT, GRID, PAPER = (
    "#0072b2",
    "#d55e00",
    "#1f2328",
    "#656d76",
    "#e3e6ea",
    "#ffffff",
)
# CSS variables defined by html.py
VARIABLES = {BLUE: "--blue", VERMILION: "--red", INK: "--ink", FAINT: "--faint", GRID: "--grid"}
STYLE: dict[Any, Any] = {
    "figure.constrained_layout.w_pad": 0.1,  # inches
    "figure.constrained_layout.h_pad": 0.1,
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": GRID,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "ytick.major.size": 0,
    "svg.fonttype": "none",  # keep text as text, so that it is searchable and uses the page's font
}
NAMED, LINE = 4, 12  # maximum number of labeled breaks; spacing between labels, in points
# Line height and character width of text as fractions of the axes, rounded up
ROW, LETTER = (0.08, 0.014)
MANY = 2000  # number of points above which a line is rasterized in SVG to save space
Label = tuple[float, str, str]  # height of the line's end, text and color


def draw(run: Run) -> list[Path]:
    """Draws a run's plots/loss.png and plots/throughput.png and returns their paths. Returns an
    empty list before the first logged step.
    """
    history = read(run)
    if not history.metrics:
        return []
    drawn = {run.plots / f"{name}.png": figure for name, figure in figures(history).items()}
    for path, figure in drawn.items():
        save(figure, path)
    return list(drawn)


def save(figure: Figure, path: Path) -> None:
    """Replaces a plot file. Never writes through a symlink, because the run folder may belong to
    another user.

    Raises:
        RunError: the folder is a symlink or can't be written.
    """
    folder = path.parent
    if folder.is_symlink():
        what = "is a link, but plots must be in the run's folder"
        raise RunError(what, where=str(folder), next=f"rm {quote(str(folder))}")
    make_folder(folder)
    path.unlink(missing_ok=True)
    quietly(lambda: figure.savefig(path, dpi=160, facecolor=PAPER))


def figures(history: History) -> dict[str, Figure]:
    """Returns the loss and throughput figures by name."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        return {"loss": _draw_loss(history), "throughput": _draw_throughput(history)}


def quietly(draw: Callable[[], object]) -> None:
    """Calls `draw` without matplotlib's layout warning for nearly empty plots."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        draw()


def svg(figure: Figure, title: str) -> str:
    """Returns a figure as a single <svg> element that scales with the page and uses its font and
    colors.
    """
    import matplotlib

    # matplotlib fails if this variable is not a number. It is safe to remove, because the SVG
    # contains no date.
    os.environ.pop("SOURCE_DATE_EPOCH", None)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "svg.id": title}):
        quietly(
            lambda: figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        )
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r"font: ([^;\"]*px) [^;\"]*", r"font: \1 system-ui, sans-serif", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def _draw_loss(history: History) -> Figure:
    figure, axes = frame("Loss (nats per token)", history)
    steps, losses = history.series("loss")
    seen, valid = history.series("valid_loss")
    ends: list[Label] = []
    if losses:
        curve(axes, steps, losses)
        ends.append((losses[-1], f"train {decimal(losses[-1])}", BLUE))
    if valid:
        line(axes, seen, valid, VERMILION, marker="o" if len(valid) <= 40 else "")
        ends.append((valid[-1], f"valid {decimal(valid[-1])}", VERMILION))
    for name in islice(history.numbers("valid_losses"), LISTED):
        seen, valid = history.series(SOURCE_LOSS + name)
        if valid:
            line(axes, seen, valid, VERMILION, lw=1, alpha=0.4)
            ends.append((valid[-1], f"{short(name)} {decimal(valid[-1])}", VERMILION))
    mark_breaks(axes, history)
    label_ends(axes, ends)
    _count_tokens(axes, history.tokens_per_step)
    return figure


def _draw_throughput(history: History) -> Figure:
    figure, axes = frame("Throughput (tokens per second)", history)
    steps, speeds = history.series("tokens_per_second")
    axes.yaxis.set_major_formatter(lambda value, _: quantity(value))
    if speeds:
        middle = median(
            speeds[1:] or speeds
        )  # excludes the first step as warm-up, as results.json does
        curve(axes, steps, speeds)
        axes.axhline(middle, color=FAINT, lw=1, ls=(0, (4, 3)))
        axes.set_title(
            f"median {quantity(middle)}", loc="right", pad=8, size=9, color=FAINT, weight="normal"
        )
        axes.set_ylim(0, 1.15 * max(speeds))
        _show_mfu(axes, history)
    mark_breaks(axes, history, named=False)  # the loss plot already labels the breaks
    _mark_checkpoints(axes, history.steps_of("checkpointed"))
    return figure


def _show_mfu(axes: Axes, history: History) -> None:
    """Shows MFU on the right axis, as a second scale for the throughput line if MFU is proportional
    to it. Otherwise, MFU gets a separate line.
    """
    steps, shares = history.series("mfu")
    pairs = [
        (one["mfu"], one["tokens_per_second"])
        for one in history.metrics
        if one.get("mfu") and one.get("tokens_per_second")
    ]
    if not pairs:
        return
    right = axes.twinx()
    ratios = [share / speed for share, speed in pairs]
    if max(ratios) < 1.01 * min(ratios):
        right.set_ylim(0, axes.get_ylim()[1] * median(ratios))
    # A restart on another world size or hardware changed the ratio of MFU to throughput.
    else:
        right.set_ylim(0, 2.2 * max(shares))  # keeps the MFU line below the throughput line
        line(right, steps, shares, VERMILION)
        right.yaxis.label.set_color(VERMILION)
    right.set_ylabel("MFU")
    right.tick_params(pad=8)
    right.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g} %")
    right.grid(visible=False)


def sheet(
    title: str, width: float = 6.4, height: float = 3.8, pad: float = 8
) -> tuple[Figure, Axes]:
    """Returns a figure with a single plot. Width and height are in inches, and `pad` is the space
    below the title in points.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, pad=pad)
    return figure, axes


def by_nodes(axes: Axes) -> None:
    """Gives axes a logarithmic scale of node counts."""
    axes.set_xlabel("nodes")
    axes.set_xscale("log", base=2)
    axes.minorticks_off()


def frame(title: str, history: History, height: float = 3.8) -> tuple[Figure, Axes]:
    """Returns a figure with steps on the x axis. `height` is in inches."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = sheet(title, height=height)
    axes.set_xlabel("step")
    axes.set_xlim(0, max(history.step, 1))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: quantity(value))
    return figure, axes


def curve(axes: Axes, steps: list[int], values: list[float]) -> None:
    """Plots logged values. With more than 50 points, they are drawn faintly behind their moving
    average.
    """
    noisy = len(values) > 50
    line(axes, steps, values, BLUE, alpha=0.3 if noisy else 1)
    if noisy:
        line(axes, steps, _smooth(values), BLUE, lw=2)


def line(axes: Axes, steps: list[int], values: list[float], colour: str, **style: Any) -> None:
    marker = "o" if len(steps) == 1 else ""  # a single point does not form a line
    look: dict[str, Any] = {
        "lw": 1.6,
        "marker": marker,
        "ms": 4,
        "clip_on": False,
        "rasterized": len(steps) > MANY,
    }
    axes.plot(steps, values, color=colour, **(look | style))


def note(
    axes: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], **style: Any
) -> None:
    """Adds small text, offset by `shift` points from a position on the axes."""
    look: dict[str, Any] = {"color": FAINT, "size": 9}
    axes.annotate(text, at, shift, textcoords="offset points", **(look | style))


def _smooth(values: list[float]) -> list[float]:
    """Returns a moving average over a window of 2 % of the points. The window narrows at both ends,
    so that the curve starts and ends on the data.
    """
    import numpy

    sums = numpy.concatenate([[0.0], numpy.cumsum(values)])
    middle = numpy.arange(len(values))
    half = numpy.minimum(numpy.minimum(middle, middle[::-1]), max(len(values) // 100, 2))
    return list((sums[middle + half + 1] - sums[middle - half]) / (2 * half + 1))


def short(name: str) -> str:
    """Shortens a name to leave room for the curves. Cuts out the middle, because long names often
    differ only at one end.
    """
    return name if len(name) <= 26 else f"{name[:12]}…{name[-13:]}"


def label_ends(axes: Axes, ends: list[Label]) -> None:
    """Labels lines to the right of the axes, in each line's color and as close as possible to the
    height of its end.
    """
    low, high = axes.get_ylim()
    below = low - ROW * (high - low)
    for height, text, colour in sorted(ends):
        below = max(height, below + ROW * (high - low))
        at = ("axes fraction", "data")
        look = {"color": colour, "va": "center", "weight": "bold", "size": 10}
        note(axes, text, (1, below), (7, 0), xycoords=at, annotation_clip=False, **look)


def mark_breaks(axes: Axes, history: History, *, named: bool = True) -> None:
    """Draws a dotted line at each fault, stop, restart and resume, and at the first non-finite
    loss.
    """
    marks = [(step, kind) for kind in BREAKS for step in history.steps_of(kind)]
    if named and history.broke_at is not None:
        marks.append((history.broke_at, "loss not finite"))
    breaks: dict[int, list[str]] = {}
    for step, text in sorted(marks, key=lambda mark: mark[0]):
        breaks.setdefault(step, []).extend([] if text in breaks.get(step, ()) else [text])
    for step in breaks:
        axes.axvline(step, color=FAINT, lw=1, ls=":")
    if named and len(breaks) <= NAMED:
        _name_breaks(axes, {step: ", ".join(words) for step, words in breaks.items()})


def _name_breaks(axes: Axes, breaks: dict[int, str]) -> None:
    """Labels each break, one row below the previous label, and extends the y axis so that curves do
    not overlap the labels.
    """
    (low, high), end = axes.get_ylim(), axes.get_xlim()[1]
    for row, (step, text) in enumerate(breaks.items()):
        right, width = step > 0.6 * end, LETTER * len(text) * end
        peak = _peak(axes, *((step - width, step) if right else (step, step + width)))
        high = max(high, low + (peak - low) / (1 - ROW * (row + 1)))
        shift = (-3 if right else 3, -1 - LINE * row)
        note(
            axes,
            text,
            (step, 1),
            shift,
            xycoords=("data", "axes fraction"),
            va="top",
            ha="right" if right else "left",
        )
    axes.set_ylim(low, high)


def _peak(axes: Axes, begin: float, until: float) -> float:
    """Returns the maximum of all curves between two steps, or -inf if there are no curves."""
    import numpy

    found = [-math.inf]
    for line in axes.get_lines():
        if line.get_linestyle() != ":":  # line style of breaks
            steps = numpy.asarray(line.get_xdata(), float)
            values = numpy.asarray(line.get_ydata(), float)
            # include the interpolated values at both edges
            edges = numpy.interp([begin, until], steps, values)
            found += [*edges, *values[(steps >= begin) & (steps <= until)]]
    return float(max(found))


def _mark_checkpoints(axes: Axes, steps: list[int]) -> None:
    """Marks each checkpoint on the x axis."""
    if steps:
        few = len(steps) <= 30
        axes.plot(
            steps,
            [0] * len(steps),
            color=FAINT,
            ls="",
            marker="^" if few else "|",
            ms=6,
            clip_on=False,
            zorder=5,
        )
        axes.set_xlabel(f"step · {'▲' if few else '|'} checkpoints")


def _count_tokens(axes: Axes, tokens_per_step: float) -> None:
    """Adds a token axis at the top, so that runs with different batch sizes can be compared."""
    if tokens_per_step:
        top = axes.twiny()
        top.set_xlim(0, axes.get_xlim()[1] * tokens_per_step)
        top.xaxis.set_major_formatter(lambda value, _: quantity(value))
        top.tick_params(length=0)
        top.set_xlabel("tokens")
        top.grid(visible=False)


def draw_lengths(name: str, manifest: Manifest, path: Path) -> None:
    """Writes a histogram of document lengths to a PNG file, with bin edges at powers of two."""
    from matplotlib import rc_context

    used = [number for number, count in enumerate(manifest.lengths) if count]
    classes = range(used[0], used[-1] + 1)
    with rc_context(STYLE):
        figure, axes = sheet(
            f"{name}: {manifest.documents:,} documents of up to {manifest.longest:,} tokens",
            pad=12,
        )
        bars = axes.bar(
            [_power(number) for number in classes],
            [manifest.lengths[number] for number in classes],
            0.9,
            color=BLUE,
        )
        axes.bar_label(
            bars,
            [quantity(manifest.lengths[number]) for number in classes],
            padding=2,
            size=8,
            color=INK,
        )
        axes.set_xlabel("tokens per document (lower bin edge)")
        axes.set_ylabel("documents")
        axes.yaxis.set_major_formatter(lambda value, _: quantity(value))
        axes.tick_params(axis="x", labelsize=8, length=0)
        save(figure, path)


def _power(number: int) -> str:
    """Formats 2 to the power of `number`, such as 512, 1k, 64k or 1M."""
    return f"{2 ** (number % 10)}{['', 'k', 'M', 'G'][number // 10]}"
