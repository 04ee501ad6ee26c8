"""make rehearse: breaks a short run of its own on purpose, here or on hosts, and says which promises it kept.

On hosts it asks first; YES=1 does not ask.
"""

from __future__ import annotations

import sys

from ..backends import backend_of
from ..config import Config
from ..errors import ConfigError, Problem, RunError
from ..launch.faults import FAULTS, Fault, rehearse
from ..launch.rehearsal import Outcome, stage
from ..launch.rehearsal_hosts import require_hosts, stage_on
from ..launch.settings import config_of, settings_of
from ..report.history import duration
from ..spelling import suggest
from .variables import Variables, flag

WIDTHS, HEADS = (18, 14, 12, 10, 15), ("fault", "noticed after", "verdict", "lost steps", "trains again in")


def main(variables: Variables, started: float) -> int:
    faults = chosen(variables.get("FAULTS", ""))
    config, _ = config_of(settings_of(variables))
    here = backend_of(config).is_here
    if not here:
        require_consent(config, flag(variables, "YES"))
    print("a run of its own, in a folder of its own; none of yours is touched", flush=True)
    outcomes = []
    with stage() if here else stage_on(config, [fault.name for fault in faults]) as made:
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


def require_consent(config: Config, sure: bool) -> None:
    """Returns where faults can and may be played on the hosts of a config.

    Raises:
        ConfigError: they can't.
        RunError: nobody said so.
    """
    require_hosts(config)
    hosts = ", ".join(config.fleet.hosts)
    question = f"kill, stop and cut off processes of a short run on {hosts}?"
    if not sure and not (sys.stdin.isatty() and input(f"{question} [y/N] ").strip().lower() in ("y", "yes")):
        raise RunError("a rehearsal harms real hosts, and nobody has agreed", where=hosts, next="make rehearse YES=1")


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
