"""Which backend can what, as they declare it: the README's table."""

from __future__ import annotations

from . import BACKENDS
from .base import Can


def table() -> str:
    """A row a capability and a column a backend, in Markdown: a cell says on what it was tried."""
    head = ["capability", *(f"`{name}`" for name in BACKENDS)]
    rows = [
        [f"`{can.name}`: {can.value}", *(BACKENDS[name].tried_on if can in BACKENDS[name].can else "" for name in BACKENDS)]
        for can in Can
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
