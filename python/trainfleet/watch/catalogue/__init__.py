"""The words by which logs give a cause away, from the .yaml files beside this one; each file names
its sources.

`firm: false` marks words of a wider meaning: they count where nothing more exact is said. Words
stand under `closed` where they mean that one cause and no other, whoever's log they are in; those
under `says` have others now and then. Only closed words, and what a machine says (weight proof),
make a verdict sure. An entry's `by` says who may say it: `kernel`, `agent` (launchers, engines,
their daemons), `library` (a library's own log line, of any process), `error` (an exception and its
message), `watch` (our watchdog and backends) or `any`. A named group in a pattern says more: `peer`
and `rank` are whom the line blames, `joined` and `all` count clients.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config.tables import read_table
from ..causes import Weight

FOLDERS = [Path(__file__).parent]  # of the .yaml files
_NUMBERS = re.compile(  # no sign depends on any of these: long numbers, addresses, ports, ranks
    r"\d{5,}|0x[0-9a-f]+|\b\d+\.\d+\.\d+\.\d+\b|(?<=\]:)\d+|(?<=<)\d+(?=>)|(?<=[Rr]ank "
    r")\d+|(?<=rank_)\d+"
)


@dataclass(frozen=True)
class Sign:
    """Words that mean a cause, and how surely.

    `cancels` instead takes an earlier complaint of that cause back, `forestalls` a later hint at
    it, which only followed.
    """

    pattern: re.Pattern[str]
    cause: str
    weight: Weight
    about: tuple[str, ...]  # one of these stands in every line that can match; none: any line can
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
    """The signs by who may say them."""
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
    """The weightiest sign in a text among what these authors may say."""
    sign = _sign_of(by, _NUMBERS.sub("0", text))
    if sign is not None and (match := sign.search(text)):
        return sign, match
    return None


@functools.lru_cache(maxsize=65536)  # of a thousand ranks, all say the same, but for numbers
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
    """Every cause that a text names for certain: where there are two, none is."""
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
