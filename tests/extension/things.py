"""The extension map: for each kind of thing, where one more goes. CONTRIBUTING.md's table is made
from it.

`python tests/extension/things.py` writes the table anew; test_map.py compares it, and adds a dummy
of each kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- made by tests/extension/things.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Thing:
    """`where`: the one place, with what goes there; `owners`: the files that may compare a name of this kind."""

    what: str
    where: str
    owners: tuple[str, ...] = ()


THINGS = (
    Thing("a backend",
          "`make new-backend NAME=x` writes a package that adds one by entry points"
          " ([its page](docs/how-to/own-backend.md)): a class of `Backend` (`backends/base.py`), its placement, and the bench on which `tests/conformance` passes; one of ours is a file in `backends/`,"
          " its placement in `node/placements.py`, and a row of `OURS` in each"),
    Thing("a verb", "a line in the Makefile, its file and variables in `cli/__init__.py`, and in that file a function of its name, which itself imports what is slow to load"),
    Thing("a key of the config", "a field with its docstring in `config/types*.py`; then `python -m trainfleet.config.reference`"),
    Thing("an instance type",
          "a row of `instance_types.json`, begun by `scripts/instance_types.py ANSWER.json` from what EC2 answers"),
    Thing("an accelerator", "a row of `hardware/accelerators.json` with its source"),
    Thing("an optimizer", "a row of `config/optimizers.py`, and the function that it names in `made_by`",
          ("config/optimizers.py",)),
    Thing("a model family", "an object in `config/families.py`, and the module that it names, if it is not another's",
          ("config/families.py",)),
    Thing("a preset", "a row of `config/presets.yaml`, with its source"),
    Thing("a data format", "a row of `data/format_table.py` (`FORMATS`), and the function that it names in `read`",
          ("data/sources.py",)),
    Thing("a verdict's cause", "a row of `watch/causes.yaml`, and its words as below"),
    Thing("a failure's words", "a line in `watch/catalogue/*.yaml` with its source, and a log in `tests/unit/verdict_corpus`"),
    Thing("a fault", "a row of `health/faults.py`, with the function by which a rank plays it; `make rehearse` and `tests/drills` take it from there",
          ("health/faults.py", "launch/faults.py")),
)  # fmt: skip


def table() -> str:
    """The table as Markdown."""
    rows = (f"| {thing.what} | {thing.where} |" for thing in THINGS)
    return "\n".join((BEGIN, "", "| what | where |", "|---|---|", *rows, "", END))


def parts() -> tuple[str, str, str]:
    """The page before the table, the table as it is there, and the rest."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before, f"{BEGIN}{inside}{END}", after


if __name__ == "__main__":
    before, _, after = parts()
    PAGE.write_text(before + table() + after)
