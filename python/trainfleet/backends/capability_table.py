"""The support table of docs/evidence, generated from what backends declare."""

from __future__ import annotations

from . import BACKENDS, OURS
from .base import Can


def table() -> str:
    """A row a capability and a column a backend, in Markdown: a cell says on what it was tried."""
    head = ["capability", *(f"`{name}`" for name in OURS)]
    rows = [
        [f"`{can.name}`: {can.value}", *(_cell(name, can) if can in BACKENDS[name].can else "" for name in OURS)] for can in Can
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _cell(name: str, can: Can) -> str:
    tried = [BACKENDS[name].tried_on, BACKENDS[name].pretended.get(can, "")]
    return ", ".join(filter(None, tried))
