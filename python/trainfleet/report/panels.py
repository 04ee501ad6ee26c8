"""Smaller sections of report.html: plots of individual metrics, the run's provenance and the state
of its ranks.

The plots show a step's breakdown, stragglers, gradient norm, learning rate and memory. Provenance
covers versions, devices and config keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..health import fence
from ..health.heartbeat_format import read_beats, stage
from ..run.run_folder import Run
from ..trust import untrusted_input
from ..trust.errors import ConfigError, InputError
from .history import History, decimal, duration, few_digits, layout, moment, quantity, size
from .plots import BLUE, MANY, STYLE, VERMILION, frame, line, mark_breaks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


HEIGHT = 2.6  # inches
PARTS = {  # parts of a step in order, with colors from the Okabe-Ito palette
    "data": "#999999",
    "forward": "#0173b2",
    "backward": "#56b4e9",
    "communication": "#d55e00",
    "optimizer": "#009e73",
}
CAPTIONS = {
    "parts": "Rank 0's time in each part of a step. The first step may compile, so it is cut off.",
    "slowest": "Forward pass time of the slowest and the median rank, including waits for ranks "
    "that share tensors or a sequence.",
    "norm": "L2 norm of all gradients, before clipping.",
    "rate": "Learning rate of the schedule at each step.",
    "memory": "Peak memory of rank 0 so far.",
}


def panels(history: History) -> dict[str, Figure]:
    """Returns a figure for each metric that was measured, by name."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        drawn = {
            "parts": _parts(history),
            "slowest": _slowest(history),
            "norm": _one(history, "grad_norm", "Gradient norm", lambda value: f"{value:.3g}"),
            "rate": _one(history, "lr", "Learning rate", lambda value: f"{value:.3g}"),
            "memory": _one(history, "memory_bytes", "Memory", size),
        }
    return {name: figure for name, figure in drawn.items() if figure}


def _one(history: History, key: str, title: str, write: Callable[[float], str]) -> Figure | None:
    """Plots all logged values of a metric without averaging, which would hide the learning rate's
    peak and spikes in the gradient norm.
    """
    steps, values = history.series(key)
    if not values:
        return None
    figure, axes = frame(title, history, HEIGHT)
    line(axes, steps, values, BLUE)
    if min(values) >= 0:
        axes.set_ylim(0, 1.15 * max(values) or 1)
    axes.yaxis.set_major_formatter(lambda value, _: write(value))
    mark_breaks(axes, history, named=False)
    return figure


def _parts(history: History) -> Figure | None:
    """Plots the breakdown of each timed step as stacked areas, with a legend."""
    by_part = {name: dict(zip(*history.series(f"{name}_seconds"), strict=True)) for name in PARTS}
    steps = sorted({step for values in by_part.values() for step in values})
    if len(steps) < 2:  # a single step would have no width in the plot
        return None
    figure, axes = frame("Time in each part of a step", history, HEIGHT)
    heights = [[values.get(step, 0.0) for step in steps] for values in by_part.values()]
    many = len(steps) > MANY
    axes.set_ylim(top=1.1 * max(map(sum, list(zip(*heights, strict=True))[1:])) or 1)
    axes.stackplot(
        steps,
        heights,
        colors=list(PARTS.values()),
        labels=list(PARTS),
        baseline="zero",
        rasterized=many,
    )
    _finish(figure, axes, [name for name, values in by_part.items() if any(values.values())])
    return figure


def _slowest(history: History) -> Figure | None:
    """Plots the busy time of each step's slowest rank next to the median rank's. The title names
    the rank that is slowest most often.
    """
    steps, seconds = history.series("slowest_own")
    if len(steps) < 2:  # a single step does not reveal a straggler
        return None
    rank, times = Counter(history.series("slowest_rank")[1]).most_common(1)[0]
    figure, axes = frame(
        f"Rank {rank:.0f} is the slowest in {100 * times / len(steps):.0f} % of the steps",
        history,
        HEIGHT,
    )
    line(axes, *history.series("median_own"), BLUE, label="median", clip_on=True)
    line(axes, steps, seconds, VERMILION, ls="", marker="o", ms=3, label="slowest")
    _finish(figure, axes, ["median", "slowest"])
    return figure


