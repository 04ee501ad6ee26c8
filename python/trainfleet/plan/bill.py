"""What a run costs from set-up to teardown: its machines by the hour, and the hours in which nobody
trains. Pure.

One Bill is what a plan shows, what budget.max_usd is judged against, and what is counted while the
run goes on (watch/budget.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PAID = "TRAINFLEET_PAID"  # Bill.paid, for a launcher that can't ask what it is


@dataclass(frozen=True)
class BillStage:
    """A time before or after training for which machines are paid.

    why     where its minutes come from; "assumed" where nobody has measured them
    nodes   whether nodes are paid for too, or only what there is beside them
    counted whether the run's events cover it, so that it is counted as it passes
    """

    name: str
    minutes: float
    why: str = "assumed"
    nodes: bool = True
    counted: bool = False


@dataclass(frozen=True)
class Bill:
    """US dollars for an hour of a node with its volume, and for an hour of all that is paid for
    beside the nodes.

    before, after   the stages of set-up, and those until the nodes are gone
    lingers         hours for which nodes are paid after a launch has ended
    paid, paid_for  US dollars for each node that are paid once and ahead, however long it is used,
                    and what for
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
        """US dollars for an hour of everything, with so many nodes."""
        return self.node * nodes + self.rest

    def of(self, stages: Iterable[BillStage], nodes: int) -> float:
        """US dollars for these stages."""
        return sum(stage.minutes / 60 * self.hour(nodes if stage.nodes else 0) for stage in stages)

    def setup(self, nodes: int) -> float:
        """US dollars for all set-up, and for what is paid ahead."""
        return self.paid * nodes + self.of(self.before, nodes)

    def uncounted(self, nodes: int) -> float:
        """US dollars for what is paid ahead, and for the part of set-up that no event of the run
        covers.
        """
        return self.paid * nodes + self.of(
            (stage for stage in self.before if not stage.counted), nodes
        )

    def idle(self, nodes: int) -> float:
        """US dollars from the end of training until the nodes are gone."""
        return self.of(self.after, nodes)

    def whole(self, nodes: int, hours: float) -> float:
        """US dollars from set-up to teardown, with so many hours of training."""
        return self.setup(nodes) + hours * self.hour(nodes) + self.idle(nodes)
