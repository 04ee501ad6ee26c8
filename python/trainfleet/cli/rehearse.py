"""make rehearse: breaks a short, separate run on purpose, and reports which promises it kept; on
real nodes only with YES=1.
"""

from __future__ import annotations

import sys
import time

from ..launch.command import config_of, settings_of
from ..launch.faults import FAULTS, Fault, rehearse
from ..launch.rehearsal_steps import stage_for
from ..report import html, rehearsal_table
from ..run.run_folder import run_of
from ..trust.errors import ConfigError, Problem
from ..trust.spelling import suggest
from .variables import Variables, flag

WIDTHS = (18, 13, 20, 10, 15, 9, 9)


def main(variables: Variables, started: float) -> int:
    faults = chosen(variables.get("FAULTS", ""))
    config, _ = config_of(settings_of(variables))
    outcomes: list[rehearsal_table.FaultOutcome] = []
    run = run_of(f"{config.name}-rehearsal-{time.strftime('%m%d-%H%M%S')}")
    with stage_for(config, [fault.name for fault in faults], flag(variables, "YES")) as made:
        print(row(*rehearsal_table.HEAD), flush=True)
        for fault in faults:
            print(fault.name, end="", flush=True)  # the rest of its row follows when it has ended
            try:
                outcomes.append(rehearse(fault, made))
            except BaseException:
                print()
                raise
            print(row(*outcomes[-1].cells).removeprefix(fault.name), flush=True)
        rehearsal_table.write(run, made.run("whole").folder, config.fleet.backend, outcomes)
    broken = [outcome for outcome in outcomes if outcome.broken]
    for outcome in broken:
        print(
            f"{outcome.name}: {FAULTS[outcome.name].what}: {'; '.join(outcome.broken)}",
            file=sys.stderr,
        )
    print(
        f"\n{rehearsal_table.Rehearsal(config.fleet.backend, tuple(outcomes)).summary}; "
        "everything is restored"
    )
    print(f"report  {html.write(run)}")
    return 1 if broken else 0


def chosen(names: str) -> list[Fault]:
    """Returns the named faults, or all of them; ConfigError for a name that is not a fault."""
    wanted = names.replace(",", " ").split()
    problems = [
        Problem(0, "FAULTS", "", f"{name} is not a fault{suggest(name, FAULTS)}")
        for name in wanted
        if name not in FAULTS
    ]
    if problems:
        raise ConfigError(problems, next=f"one or more of: {' '.join(FAULTS)}")
    return [FAULTS[name] for name in wanted] or list(FAULTS.values())


def row(*cells: str) -> str:
    """Returns the cells of a row, padded except the last; for a fault that could not be injected
    only its name and the reason.
    """
    shown = cells if all(cells) else (cells[0], cells[-1])
    return " ".join(
        [*(cell.ljust(width) for cell, width in zip(shown[:-1], WIDTHS, strict=False)), shown[-1]]
    )
