"""Defines why jobs die: the causes that a verdict can name, what each decides, and the one command
that helps (causes.yaml); and the words by which logs show a cause (catalogue/*.yaml, with their
sources).

`firm: false` marks words with a wider meaning: they count only if no more exact words are found.
Words are under `closed` if they mean only that cause, in any log. Those under `says` sometimes mean
another one. Only closed words, and words of the machine (weight proof), make a verdict sure. An
entry's `by` names the writers that may use its words: `kernel`, `agent` (launchers, schedulers,
their daemons), `library` (a library's own log line, from any process), `error` (an exception and
its message), `watch` (our watchdog and backends) or `any`. A named group in a pattern adds a fact:
`peer` and `rank` name the one that the line blames, `joined` and `all` count clients.
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
    """The value of a line as evidence: its writer lost a peer; it may mean this; it reports this; a
    machine, not a program, reports this.
    """

    VICTIM = 0
    HINT = 1
    WORD = 2
    PROOF = 3


class Then(Enum):
    """The decision after a cause: another attempt, one without the node to blame, or none because
    it would fail the same way.
    """

    HERE = "retry here"
    ELSEWHERE = "retry elsewhere"
    STOP = "stop"


@dataclass(frozen=True)
class Cause:
    """A class of failures: words, the command to type, and the decision.

    `of_a_node`: it depends on one node, which another can replace. If several nodes fail the same
    way, a new node would too.
    """

    name: str
    words: str
    next: str
    then: Then = Then.STOP
    of_a_node: bool = False

    def then_on(self, nodes: int) -> Then:
        """Returns the decision if that many nodes show it."""
        return Then.STOP if self.of_a_node and nodes > 1 else self.then


CAUSES = {
    name: Cause(
        name, row["words"], row["next"], Then(row.get("then", "stop")), row.get("of_a_node", False)
    )
    for name, row in read_table(FILE).items()
}


FOLDERS = [Path(__file__).with_name("catalogue")]  # folders with the .yaml files
_NUMBERS = re.compile(  # parts on which no sign depends: long numbers, addresses, ports, ranks
    r"\d{5,}|0x[0-9a-f]+|\b\d+\.\d+\.\d+\.\d+\b|(?<=\]:)\d+|(?<=<)\d+(?=>)|(?<=[Rr]ank "
    r")\d+|(?<=rank_)\d+"
)


@dataclass(frozen=True)
class Sign:
    """Words that mean a cause, and how surely.

    `cancels` instead withdraws an earlier complaint about that cause. `forestalls` drops a later
    hint at it, which is only a consequence.
    """

    pattern: re.Pattern[str]
    cause: str
    weight: Weight
    # words, one of which is in every line that can match; empty: any line can
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
    """Returns the signs by the writers that may use them."""
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
    """Returns the weightiest sign in a text among those that these writers may use."""
    sign = _sign_of(by, _NUMBERS.sub("0", text))
    if sign is not None and (match := sign.search(text)):
        return sign, match
    return None


@functools.lru_cache(maxsize=65536)  # a thousand ranks write the same line, except for numbers
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
    """Returns every cause that a text names for certain; with two of them, neither is certain."""
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
