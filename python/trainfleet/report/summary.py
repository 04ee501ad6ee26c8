"""Run summaries for the terminal, printed at the end of a run and by `make status`, `make runs` and
`make compare`.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from ..health.lease import newest_holder, newest_standby
from ..run.run_folder import RUNS, Record, Run
from ..trust import untrusted_input
from ..trust.errors import ConfigError, InputError, TrainfleetError
from ..trust.safe_output import completed
from .history import (
    History,
    by_name,
    decimal,
    duration,
    few_digits,
    number,
    percent,
    predicted,
    quantity,
    read,
    size,
    table,
)

Row = tuple[str, str]
NOTES = 2  # maximum notes about sources to show
SENTENCE_END = re.compile(r"\n|(?<=[.!?])\s+")
OPENING, LONGEST_OPENING = 3, 40  # maximum words and characters of a suggested prompt
SKIPPED = (
    "loss or gradient norm was far too high (train.spike_sigmas) or not finite; a few are normal"
)


def print_summary(run: Run, stream: TextIO | None = None) -> None:
    """Prints the outcome of a run, the path of its report, and the next command."""
    history = read(run)
    rows = [(run.name, _headline(history)), *_outcome(history), *_places(history), *_next(history)]
    print("\n" + _aligned(rows), file=stream or sys.stdout)


def status(run: Run, heard: str = "") -> str:
    """Returns the run's current state as aligned lines, followed by the next commands.

    `heard` is the scheduler's current message about a waiting job.
    """
    history = read(run)
    rows = [*_outcome(history), *_freshness(history), *_led(history), *_next(history)]
    return _aligned([(run.name, _headline(history, heard)), *rows])


def _headline(history: History, heard: str = "") -> str:
    if history.status == "running" and history.waits_for:
        return heard or history.waits_for
    if history.status == "running" and history.phase:
        return f"running · {history.phase}"
    if not history.metrics:
        return f"{history.status}, no step logged yet" if history.results else history.status
    done = history.step / max(history.steps_total, 1)
    return (
        f"{history.status} · step {history.step:,} of {history.steps_total:,} ({100 * done:.0f} %)"
    )


def _outcome(history: History) -> list[Row]:
    rows: list[Row] = []
    if history.metrics:
        mfu = history.measured("mfu")
        rows = [
            ("loss", _losses(history)),
            *[("remark", remark) for remark in (history.rose, history.unvalidated) if remark],
        ]
        speed = history.measured("tokens_per_second")
        used = f" · MFU {percent(mfu)}" if mfu else ""
        rows.append(
            (
                "speed",
                f"{quantity(speed)} "
                f"tokens/s{used}{predicted(history, 'tokens_per_second', quantity)}",
            )
        )
        rows += [*_data(history), *_parts(history), *_left_out(history), *_costs(history)]
    rows += [("logger", remark) for remark in history.silent]
    if history.status == "running":
        rows.append(("left", duration(history.seconds_left)))
    elif history.stages:
        longest = sorted(history.stages.items(), key=lambda stage: -stage[1])[:3]
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in longest)
        rows.append(("took", f"{duration(sum(history.stages.values()))}: {parts}"))
    return rows + ([("verdict", history.verdict[0])] if history.verdict else [])


def _data(history: History) -> list[Row]:
    """Returns how much of the data the run has used, and notes on skipped records."""
    told = [
        f"{quantity(history.measured('tokens'))} tokens, {history.epochs} of {quantity(whole)}"
        for whole in [number(history.results.get("dataset_tokens"))]
        if whole and history.epochs
    ]
    if passes := history.numbers("source_epochs"):
        told.append(f"epochs by the end: {by_name(passes, few_digits)}")
    if count := history.results.get("dataset_skipped"):
        told.append(f"{count:,} bad record{'s' * (count > 1)} skipped")
    every = list(history.results.get("dataset_notes", ()))
    more = [f"{len(every) - NOTES} more in {history.run.results}"] if every[NOTES:] else []
    notes = [("note", note) for note in every[:NOTES] + more]
    return [("data", "; ".join(told)), *notes] if told else notes


def _costs(history: History) -> list[Row]:
    """Returns memory per rank and cost, each next to its prediction. Omits memory on a CPU, because
    it is measured for the whole process and the plan does not predict that.
    """
    memory, usd = history.measured("memory_bytes"), number(history.results.get("usd"))
    rows = []
    if memory and history.results.get("device") != "cpu":
        rows.append(
            ("memory", f"{size(memory)} per rank{predicted(history, 'memory_bytes', size)}")
        )
    if usd:
        rows.append(("cost", f"${usd:,.2f}{predicted(history, 'usd', '${:,.2f}'.format)}"))
    return rows


def _parts(history: History) -> list[Row]:
    """Returns each part's share of the step time, largest first, based on median times over all
    steps with timings.
    """
    keys = sorted({key for line in history.metrics for key in line if key.endswith("_seconds")})
    middle = {
        key.removesuffix("_seconds"): median(history.series(key)[1])
        for key in keys
        if history.series(key)[1]
    }
    total = sum(middle.values())
    shares = sorted(middle.items(), key=lambda item: -item[1])
    return (
        [("step", ", ".join(f"{name} {100 * seconds / total:.0f} %" for name, seconds in shares))]
        if total
        else []
    )


def _left_out(history: History) -> list[Row]:
    """Returns the number of skipped steps and of steps with an fp16 overflow, if any."""
    last = history.metrics[-1]
    skipped, overflowed, scale = (
        number(last.get(name)) or 0 for name in ("skipped", "overflowed", "loss_scale")
    )
    told = [f"{skipped:,.0f} step{'s' * (skipped > 1)}: {SKIPPED}"] if skipped else []
    told += (
        [
            f"{overflowed:,.0f} step{'s' * (overflowed > 1)} overflowed fp16; "
            f"the loss scale is {scale:,g}"
        ]
        if overflowed
        else []
    )
    return [("skipped", "; ".join(told))] if told else []


def _losses(history: History) -> str:
    first, last = history.losses
    broke = f" · not finite from step {history.broke_at:,}" if history.broke_at is not None else ""
    valid, parts = history.measured("valid_loss"), history.numbers("valid_losses")
    each = f" ({by_name(parts, decimal)})" if parts else ""
    return f"{decimal(first)} → {decimal(last)}{broke}" + (
        f" · validation {decimal(valid)}{each}" if valid is not None else ""
    )


def _places(history: History) -> list[Row]:
    run, saved = history.run, history.results.get("last_checkpoint")
    rows = [("checkpoint", str(saved))] if saved else []
    return rows + ([("report", str(run.report))] if run.report.exists() else [])


def _freshness(history: History) -> list[Row]:
    now = time.time()
    rows = (
        [("last step", f"{duration(now - history.run.metrics.stat().st_mtime)} ago")]
        if history.metrics
        else []
    )
    saved = [event for event in history.events if event.get("event") == "checkpointed"]
    if saved:
        rows.append(
            ("checkpoint", f"step {saved[-1].get('step')}, {duration(now - saved[-1]['time'])} ago")
        )
    return rows


def _led(history: History) -> list[Row]:
    """Returns the host that leads a run on remote machines, and its standby host if the run uses
    standbys.
    """
    holder = newest_holder(history.run.folder)
    if history.status != "running" or holder is None or holder.code is not None:
        return []
    if newest_standby(history.run.folder) is None:
        return [("led by", holder.host)]
    return [
        (
            "led by",
            f"{holder.host}; "
            f"{f'{holder.standby} is the standby' if holder.standby else 'no standby yet'}",
        )
    ]


def _next(history: History) -> list[Row]:
    commands = next_commands(history)
    width = max(len(command) for command, _ in commands)
    return [
        ("" if index else "next", f"{command:<{width}}  {why}")
        for index, (command, why) in enumerate(commands)
    ]


def _aligned(rows: list[Row]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


HEAD = ("run", "state", "step", "loss", "valid", "tokens/s", "cost", "age")
NOTHING = ("name", "model.preset")  # keys to ignore, because other keys explain their differences
# Okabe-Ito palette
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


def known(root: Path = RUNS) -> list[Run]:
    """Returns the runs with results on this machine, sorted by name."""
    return [Run(path.parent) for path in sorted(root.glob("*/results.json"))]


def describe_runs(runs: Sequence[Run]) -> Iterator[str]:
    """Yields one line per run, latest last. For a run on a fleet, the line shows the last state
    that reached this machine.
    """
    yield from table(
        HEAD,
        [row for _, row in sorted(map(entry, runs), key=lambda found: found[0])],
        ("run", "state"),
    )


def entry(run: Run) -> tuple[float, tuple[str, ...]]:
    """Returns the time of a run's last update, and the run's row in the table."""
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


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Returns the config keys in which the runs differ, each with one value per run."""
    from ..config import flat, load_resolved

    configs = [dict(flat(asdict(load_resolved(run.config)))) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config if key not in NOTHING)
    found = {key: [config.get(key) for config in configs] for key in keys}
    return {key: values for key, values in found.items() if any(v != values[0] for v in values)}


