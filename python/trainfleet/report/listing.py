"""Compares runs: a table of all of them, and the differences of some in config, figures and
curves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config import flat, load_resolved
from ..run.run_folder import RUNS, Run
from ..trust.errors import TrainfleetError
from .history import History, decimal, duration, percent, quantity, read, table

HEAD = ("run", "state", "step", "loss", "valid", "tokens/s", "cost", "age")
NOTHING = ("name", "model.preset")  # keys with differences that other keys explain
# by Okabe and Ito
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def known(root: Path = RUNS) -> list[Run]:
    """Returns the run folders here, by name."""
    return [Run(path.parent) for path in sorted(root.glob("*/results.json"))]


def describe_runs(runs: Sequence[Run]) -> Iterator[str]:
    """Yields one line per run, the latest at the end. A run on a fleet shows the last state known
    here.
    """
    yield from table(
        HEAD,
        [row for _, row in sorted(map(_entry, runs), key=lambda entry: entry[0])],
        ("run", "state"),
    )


def _entry(run: Run) -> tuple[float, tuple[str, ...]]:
    """Returns the time of a run's last news, and its row in the table."""
    try:
        history, heard = read(run), run.results.stat().st_mtime
    except (TrainfleetError, OSError) as error:
        return 0.0, (
            run.name,
            f"unreadable: {error.what if isinstance(error, TrainfleetError) else error}",
            *[""] * 6,
        )
    if run.metrics.exists():
        heard = max(heard, run.metrics.stat().st_mtime)
    usd = history.results.get("usd")
    return heard, (
        run.name, history.status, f"{history.step:,} of {history.steps_total:,}", _loss(history),
        decimal(history.measured("valid_loss")), quantity(history.measured("tokens_per_second")),
        f"${usd:,.2f}" if usd else "", duration(time.time() - heard),
    )  # fmt: skip


def describe_differences(runs: Sequence[Run]) -> Iterator[str]:
    """Yields the keys in which the runs' configs differ, then the results of each."""
    configs = [dict(flat(asdict(load_resolved(run.config)))) for run in runs]
    keys = [
        key
        for key in dict.fromkeys(key for config in configs for key in config)
        if key not in NOTHING
    ]
    rows = [
        (key, *(_shown(config.get(key)) for config in configs))
        for key in keys
        if _differs(key, configs)
    ]
    names = [run.name for run in runs]
    yield from table(("key", *names), rows, ("key",)) if rows else ["the configs are the same"]
    yield ""
    yield from table(("", *names), _outcomes([read(run) for run in runs]), ("",))


def _outcomes(histories: Sequence[History]) -> list[tuple[str, ...]]:
    """Returns the results of each run, one row per figure."""
    rows = {
        "state": [history.status for history in histories],
        "step": [f"{history.step:,}" for history in histories],
        "tokens": [quantity(history.measured("tokens")) for history in histories],
        "loss": [_loss(history) for history in histories],
        "validation loss": [decimal(history.measured("valid_loss")) for history in histories],
        "tokens/s": [quantity(history.measured("tokens_per_second")) for history in histories],
        "MFU": [percent(history.measured("mfu")) for history in histories],
        "goodput": [percent(history.measured("goodput")) for history in histories],
        "time": [duration(sum(history.stages.values())) for history in histories],
        "restarts": [str(history.results.get("restarts", 0)) for history in histories],
    }
    return [(name, *values) for name, values in rows.items()]


def _loss(history: History) -> str:
    """Returns the newest loss, or nan."""
    return "nan" if history.is_lost else decimal(history.losses[1])


def _differs(key: str, configs: Sequence[dict[str, Any]]) -> bool:
    return any(config.get(key) != configs[0].get(key) for config in configs)


def _shown(value: object) -> str:
    text = (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
    return text if len(text) <= 40 else f"{text[:39]}…"


def _short(name: str) -> str:
    """Shortens a name to leave room for the curves: cuts the middle, as long names often differ at
    an end.
    """
    return name if len(name) <= 26 else f"{name[:12]}…{name[-13:]}"


def draw(runs: Sequence[Run], path: Path) -> None:
    """Plots training loss against tokens, one line per run, with its name at its right."""
    import matplotlib

    from .plots import FAINT, STYLE, label_ends, save, sheet

    with matplotlib.rc_context(STYLE):
        figure, axes = sheet("Loss (nats per token)", 7.6, 4.2)
        axes.set_xlabel("tokens", color=FAINT)
        axes.xaxis.set_major_formatter(lambda value, _: quantity(value))
        ends = []
        for run, colour in zip(runs, COLOURS, strict=False):
            history = read(run)
            steps, losses = history.series("loss")
            if losses:
                tokens = [step * history.tokens_per_step for step in steps]
                axes.plot(
                    tokens, losses, color=colour, lw=1.6, marker="o" if len(losses) == 1 else ""
                )
                ends.append((losses[-1], f"{_short(run.name)}  {decimal(losses[-1])}", colour))
        label_ends(axes, ends)
        axes.margins(x=0.02)
        with suppress(OSError):
            save(figure, path)
