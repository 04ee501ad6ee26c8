"""Writes report.html, a self-contained page for readers who are not familiar with the run:
`python -m trainfleet.report.html RUN_FOLDER`.
"""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from ..run.run_folder import Run, write_atomic
from ..trust.errors import ConfigError, telling
from ..trust.safe_output import run_program, shown
from . import panels, plots, rehearsal_table
from .history import (
    UNKNOWN,
    History,
    decimal,
    describe,
    duration,
    moment,
    number,
    percent,
    predicted,
    quantity,
    read,
    size,
)
from .summary import next_commands

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = Path(__file__).with_name("page.html")
SHOWN_EVENTS = 14
REFRESH = 15  # seconds between page reloads in the browser while the run is active
# statuses with a color in page.html
BADGES = ("running", "finished", "failed", "stopped", "interrupted")
# Colors of the time categories, fixed across reports: the Okabe-Ito palette plus brown and light
# gray.
COLOURS = {
    "useful": "#0072b2",
    "repeated": "#56b4e9",
    "validate": "#cc79a7",
    "checkpoint": "#009e73",
    "compile": "#f0e442",
    "prepare": "#e69f00",
    "queue": "#999999",
    "start": "#8c6d46",
    "down": "#d55e00",
}
CAPTIONS = {
    "loss": "Cross-entropy of each logged step. With more than 50 steps, the bold line is a "
    "moving average over 2 % of them. Dots are validation losses.",
    "throughput": "Tokens per second across all ranks; the dashed line is the median. Dotted lines "
    "show stops, resumes and restarts.",
}


def write(run: Run) -> Path:
    """Writes a run's report.html from the current state of its folder."""
    history = read(run)
    page = Template(PAGE.read_text(encoding="utf-8"))
    active = history.status == "running" or history.phase
    fresh = f'<meta http-equiv="refresh" content="{REFRESH}">' if active else ""
    body = "\n".join(filter(None, _parts(history)))
    write_atomic(run.report, page.substitute(title=escape(run.name), refresh=fresh, body=body))
    return run.report


def _parts(history: History) -> list[str]:
    """Returns the page's sections in order. A section without content is empty."""
    rehearsed = rehearsal_table.read(history.run)
    return [
        _header(history, rehearsed),
        *_verdicts(history),
        _rehearsal(rehearsed) if rehearsed else "",
        _tiles(history) if history.metrics else "",
        _figures(history, plots.figures, CAPTIONS),
        _stages(history),
        _figures(history, panels.panels, panels.CAPTIONS),
        _pair(_sample(history), _next(history)),
        _rows("Sources", panels.sources(history)),
        _pair(
            _rows("Provenance", panels.facts(history)),
            _rows("Ranks, slowest first", panels.ranks(history)),
        ),
        _pair(
            _events(history),
            _rows("Config keys that differ from the defaults", panels.given(history.run)),
        ),
        _settings(history),
        _footer(history),
    ]


def escape(text: object) -> str:
    """Makes untrusted text safe for the page: no markup, secrets or control characters."""
    return html.escape(shown(text))


def _pair(*parts: str) -> str:
    return f'<div class="pair">{"".join(parts)}</div>' if any(parts) else ""


def _section(title: str, body: str, kind: str = "") -> str:
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{body}</section>'


def _header(history: History, rehearsed: rehearsal_table.Rehearsal | None) -> str:
    results, facts = history.results, [history.phase] * bool(history.phase)
    model = results.get("model") or {}
    nodes = results.get("nodes")
    world = results.get("world_size")
    if model.get("parameters"):
        facts.append(
            f"{model.get('family', 'model')} of {quantity(model['parameters'])} parameters"
        )
    if nodes and world:
        ranks = f"{world} {results.get('device', '')} rank{'s' * (world > 1)}"
        facts.append(
            f"{ranks} on {nodes} node{'s' * (nodes > 1)}, {results.get('backend', '')} backend"
        )
    if history.started:
        facts.append(f"started {moment(history.started)} UTC")
    if history.status == "running" and history.seconds_left:
        facts.append(f"{duration(history.seconds_left)} left")
    kind = history.status if history.status in BADGES else "unknown"
    word = history.status
    if rehearsed:
        kind, word = (
            ("failed", "promises broken") if rehearsed.is_broken else ("finished", "promises kept")
        )
    badge = f'<span class="badge {kind}">{escape(word)}</span>'
    return (
        f"<header><h1>{escape(history.run.name)} "
        f"{badge}</h1><p>{escape(' · '.join(facts))}</p></header>"
    )


