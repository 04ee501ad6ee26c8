"""The summary of a run on the terminal: the block at its end, and the output of `make status`."""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import TextIO

from ..health.lease import newest_holder, newest_standby
from ..run.run_folder import Run
from .history import History, decimal, duration, number, percent, predicted, quantity, read, size

Row = tuple[str, str]
SKIPPED = "far above the usual (train.spike_sigmas) or not finite, so not applied; a few are normal"


def print_summary(run: Run, stream: TextIO | None = None) -> None:
    """Prints how the run ended, the path of its report and, last, the next command."""
    history = read(run)
    rows = [(run.name, _headline(history)), *_outcome(history), *_places(history), *_next(history)]
    print("\n" + _aligned(rows), file=stream or sys.stdout, flush=True)


def status(run: Run, heard: str = "") -> str:
    """Returns the run's state now, as aligned lines; the next command is the last.

    `heard` is its engine's current message about a waiting job.
    """
    history = read(run)
    rows = [*_outcome(history), *_freshness(history), *_led(history), *_next(history)]
    return _aligned([(run.name, _headline(history, heard)), *rows])


def _headline(history: History, heard: str = "") -> str:
    if history.status == "running" and history.waits_for:
        return heard or history.waits_for
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
    """Returns the share of the data that was seen, and its skipped records."""
    told = [
        f"{history.epochs}: {quantity(history.measured('tokens'))} of {quantity(whole)} tokens"
        for whole in [number(history.results.get("dataset_tokens"))]
        if whole and history.epochs
    ]
    if count := history.results.get("dataset_skipped"):
        told.append(f"{count:,} bad record{'s' * (count > 1)} skipped")
    return [("data", "; ".join(told))] if told else []


def _costs(history: History) -> list[Row]:
    """Returns memory per rank and dollars next to the plan's predictions. A CPU's memory is the
    whole process's, which the plan does not predict.
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
    """Returns the shares of the parts of a step, the largest first, over the steps with timed
    parts.
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
    """Returns the skipped steps, if any, and those that overflowed fp16."""
    last = history.metrics[-1]
    skipped, overflowed, scale = (
        number(last.get(name)) or 0 for name in ("skipped", "overflowed", "loss_scale")
    )
    told = [f"{skipped:,.0f} step{'s' * (skipped > 1)}: {SKIPPED}"] if skipped else []
    told += (
        [f"{overflowed:,.0f} steps overflowed fp16; the loss scale is {scale:,g}"]
        if overflowed
        else []
    )
    return [("skipped", "; ".join(told))] if told else []


def _losses(history: History) -> str:
    first, last = history.losses
    broke = (
        f" · not a finite number from step {history.broke_at:,}"
        if history.broke_at is not None
        else ""
    )
    valid = history.measured("valid_loss")
    return f"{decimal(first)} → {decimal(last)}{broke}" + (
        f" · validation {decimal(valid)}" if valid is not None else ""
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
    """Returns the leading host of a run on other machines, and its standby, if hosts have one."""
    holder = newest_holder(history.run.folder)
    if history.status != "running" or holder is None or holder.code is not None:
        return []
    if newest_standby(history.run.folder) is None:
        return [("led by", holder.host)]
    return [
        (
            "led by",
            f"{holder.host}; "
            f"{f'{holder.standby} stands by' if holder.standby else 'no other host stands by yet'}",
        )
    ]


def _next(history: History) -> list[Row]:
    commands = history.next_commands
    width = max(len(command) for command, _ in commands)
    return [
        ("" if index else "next", f"{command:<{width}}  {why}")
        for index, (command, why) in enumerate(commands)
    ]


def _aligned(rows: list[Row]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