def _finish(figure: Figure, axes: Axes, named: list[str]) -> None:
    """Formats the y axis in seconds, starting at zero, and adds a legend below the plot."""
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(
        lambda value, _: (
            f"{quantity(value)} s" if value >= 1 or not value else f"{1000 * value:.3g} ms"
        )
    )
    handles, labels = axes.get_legend_handles_labels()
    pairs = [
        (handle, label) for handle, label in zip(handles, labels, strict=True) if label in named
    ]
    if pairs:
        figure.legend(
            *zip(*pairs, strict=True),
            loc="outside lower center",
            ncols=len(pairs),
            frameon=False,
            fontsize=9,
            handlelength=1,
            columnspacing=1.2,
        )


SHOWN_RANKS = 8
SHOWN_KEYS = 40


def facts(history: History) -> Iterator[tuple[str, str]]:
    """Yields the details needed to reproduce the run."""
    results = history.results
    versions = results.get("versions") or {}
    if versions:
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    if device := results.get("device_name") or results.get("device"):
        yield "device", ", ".join(filter(None, (device, results.get("precision"))))
    if degrees := results.get("layout"):
        yield "layout", layout(degrees)
    launched = [event for event in history.events if event["event"] == "launched"]
    if history.started:
        yield "first start", f"{moment(history.started)} UTC"
    if len(launched) > 1:
        times = "once," if len(launched) == 2 else f"{len(launched) - 1} times, last"
        yield "started again", f"{times} {moment(launched[-1]['time'])} UTC"
    causes = [str(event.get("cause")) for event in history.events if event["event"] == "restarted"]
    yield "restarts", ": ".join(filter(None, (str(len(causes)), ", ".join(causes))))


def ranks(history: History) -> Iterator[tuple[str, ...]]:
    """Yields the ranks with the longest busy time in the latest step, excluding time spent waiting
    for other ranks. Yields nothing if there are no heartbeats.
    """
    if history.status != "running":
        return
    with suppress(OSError, InputError):
        beats = read_beats(history.run.folder, fence.current(history.run.folder).number)
        for beat in islice(
            sorted(beats.values(), key=lambda beat: -beat.busy_seconds), SHOWN_RANKS
        ):
            spent = f"{duration(beat.busy_seconds)} of {duration(beat.step_seconds)}"
            yield f"rank {beat.rank}", f"node {beat.node}", stage(beat), spent


def sources(history: History) -> Iterator[tuple[str, ...]]:
    """Yields each source of a mixture, with its validation loss and its epochs."""
    losses, passes = history.numbers("valid_losses"), history.numbers("source_epochs")
    for name in passes | losses:
        seen = f"{few_digits(passes[name])} epochs by the end" if name in passes else ""
        yield name, f"validation loss {decimal(losses.get(name))}", seen


def given(run: Run) -> Iterator[tuple[str, str]]:
    """Yields the config keys that differ from their defaults."""
    from ..config import yaml_lines
    from ..config.schema import load_schema

    if not run.given.exists():
        return
    with suppress(InputError, ConfigError):
        found = yaml_lines.read(
            untrusted_input.read_text(run.given, untrusted_input.RECORD), str(run.given)
        )
        yield from islice(_changed(found.value, load_schema()), SHOWN_KEYS)


def _changed(values: Any, schema: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items() if isinstance(values, dict) else ():
        inner = schema.get("properties", {}).get(key, {})
        if isinstance(value, dict):
            yield from _changed(value, inner, f"{prefix}{key}.")
        elif value != inner.get("default") and value not in ([], None):
            yield f"{prefix}{key}", str(value)
