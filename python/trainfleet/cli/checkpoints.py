"""make checkpoints: step, time, size, loss and layout of each checkpoint, and whether it is
intact.
"""

from __future__ import annotations

from ..checkpoints.listing import ListedCheckpoint, look
from ..launch.command import store_named
from ..launch.run_location import forwarded
from ..report.history import decimal, layout, moment, size, table
from ..trust.errors import RunError
from .variables import Variables

HEAD = ("step", "saved (UTC)", "size", "loss", "layout", "state")


def main(variables: Variables, started: float) -> int:
    if (code := forwarded("checkpoints", variables)) is not None:
        return code
    name, store = store_named(variables)
    entries = list(look(store))
    if not entries:
        raise RunError("has no checkpoint yet", where=name, next="make train")
    print(
        "\n".join(
            table(HEAD, [row(entry) for entry in entries], ("saved (UTC)", "layout", "state"))
        )
    )
    if any(entry.fault for entry in entries):
        print("next: make train resumes from the newest good one")
        return 1
    print("next: make verify reads the newest in full; good means that no file is missing or cut")
    return 0


def row(entry: ListedCheckpoint) -> tuple[str, ...]:
    """Returns the cells of one checkpoint."""
    commit, state = entry.commit, f"broken: {entry.fault}" if entry.fault else "good"
    if commit is None:
        return (f"{entry.step:,}", "—", "—", "—", "—", state)
    return (
        f"{entry.step:,}",
        moment(commit.time),
        size(commit.size),
        decimal(commit.loss),
        layout(commit.layout),
        state,
    )
