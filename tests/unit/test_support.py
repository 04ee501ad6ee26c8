"""The support table of docs/evidence is what the backends declare."""

from __future__ import annotations

from pathlib import Path

from trainfleet.backends import BACKENDS, OURS
from trainfleet.backends.base import Can

EVIDENCE = Path(__file__).parents[2] / "docs/evidence/README.md"


def table() -> str:
    """A row a capability and a column a backend, in Markdown: a cell says on what it was tried."""
    head = ["capability", *(f"`{name}`" for name in OURS)]
    rows = [
        [
            f"`{can.name}`: {can.value}",
            *(_cell(name, can) if can in BACKENDS[name].can else "" for name in OURS),
        ]
        for can in Can
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def _cell(name: str, can: Can) -> str:
    tried = [BACKENDS[name].tried_on, BACKENDS[name].pretended.get(can, "")]
    return ", ".join(filter(None, tried))


def test_the_page_of_evidence_has_the_table_that_the_declarations_make() -> None:
    assert f"\n{table()}\n" in EVIDENCE.read_text(), f"put this into {EVIDENCE}:\n{table()}"


def test_the_table_says_of_every_capability_who_has_it() -> None:
    rows = [
        [cell.replace("`", "").strip() for cell in line.strip("|").split("|")]
        for line in table().splitlines()
    ]
    assert rows[0] == ["capability", *BACKENDS]
    assert [backend.name for backend in BACKENDS.values()] == [*BACKENDS]
    told = {row[0]: dict(zip(BACKENDS, row[1:], strict=True)) for row in rows[2:]}
    outlives = told["OUTLIVES: a job continues without the machine that launched it"]
    shared = told["SHARED: its nodes share the run folder; other backends use s3://"]
    assert (outlives["local"], outlives["ssh"]) == ("", "real sshd") and (
        shared["local"],
        shared["batch"],
    ) == ("real", "")
    assert len(told) == len(Can)
