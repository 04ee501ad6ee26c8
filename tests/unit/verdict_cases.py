"""The logs of verdict_corpus/ as cases: what a person who knows would say of each, and its lines.

A file holds one case or many. A case begins with its labels (`none`: nothing here has failed, or nobody can tell what) and where
its words are from; its lines are those of node logs behind the name of the node. Files called judging-* were written before the
rules were tuned, and from other sources than the rest; the rules are never tuned to them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainfleet.watch.diagnosis import Finding, diagnose
from trainfleet.watch.lines import Line, parse

FOLDER = Path(__file__).parent / "verdict_corpus"


@dataclass(frozen=True)
class Case:
    """One log with its labels. `judging`: which half."""

    name: str
    labels: dict[str, str]
    lines: tuple[Line, ...]
    judging: bool

    @property
    def cause(self) -> str:
        return self.labels["cause"]

    @property
    def who(self) -> tuple[str, str]:
        return self.labels.get("node", "-"), self.labels.get("rank", "-")


def read_cases() -> list[Case]:
    """Every case, in the order of files and lines."""
    return [case for path in sorted(FOLDER.glob("*.log")) for case in _read(path)]


def _read(path: Path) -> Iterator[Case]:
    for text in re.split(r"\n(?=# case: )", path.read_text()):
        lines = text.splitlines()
        labels = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
        logs: dict[int, list[str]] = {}
        for line in lines:
            if match := re.fullmatch(r"node-(\d+) (.*)", line):
                logs.setdefault(int(match[1]), []).append(match[2])
        said = tuple(line for node, mine in logs.items() for line in parse(mine, node))
        yield Case(labels.get("case", path.stem), labels, said, path.stem.startswith("judging"))


def who(finding: Finding | None) -> tuple[str, str]:
    return ("-", "-") if finding is None else tuple("-" if it is None else str(it) for it in (finding.node, finding.rank))  # type: ignore[return-value]


@dataclass(frozen=True)
class Score:
    """How the verdicts on some cases went. Precision: of the causes named; recall: of the failures."""

    cases: int
    failures: int
    named: int
    right: int
    placed: int  # of the right ones, those with the right node and rank
    sure: int
    wrong_and_sure: tuple[str, ...]
    fooled: tuple[str, ...]  # healthy logs for which a cause was named
    wrong: tuple[str, ...]

    @property
    def precision(self) -> float:
        return self.right / (self.named or 1)

    @property
    def recall(self) -> float:
        return self.right / (self.failures or 1)


def score(cases: Sequence[Case], change: Callable[[Case], Case] = lambda case: case) -> Score:
    """The score of diagnose() on these cases, each changed first."""
    wrong, sure_wrong, fooled = [], [], []
    failures = named = right = placed = sure = 0
    for case in map(change, cases):
        finding = diagnose(case.lines)
        said = finding.cause if finding else "none"
        failures += case.cause != "none"
        named += said != "none"
        sure += finding is not None and finding.sure
        if said == case.cause:
            right += said != "none"
            placed += said != "none" and who(finding) == case.who
            if said != "none" and who(finding) != case.who:
                wrong.append(f"{case.name}: {said}, but of {who(finding)} and not {case.who}")
            continue
        wrong.append(f"{case.name}: said {said}, is {case.cause}")
        if finding and finding.sure:
            sure_wrong.append(case.name)
        if case.cause == "none":
            fooled.append(case.name)
    return Score(len(cases), failures, named, right, placed, sure, tuple(sure_wrong), tuple(fooled), tuple(wrong))


def without_kernel(case: Case) -> Case:
    """Where the kernel's log may not be read."""
    return replace(case, lines=tuple(line for line in case.lines if line.who != "kernel"))


def without_ranks(case: Case) -> Case:
    """Where a launcher does not tell whose a line is."""
    return replace(
        case, lines=tuple(replace(line, rank=None, who="agent") if line.who == "rank" else line for line in case.lines)
    )


def with_skew(case: Case) -> Case:
    """Where every other node's clock is 20 s behind."""
    return replace(case, lines=tuple(replace(line, time=line.time - 20 * ((line.node or 0) % 2)) for line in case.lines))


def without_stamps(case: Case) -> Case:
    """As a stranger's log is: a node's lines in their order, without who wrote them and when."""
    logs: dict[int, list[str]] = {}
    for line in case.lines:
        logs.setdefault(line.node or 0, []).append(line.text)
    return replace(case, lines=tuple(line for node, texts in logs.items() for line in parse(texts, node)))