def describe_differences(runs: Sequence[Run]) -> Iterator[str]:
    """Yields the config keys in which the runs differ, followed by each run's results."""
    rows = [(key, *map(value_text, values)) for key, values in differences(runs).items()]
    names = [run.name for run in runs]
    yield from table(("key", *names), rows, ("key",)) if rows else ["the configs are identical"]
    yield ""
    yield from table(("", *names), _outcomes([read(run) for run in runs]), ("",))


def _outcomes(histories: Sequence[History]) -> list[tuple[str, ...]]:
    """Returns one row per result, with one value per run."""
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
    """Returns the latest loss, or "nan" if it is not finite."""
    return "nan" if history.is_lost else decimal(history.losses[1])


def value_text(value: object) -> str:
    """Formats a config value in at most 40 characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:39]}…"


def draw(runs: Mapping[str, Run], path: Path) -> None:
    """Plots training loss against tokens, with one labeled line per run."""
    import matplotlib

    from .plots import FAINT, STYLE, label_ends, save, sheet, short

    with matplotlib.rc_context(STYLE):
        figure, axes = sheet("Loss (nats per token)", 7.6, 4.2)
        axes.set_xlabel("tokens", color=FAINT)
        axes.xaxis.set_major_formatter(lambda value, _: quantity(value))
        ends = []
        for (label, run), colour in zip(runs.items(), COLOURS, strict=False):
            history = read(run)
            steps, losses = history.series("loss")
            if losses:
                tokens = [step * history.tokens_per_step for step in steps]
                axes.plot(
                    tokens, losses, color=colour, lw=1.6, marker="o" if len(losses) == 1 else ""
                )
                ends.append((losses[-1], f"{short(label)}  {decimal(losses[-1])}", colour))
        label_ends(axes, ends)
        axes.margins(x=0.02)
        with suppress(OSError):
            save(figure, path)


def next_commands(history: History) -> list[tuple[str, str]]:
    """Returns the suggested next commands, each with its effect."""
    if history.run.rehearsal.exists():
        return [
            ("make rehearse", "repeats the rehearsal"),
            ("make train", "trains your model"),
        ]
    which, more = _which_config(history.run), 2 * max(history.steps_total, 1)
    logs, train = f"make logs{which}", f"make train{which or _as_given(history.run)}"
    if history.status == "running":
        return [
            (f"{logs} FOLLOW=1", "shows new lines"),
            (f"make stop{which}", "stops at the next step and saves a checkpoint"),
        ]
    if history.status == "finished":
        words = f"sample{which} PROMPT={shlex.quote(opening(history.results))}"
        write = (f"make {words}", "generates text from a prompt")
        if _answers(history.run):
            write = (f"make chat{which}", "chats with the model")
        why = f"continues to step {more:,}; the learning rate may rise again"
        return [(f"{train} SET='train.steps={more}'", why), write]
    saved = history.steps_of("checkpointed")
    again = f"resumes from step {saved[-1]:,}" if saved else "starts the run"
    quiet = history.status in ("not started", "stopped")  # these states are not failures
    return ([] if quiet else [(logs, "shows the ranks' logs")]) + [(completed(train), again)]


def opening(results: Record) -> str:
    """Returns a prompt for the model to continue: a few words from the run's sample of the
    validation text.
    """
    text = str((results.get("sample") or {}).get("prompt", ""))
    # The first word and the first sentence may be truncated.
    parts = SENTENCE_END.split(text)[1:] or [text.partition(" ")[2]]
    lines = [[word for word in part.split() if word.isprintable()][:OPENING] for part in parts]
    longest = max([[], *lines], key=len)
    chosen = " ".join(longest)
    return f"{chosen} " if chosen and len(chosen) < LONGEST_OPENING else "The "


def _which_config(run: Run) -> str:
    """Returns the ` CONFIG=…` argument that suggested commands need, or "" if config.yaml in the
    current folder names this run or if the run has no config yet.
    """
    lines: list[str] = []
    with suppress(FileNotFoundError, InputError):  # no readable config.yaml
        lines = untrusted_input.read_text(
            Path("config.yaml"), untrusted_input.MEBIBYTE
        ).splitlines()
    own = any(line.partition("#")[0].split() == ["name:", run.name] for line in lines)
    return "" if own or not run.document.exists() else f" CONFIG={run.document}"


def _as_given(run: Run) -> str:
    """Returns the ` CONFIG=…` argument that resuming training needs, or "" if config.yaml gives the
    run's config without SET or NODES.
    """
    from ..config import Settings, load, load_resolved  # imported here, because it loads YAML

    with suppress(ConfigError):
        if load(Settings(Path("config.yaml")))[0] == load_resolved(run.config):
            return ""
    return f" CONFIG={run.given}" if run.given.exists() else ""


def _answers(run: Run) -> bool:
    """Returns whether the run's model was trained on conversations."""
    from ..config import load_resolved  # imported here, because it loads YAML

    with suppress(ConfigError):
        return load_resolved(run.config).data.conversations
    return False