def _verdicts(history: History) -> list[str]:
    """Returns one warning box per problem."""
    findings = [history.verdict] if history.verdict else []
    if history.broke_at is not None and not findings:
        cure = "A lower train.learning_rate or a longer train.warmup_steps usually helps."
        findings.append((f"The loss became NaN or infinite at step {history.broke_at:,}.", cure))
    if history.rose:
        findings.append((f"{history.rose[0].upper()}{history.rose[1:]}.", ""))
    findings += [(f"Logger {remark}.", "") for remark in history.silent]
    return [
        f'<section class="verdict"><b>{escape(what)}</b><pre>{escape(more)}</pre></section>'
        for what, more in findings
    ]


def _rehearsal(found: rehearsal_table.Rehearsal) -> str:
    """Returns a rehearsal's table of injected faults."""
    head = "".join(f"<th>{escape(name)}</th>" for name in rehearsal_table.HEAD)
    rows = (
        _cells(outcome.cells, "broken" if outcome.broken else "", outcome.what)
        for outcome in found.outcomes
    )
    title = f"Injected faults on {found.backend}: {found.summary}"
    below = (
        "<p>This page shows the fault-free run. Each fault was injected into a separate run.</p>"
    )
    return _section(title, f"<table><tr>{head}</tr>{''.join(rows)}</table>{below}", "rehearsal")


def _cells(cells: Iterable[str], kind: str, what: str) -> str:
    """Returns a table row, with the description of the fault below its name. Each cell also spans
    the empty cells to its left.
    """
    row, empty = "", 1
    for cell in cells:
        if not cell:
            empty += 1
            continue
        below = "" if row or not what else f"<small>{escape(what)}</small>"
        row += f'<td colspan="{empty}">{escape(cell)}{below}</td>'
        empty = 1
    return f'<tr class="{kind}">{row}</tr>'


def _seen(history: History) -> str:
    """Returns the epochs and the number of skipped records as a suffix that starts with ";"."""
    skipped = history.results.get("dataset_skipped")
    return "; ".join(
        [
            "",
            *filter(None, [history.epochs]),
            *([f"{skipped:,} bad records skipped"] if skipped else []),
        ]
    )


def _tiles(history: History) -> str:
    """Returns the key metrics, each with an explanation."""
    results, (first, last) = history.results, history.losses
    speed = history.measured("tokens_per_second")
    tokens = history.measured("tokens")
    world = results.get("world_size")
    seconds = results.get("seconds") or {}
    lost = "; this is the last finite value" if history.is_lost else ""
    way = f"since the command started, including startup{_way(seconds)}"
    batch = quantity(history.tokens_per_step or None)
    each = f"; {quantity(speed / world)} per rank" if speed and world else ""
    tiles = [
        (
            "Training loss",
            decimal(last),
            f"nats per token, from {decimal(first)} at the first step{lost}",
        ),
        (
            "Validation loss",
            decimal(history.measured("valid_loss")),
            "on held-out documents",
        ),
        (
            "Tokens",
            quantity(tokens),
            f"{history.step:,} of {history.steps_total:,} steps, {batch} per step{_seen(history)}",
        ),
        (
            "Tokens per second",
            quantity(speed),
            f"across all ranks{each}{predicted(history, 'tokens_per_second', quantity)}",
        ),
        (
            "MFU",
            percent(history.measured("mfu")),
            "model FLOPs per token × tokens per second ÷ peak FLOP/s of all ranks",
        ),
        (
            "Goodput",
            percent(number(results.get("goodput"))),
            "useful training seconds ÷ all seconds since the command started",
        ),
        ("Time to first step", duration(number(seconds.get("first_step"))), way),
        ("Memory per rank", *_memory(history)),
        ("Cost", *_cost(history)),
    ]
    cells = (
        f'<div><dt>{name}</dt><dd class="figure">{escape(figure)}</dd><dd '
        f'class="why">{escape(why)}</dd></div>'
        for name, figure, why in tiles
        if figure != UNKNOWN
    )
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _memory(history: History) -> tuple[str, str]:
    bytes_ = history.measured("memory_bytes")
    # on a CPU, the measured memory is that of the whole process
    if not bytes_ or history.results.get("device") == "cpu":
        return UNKNOWN, ""
    return size(bytes_), f"peak device memory{predicted(history, 'memory_bytes', size)}"


