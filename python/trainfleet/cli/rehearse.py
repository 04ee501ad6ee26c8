"""make rehearse: breaks a short run of its own on purpose, and says which promises it kept; on hosts it asks first (YES=1)."""

from __future__ import annotations

import sys

from ..errors import ConfigError, Problem
from ..launch.faults import FAULTS, Fault, rehearse
from ..launch.rehearsal import Outcome
from ..launch.rehearsal_hosts import stage_for
from ..launch.settings import config_of, settings_of
from ..report.history import duration
from ..spelling import suggest
from .variables import Variables, flag

WIDTHS, HEADS = (18, 14, 12, 10, 15), ("fault", "noticed after", "verdict", "lost steps", "trains again in")


def main(variables: Variables, started: float) -> int:
    faults = chosen(variables.get("FAULTS", ""))
    config, _ = config_of(settings_of(variables))
    outcomes = []
    with stage_for(config, [fault.name for fault in faults], flag(variables, "YES")) as made:
        print(row(*HEADS), flush=True)
        for outcome in rehearse(faults, made):
            outcomes.append(outcome)
            print(describe(outcome), flush=True)
    broken = [outcome for outcome in outcomes if outcome.broken]
    for outcome in broken:
        print(f"{outcome.name}: {FAULTS[outcome.name].what}: {'; '.join(outcome.broken)}", file=sys.stderr)
    kept = len(outcomes) - len(broken) - sum(bool(outcome.skipped) for outcome in outcomes)
    print(f"\n{kept} of {len(outcomes)} faults were survived as promised; everything is put back")
    return 1 if broken else 0


def chosen(names: str) -> list[Fault]:
    """The faults by name, all of them where none is named.

    Raises:
        ConfigError: one is no fault.
    """
    wanted = names.replace(",", " ").split()
    problems = [Problem(0, "FAULTS", "", f"{name} is no fault{suggest(name, FAULTS)}") for name in wanted if name not in FAULTS]
    if problems:
        raise ConfigError(problems, next=f"one or more of: {' '.join(FAULTS)}")
    return [FAULTS[name] for name in wanted] or list(FAULTS.values())


def describe(outcome: Outcome) -> str:
    """The fault's line of the table."""
    if outcome.skipped:
        return f"{row(outcome.name)} not tried: {outcome.skipped}"
    figures = (duration(outcome.noticed), outcome.verdict, str(outcome.lost), duration(outcome.again))
    return f"{row(outcome.name, *figures)} {'BROKEN: ' + '; '.join(outcome.broken) if outcome.broken else 'kept'}"


def row(*cells: str) -> str:
    """Cells, each as wide as its column."""
    return " ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=False))
