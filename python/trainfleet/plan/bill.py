"""The cost of a run from set-up to teardown: its machines by the hour, including the hours before
and after training. Pure.

A plan shows one Bill, budget.max_usd is checked against it, and watch/budget.py uses it to count
the cost of a running job.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PAID = "TRAINFLEET_PAID"  # Bill.paid, for a launcher that can't ask for the price


@dataclass(frozen=True)
class BillStage:
    """A time before or after training for which machines are paid.

    why     the source of its minutes; "assumed" if they are not measured
    nodes   whether nodes are paid for too, or only the other resources
    counted whether the run's events cover it, so that its cost is counted as it passes
    """

    name: str
    minutes: float
    why: str = "assumed"
    nodes: bool = True
    counted: bool = False


@dataclass(frozen=True)
class Bill:
    """US dollars per hour of a node with its volume, and per hour of all other paid resources.

    before, after   the stages of set-up, and those until the nodes are gone
    lingers         hours for which nodes are paid after a launch has ended
    paid, paid_for  US dollars per node that are paid once, in advance, however long it is used,
                    and their purpose
    """

    node: float
    rest: float = 0.0
    before: tuple[BillStage, ...] = ()
    after: tuple[BillStage, ...] = ()
    lingers: float = 0.0
    paid: float = 0.0
    paid_for: str = ""

    @property
    def is_free(self) -> bool:
        return self.node == 0 and self.rest == 0 and self.paid == 0

    def hour(self, nodes: int) -> float:
        """Returns the US dollars per hour of everything, with this number of nodes."""
        return self.node * nodes + self.rest

    def of(self, stages: Iterable[BillStage], nodes: int) -> float:
        """Returns the US dollars for these stages."""
        return sum(stage.minutes / 60 * self.hour(nodes if stage.nodes else 0) for stage in stages)

    def setup(self, nodes: int) -> float:
        """Returns the US dollars for all set-up, and for advance payments."""
        return self.paid * nodes + self.of(self.before, nodes)

    def uncounted(self, nodes: int) -> float:
        """Returns the US dollars for advance payments, and for the part of set-up that no event of
        the run covers.
        """
        return self.paid * nodes + self.of(
            (stage for stage in self.before if not stage.counted), nodes
        )

    def idle(self, nodes: int) -> float:
        """Returns the US dollars from the end of training until the nodes are gone."""
        return self.of(self.after, nodes)

    def whole(self, nodes: int, hours: float) -> float:
        """Returns the US dollars from set-up to teardown, with `hours` hours of training."""
        return self.setup(nodes) + hours * self.hour(nodes) + self.idle(nodes)
