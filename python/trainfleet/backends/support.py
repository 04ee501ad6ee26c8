"""The README's support table, generated from what backends declare."""

from __future__ import annotations

from . import BACKENDS
from .base import Can

PRETENDED = {
    "ssh": {Can.IMAGE: "fake Docker"},
    "ec2": {Can.IMAGE: "fake Docker"},
    "slurm": {Can.IMAGE: "no pyxis", Can.MACHINES: "fake pcluster"},
}  # fmt: skip - beside what the rest was tried on


def table() -> str:
    """A row a capability and a column a backend, in Markdown: a cell says on what it was tried."""
    head = ["capability", *(f"`{name}`" for name in BACKENDS)]
    rows = [
        [f"`{can.name}`: {can.value}", *(_cell(name, can) if can in BACKENDS[name].can else "" for name in BACKENDS)]
        for can in Can
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _cell(name: str, can: Can) -> str:
    tried = [BACKENDS[name].tried_on, PRETENDED.get(name, {}).get(can, "")]
    return ", ".join(filter(None, tried))
