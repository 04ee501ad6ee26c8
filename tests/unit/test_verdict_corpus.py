"""The verdict against real-shaped logs: cause, rank and node, with precision and recall printed and a floor under them.

Each file of verdict_corpus/ begins with what a person who knows would say (`none`: nothing here has failed), and where its words
are from; its lines are those of node logs behind the name of the node.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainfleet.watch.causes import CAUSES
from trainfleet.watch.diagnosis import Finding, Line, diagnose, parse

CORPUS = sorted((Path(__file__).parent / "verdict_corpus").glob("*.log"))
FLOOR = 0.95


@dataclass(frozen=True)
class Case:
    name: str
    labels: dict[str, str]
    lines: list[Line]

    @classmethod
    def read(cls, path: Path) -> Case:
        text = path.read_text().splitlines()
        labels = dict(line[2:].split(": ", 1) for line in text if line.startswith("# "))
        lines: list[Line] = []
        for line in text:
            if match := re.fullmatch(r"node-(\d+) (.*)", line):
                lines += parse([match[2]], int(match[1]))
        return cls(path.stem, labels, lines)

    @property
    def who(self) -> tuple[str, str]:
        return self.labels.get("node", "-"), self.labels.get("rank", "-")


CASES = [Case.read(path) for path in CORPUS]


def who(finding: Finding) -> tuple[str, str]:
    return tuple("-" if number is None else str(number) for number in (finding.node, finding.rank))  # type: ignore[return-value]


def test_the_corpus_is_large_and_labelled() -> None:
    assert len(CASES) >= 60
    for case in CASES:
        assert case.labels["cause"] in (*CAUSES, "none"), case.name
        assert case.labels["from"], case.name
        assert case.lines, case.name
    labels = Counter(case.labels["cause"] for case in CASES)
    assert set(CAUSES) - {"unknown"} <= set(labels), "every cause has a log"
    assert labels["none"] >= 5


def test_precision_and_recall(tell: Callable[[str], None]) -> None:
    right: Counter[str] = Counter()
    named: Counter[str] = Counter()
    true: Counter[str] = Counter()
    wrong = []
    for case in CASES:
        finding = diagnose(case.lines)
        said, label = finding.cause if finding else "none", case.labels["cause"]
        named[said] += 1
        true[label] += 1
        right[label] += said == label
        if said != label:
            wrong.append(f"{case.name}: said {said}, is {label}")
    tell(f"\n{'cause':14} {'logs':>4} {'precision':>9} {'recall':>7}")
    for cause in sorted(true):
        tell(f"{cause:14} {true[cause]:4} {right[cause] / (named[cause] or 1):9.2f} {right[cause] / true[cause]:7.2f}")
    faults = {cause for cause in true if cause != "none"}
    precision = sum(right[cause] for cause in faults) / sum(named[cause] for cause in named if cause != "none")
    recall = sum(right[cause] for cause in faults) / sum(true[cause] for cause in faults)
    tell(f"{'all':14} {len(CASES):4} {precision:9.2f} {recall:7.2f}")
    assert precision >= FLOOR and recall >= FLOOR, wrong


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_first_rank_and_its_node_are_named(case: Case) -> None:
    finding = diagnose(case.lines)
    assert (who(finding) if finding else ("-", "-")) == case.who, finding


def test_words_shuffled_between_nodes_do_not_change_the_verdict() -> None:
    """Which file is read first, and what order lines of different nodes have, must not matter."""
    for case in CASES:
        by_node = sorted(case.lines, key=lambda line: -(line.node or 0))
        one, other = diagnose(case.lines), diagnose(by_node)
        assert (one and (one.cause, who(one))) == (other and (other.cause, who(other))), case.name
