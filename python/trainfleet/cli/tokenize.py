"""make tokenize: the sources become data/<name>, or nothing is done because it is there."""

from __future__ import annotations

from .. import runs
from ..backends import backend_of
from ..config import dump_resolved
from ..data import summary
from ..data.dataset import find
from ..report import lengths
from ..watch.interrupts import Interrupts
from . import carry
from .settings import plan_for
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    plan = plan_for(variables, ("tokenize",))
    carry.warn(plan)
    run = runs.run_of(plan.config.name)
    if not backend_of(plan.config).shares_disk:
        return carry.hand_over("tokenize", plan, started)
    with carry.in_charge(plan.config, run) as office, Interrupts() as interrupts:
        for request in plan.requests:
            runs.write_atomic(run.config, dump_resolved(plan.config))
            if not carry.tokenize(plan, request, interrupts):
                print("stopped; the units that were done stay: make tokenize goes on from there")
                office.code = carry.STOPPED
                return office.code
        office.code = 0
    dataset = find(plan.config.data)
    assert dataset is not None
    folder = runs.DATA / plan.config.data.name
    lengths.draw(plan.config.data.name, dataset, folder / "lengths.png")
    for name, value in [*summary.table(dataset), ("lengths", str(folder / "lengths.png"))]:
        print(f"{name:>16}  {value}")
    print("next: make train")
    return 0
