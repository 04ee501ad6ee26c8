"""Causes of job failures, with the decision and the next command for each (causes.yaml). The log
patterns that identify a cause are in catalogue/*.yaml, with their sources.

`firm: false` marks patterns with a wider meaning, which count only if no more exact pattern
matches. Patterns under `closed` always mean that cause, in any log. Patterns under `says` sometimes
mean another cause. Only closed patterns, and lines of a machine (weight proof), make a verdict
sure.

An entry's `by` names the writers to which its patterns apply:
kernel    the kernel
agent     launchers, schedulers and their daemons
library   a library's own log line, from any process
error     an exception and its message
watch     trainfleet's watchdog and backends
any       any writer

A named group in a pattern adds a fact: `peer` and `rank` identify the party that the line blames,
and `joined` and `all` count clients.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

from ..config.tables import read_table

FILE = Path(__file__).with_name("causes.yaml")


class Weight(IntEnum):
    """The strength of a line as evidence. VICTIM: its writer lost a peer. HINT: it may mean this
    cause. WORD: it reports this cause. PROOF: a machine, not a program, reports this cause.
    """

    VICTIM = 0
    HINT = 1
    WORD = 2
    PROOF = 3


class Then(Enum):
    """The decision after a failure: retry, retry without the node to blame, or stop because a retry
    would fail the same way.
    """

    HERE = "retry here"
    ELSEWHERE = "retry elsewhere"
    STOP = "stop"


@dataclass(frozen=True)
class Cause:
    """A class of failures, with a description, the next command to run, and the decision.

    `of_a_node` marks causes that depend on one node and that a replacement node can fix. If several
    nodes fail the same way, a replacement would fail too.
    """

    name: str
    words: str
    next: str
    then: Then = Then.STOP
    of_a_node: bool = False

    def then_on(self, nodes: int) -> Then:
        """Returns the decision if this number of nodes shows the cause."""
        return Then.STOP if self.of_a_node and nodes > 1 else self.then


CAUSES = {
    name: Cause(
        name, row["words"], row["next"], Then(row.get("then", "stop")), row.get("of_a_node", False)
    )
    for name, row in read_table(FILE).items()
}


FOLDERS = [Path(__file__).with_name("catalogue")]  # folders with the .yaml files
_NUMBERS = re.compile(  # parts that no pattern depends on: long numbers, addresses, ports, ranks
    r"\d{5,}|0x[0-9a-f]+|\b\d+\.\d+\.\d+\.\d+\b|(?<=\]:)\d+|(?<=<)\d+(?=>)|(?<=[Rr]ank "
    r")\d+|(?<=rank_)\d+"
)


@dataclass(frozen=True)
class Sign:
    """A log pattern that indicates a cause, with its strength.

    `cancels` marks a pattern that withdraws an earlier complaint about the cause. `forestalls`
    drops later hints at the cause, which are only consequences.
    """

    pattern: re.Pattern[str]
    cause: str
    weight: Weight
    # Every matching line contains at least one of these words. If empty, any line may match.
    about: tuple[str, ...]
    firm: bool = True
    closed: bool = False
    cancels: bool = False
    forestalls: bool = False

    @property
    def rank(self) -> tuple[int, bool]:
        return self.weight, self.firm

    def search(self, text: str) -> re.Match[str] | None:
        if self.about and not any(word in text for word in self.about):
            return None
        return self.pattern.search(text)


@functools.cache
def signs() -> dict[str, tuple[Sign, ...]]:
    """Returns all signs, grouped by the writers to which they apply."""
    found: dict[str, list[Sign]] = {}
    for path in (path for folder in FOLDERS for path in sorted(folder.glob("*.yaml"))):
        for entry in read_table(path)["entries"]:
            found.setdefault(entry["by"], []).extend(_signs(entry))
    return {
        by: tuple(sorted(group, key=lambda sign: sign.rank, reverse=True))
        for by, group in found.items()
    }


def _signs(entry: dict[str, Any]) -> Iterator[Sign]:
    about = entry.get("about", [])
    words = (about,) if isinstance(about, str) else tuple(about)
    cause = next(entry[key] for key in ("means", "cancels", "forestalls") if key in entry)
    weight = Weight[entry.get("weight", "hint").upper()]
    firm = entry.get("firm", True)
    for key in ("closed", "says"):
        closed = firm and (key == "closed" or weight == Weight.PROOF)
        for says in entry.get(key, ()):
            yield Sign(
                re.compile(says, re.MULTILINE),
                cause,
                weight,
                words,
                firm,
                closed,
                "cancels" in entry,
                "forestalls" in entry,
            )


def first_sign(by: tuple[str, ...], text: str) -> tuple[Sign, re.Match[str]] | None:
    """Returns the strongest sign in a text among the signs of these writers."""
    sign = _sign_of(by, _NUMBERS.sub("0", text))
    if sign is not None and (match := sign.search(text)):
        return sign, match
    return None


@functools.lru_cache(maxsize=65536)  # A thousand ranks write the same line, apart from numbers.
def _sign_of(by: tuple[str, ...], text: str) -> Sign | None:
    best: Sign | None = None
    for group in by:
        for sign in signs().get(group, ()):
            if best is not None and sign.rank <= best.rank:
                break
            if sign.search(text):
                best = sign
    return best


def firm_causes(by: tuple[str, ...], text: str) -> frozenset[str]:
    """Returns every cause that a text names firmly. Two or more causes mean that the text is
    ambiguous.
    """
    return _causes_of(by, _NUMBERS.sub("0", text))


@functools.lru_cache(maxsize=4096)
def _causes_of(by: tuple[str, ...], text: str) -> frozenset[str]:
    every = (
        sign
        for group in by
        for sign in signs().get(group, ())
        if sign.firm and sign.weight >= Weight.WORD
    )
    return frozenset(
        sign.cause for sign in every if not (sign.cancels or sign.forestalls) and sign.search(text)
    )
