"""Defines why jobs die: the causes that a verdict can name, what each decides, and the one command
that helps (causes.yaml).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path

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
