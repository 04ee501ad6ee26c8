"""docs/evidence/faults.md's table of rehearsals, made from what make rehearse measured.

`python tests/rehearsals.py WHERE RUN...` adds the rehearsals of these run folders (rehearsal.json) to
docs/evidence/rehearsals.json, as measured WHERE today, and writes the table anew. test_rehearse.py
compares it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from trainfleet.health.faults import FAULTS
from trainfleet.report.history import duration

EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence"
PAGE, DATA = EVIDENCE / "faults.md", EVIDENCE / "rehearsals.json"
BEGIN, END = "<!-- made by tests/rehearsals.py -->", "<!-- end -->"


def measured() -> dict[str, dict[str, Any]]:
    """Where → fault → outcome, with the day of its measurement."""
    return json.loads(DATA.read_text())  # type: ignore[no-any-return]


def add(where: str, runs: list[Path]) -> None:
    """Adds the outcomes of these run folders; a later one of a fault replaces an earlier one."""
    found, today = measured() if DATA.exists() else {}, time.strftime("%Y-%m-%d")
    for run in runs:
        for outcome in json.loads((run / "rehearsal.json").read_text())["outcomes"]:
            if not outcome["skipped"]:
                found.setdefault(where, {})[outcome["name"]] = outcome | {"measured": today}
    DATA.write_text(json.dumps(found, indent=1) + "\n")


def cell(outcome: dict[str, Any] | None) -> str:
    """One fault at one place: noticed after, training again after, steps repeated."""
    if outcome is None:
        return ""
    if outcome["broken"]:
        return f"BROKEN: {'; '.join(outcome['broken'])}"
    times = (duration(outcome[key]) for key in ("noticed", "again"))
    return f"{' / '.join(times)} / {outcome['lost']}"


def table() -> str:
    """The table as Markdown."""
    found = measured()
    days = {where: max(one["measured"] for one in rows.values()) for where, rows in found.items()}
    rows = [
        f"| `{name}` | {', '.join(verdicts)} | {' | '.join(cell(rows.get(name)) for rows in found.values())} |"
        for name in FAULTS
        if (
            verdicts := dict.fromkeys(
                rows[name]["verdict"] for rows in found.values() if name in rows
            )
        )
    ]
    head = " | ".join(f"{where}, {days[where]}" for where in found)
    return "\n".join(
        (
            BEGIN,
            "",
            f"| fault | verdict | {head} |",
            "|---" * (len(found) + 2) + "|",
            *rows,
            "",
            END,
        )
    )


def parts() -> tuple[str, str, str]:
    """The page before the table, the table as it is there, and the rest."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before, f"{BEGIN}{inside}{END}", after


if __name__ == "__main__":
    if sys.argv[1:]:
        add(sys.argv[1], [Path(run) for run in sys.argv[2:]])
    before, _, after = parts()
    PAGE.write_text(before + table() + after)