def _way(seconds: Mapping[str, object]) -> str:
    """Returns when each startup stage was completed, or "" if the run did not record it."""
    words = {
        "loaded": "torch was loaded",
        "met": "ranks were connected",
        "built": "the model was built",
    }
    parts = [
        f"{text} after {duration(number(seconds[name]))}"
        for name, text in words.items()
        if name in seconds
    ]
    return f"; {', '.join(parts)}" if parts else ""


def _cost(history: History) -> tuple[str, str]:
    usd = number(history.results.get("usd"))
    if usd is None:
        return UNKNOWN, ""
    if not usd:
        return "$0", "this machine has no price"
    return (
        f"${usd:,.2f}",
        f"prices × hours, including setup{predicted(history, 'usd', '${:,.2f}'.format)}",
    )


def _figures(
    history: History, draw: Callable[[History], dict[str, Figure]], captions: Mapping[str, str]
) -> str:
    return _pair(
        *(
            f"<figure>{plots.svg(figure, name)}<figcaption>{captions[name]}</figcaption></figure>"
            for name, figure in (draw(history) if history.metrics else {}).items()
        )
    )


def _footer(history: History) -> str:
    formula = history.results.get("mfu_formula")
    above = f"{escape(formula)}<br>" if formula else ""
    return f"<footer>{above}trainfleet · written {moment(time.time())} UTC</footer>"


def _stages(history: History) -> str:
    """Returns a stacked bar that breaks down the run's time by use."""
    if not history.stages:
        return ""
    bars, keys = "", ""
    for name, seconds in history.stages.items():
        colour = f"background:{COLOURS[name]}"
        bars += f'<i style="{colour};flex-grow:{seconds:.3f}"></i>'
        keys += (
            f'<li><i style="{colour}"></i>{escape(name)} <b>{escape(duration(seconds))}</b></li>'
        )
    total = duration(sum(history.stages.values()))
    return _section(
        f"Time by use: {total}", f'<div class="bar">{bars}</div><ul class="keys">{keys}</ul>'
    )


def _sample(history: History) -> str:
    sample = history.results.get("sample") or {}
    prompt, text = escape(sample.get("prompt", "")), escape(sample.get("text", ""))
    return (
        _section("Sample text from the model", f"<pre><mark>{prompt}</mark>{text}</pre>")
        if prompt or text
        else ""
    )


def _next(history: History) -> str:
    rows = (
        f"<p><code>{escape(command)}</code><br>{escape(why)}</p>"
        for command, why in next_commands(history)
    )
    return _section("Next", "".join(rows), "next")


def _events(history: History) -> str:
    notable = [event for event in history.events if event["event"] != "checkpointed"]
    shown = (history.events if len(history.events) <= SHOWN_EVENTS else notable)[-SHOWN_EVENTS:]
    cells = ((moment(event["time"])[11:], str(event["event"]), describe(event)) for event in shown)
    head = (
        f"{len(shown)} of {len(history.events)} events"
        if len(shown) < len(history.events)
        else "Events"
    )
    return _rows(f"{head}, UTC", cells, "")


def _rows(title: str, rows: Iterable[tuple[str, ...]], kind: str = "facts") -> str:
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return _section(title, f"<table>{body}</table>", kind) if body else ""


def _settings(history: History) -> str:
    """Returns the resolved config, limited to known keys because the file itself may contain
    anything.
    """
    from ..config import dump_known  # imported here, because it loads YAML

    if not history.run.config.exists():
        return ""
    try:
        text = dump_known(history.run.config).strip()
    except ConfigError:
        text = f"this config is not valid; run make plan CONFIG={history.run.config} to see why"
    folded = (
        f'<summary>{len(text.splitlines())} lines</summary><pre class="config">{escape(text)}</pre>'
    )
    return _section("Resolved config", f"<details>{folded}</details>")


@telling
def main(arguments: list[str]) -> int:
    write(Run(Path(arguments[0])))
    return 0


if __name__ == "__main__":
    run_program(main)
