"""Causes of job failures, each with a description, a decision and a suggested command
(causes.yaml). The log patterns that identify a cause are in catalogue/*.yaml, with their sources.

`firm: false` marks broad patterns, which are used only if no specific pattern matches. Patterns
under `closed` are conclusive in any log. Patterns under `says` may also appear with other causes.
Only closed patterns and machine-reported lines (weight: proof) make a verdict certain.

An entry's `by` restricts its patterns to lines from certain writers:
    kernel    the kernel
    agent     launchers, schedulers and their daemons
    library   a library's own log line, from any process
    error     an exception and its message
    watch     trainfleet's watchdog and backends
    any       any writer

Named groups in a pattern extract facts: `peer` and `rank` identify the party that the line blames,
and `joined` and `all` are client counts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

from ..config.tables import read_table

FILE = Path(__file__).with_name("causes.yaml")


class Weight(IntEnum):
    """Strength of a log line as evidence. VICTIM: the writer lost a peer. HINT: the line may
    indicate the cause. WORD: a program reports the cause. PROOF: a machine reports the cause.
    """

    VICTIM = 0
    HINT = 1
    WORD = 2
    PROOF = 3


class Then(Enum):
    """Decision after a failure: retry, retry without the blamed node, or stop because a retry would
    fail the same way.
    """

    HERE = "retry here"
    ELSEWHERE = "retry elsewhere"
    STOP = "stop"


@dataclass(frozen=True)
class Cause:
    """A class of failures with its description, decision, and suggested command.

    `of_a_node` marks causes that are specific to one node, so replacing that node fixes them. If
    several nodes show such a cause, a replacement is assumed to fail too. `steps` maps log patterns
    to commands that are more specific than `next`.
    """

    name: str
    words: str
    next: str
    then: Then = Then.STOP
    of_a_node: bool = False
    steps: Mapping[str, str] = field(default_factory=dict)

    def next_for(self, text: str) -> str:
        """Returns the command to run next for a failure with this log text."""
        found = ((re.search(says, text), step) for says, step in self.steps.items())
        return next((match.expand(step) for match, step in found if match), self.next)

    def then_on(self, nodes: int) -> Then:
        """Returns the decision if `nodes` nodes show this cause."""
        return Then.STOP if self.of_a_node and nodes > 1 else self.then


CAUSES = {
    name: Cause(name, **{**row, "then": Then(row.get("then", "stop"))})
    for name, row in read_table(FILE).items()
}


FOLDERS = [Path(__file__).with_name("catalogue")]  # folders with the catalogue's .yaml files
_NUMBERS = re.compile(  # text that no pattern depends on: long numbers, addresses, ports, ranks
    r"\d{5,}|0x[0-9a-f]+|\b\d+\.\d+\.\d+\.\d+\b|(?<=\]:)\d+|(?<=<)\d+(?=>)|(?<=[Rr]ank "
    r")\d+|(?<=rank_)\d+"
)


@dataclass(frozen=True)
class Sign:
    """A log pattern that indicates a cause, with its strength.

    A leading `-` in `cause` marks patterns that retract an earlier error with this cause. A leading
    `+` marks patterns that explain later hints at the cause, which are therefore ignored.
    """

    pattern: re.Pattern[str]
    cause: str
    weight: Weight
    # Pre-filter: the pattern is only tried on lines that contain one of these words, or on every
    # line if there are no words.
    about: tuple[str, ...]
    firm: bool = True
    closed: bool = False

    @property
    def rank(self) -> tuple[int, bool]:
        return self.weight, self.firm

    def search(self, text: str) -> re.Match[str] | None:
        if self.about and not any(word in text for word in self.about):
            return None
        return self.pattern.search(text)


@functools.cache
def signs() -> dict[str, list[Sign]]:
    """Returns all patterns, grouped by the type of writer that they apply to."""
    found: dict[str, list[Sign]] = {}
    for path in sorted(path for folder in FOLDERS for path in folder.glob("*.yaml")):
        for entry in read_table(path)["entries"]:
            found.setdefault(entry["by"], []).extend(_signs(entry))
    return found


def _signs(entry: dict[str, Any]) -> Iterator[Sign]:
    about = entry.get("about", ())
    words = (about,) if isinstance(about, str) else tuple(about)
    weight = Weight[entry.get("weight", "hint").upper()]
    firm = entry.get("firm", True)
    for key in ("closed", "says"):
        closed = firm and (key == "closed" or weight == Weight.PROOF)
        for says in entry.get(key, ()):
            pattern = re.compile(says, re.MULTILINE)
            yield Sign(pattern, entry["means"], weight, words, firm, closed)


def first_sign(by: tuple[str, ...], text: str) -> tuple[Sign, re.Match[str]] | None:
    """Returns the strongest pattern that matches for these types of writers, with its match, or
    None.
    """
    found = _matching(by, _NUMBERS.sub("0", text))
    sign = max(found, key=lambda sign: sign.rank, default=None)
    return (sign, match) if sign and (match := sign.search(text)) else None


def firm_causes(by: tuple[str, ...], text: str) -> set[str]:
    """Returns all causes whose firm patterns match the text. More than one cause means that the
    text is ambiguous.
    """
    found = _matching(by, _NUMBERS.sub("0", text))
    return {sign.cause for sign in found if sign.firm and sign.weight >= Weight.WORD}


@functools.lru_cache(maxsize=65536)  # Many ranks write lines that differ only in numbers.
def _matching(by: tuple[str, ...], text: str) -> tuple[Sign, ...]:
    every = (sign for group in by for sign in signs().get(group, ()))
    return tuple(sign for sign in every if sign.search(text))
