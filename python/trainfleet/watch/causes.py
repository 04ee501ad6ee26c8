"""Why jobs die: the causes that a verdict can name, what each decides, and the one command that
helps (causes.yaml).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path

from ..config.tables import read_table

FILE = Path(__file__).with_name("causes.yaml")


class Weight(IntEnum):
    """What a line is worth: its writer lost a peer; it may mean this; it says so; a machine, not a
    program, says so.
    """

    VICTIM = 0
    HINT = 1
    WORD = 2
    PROOF = 3


class Then(Enum):
    """What follows from a cause: another attempt, one without the node that is to blame, or none as
    it would fail alike.
    """

    HERE = "retry here"
    ELSEWHERE = "retry elsewhere"
    STOP = "stop"


@dataclass(frozen=True)
class Cause:
    """A class of failures: in words, what to type, and what follows.

    `of_a_node`: it goes with one node, which another can replace. Where several nodes fail alike it
    would fail there too.
    """

    name: str
    words: str
    next: str
    then: Then = Then.STOP
    of_a_node: bool = False

    def then_on(self, nodes: int) -> Then:
        """What follows when so many nodes show it."""
        return Then.STOP if self.of_a_node and nodes > 1 else self.then


CAUSES = {
    name: Cause(
        name, row["words"], row["next"], Then(row.get("then", "stop")), row.get("of_a_node", False)
    )
    for name, row in read_table(FILE).items()
}
