"""make tokenize: the sources become data/<name>, or nothing is done because it is there."""

from __future__ import annotations

from .. import runs
from ..config import dump_resolved
from ..data.dataset import find
from ..watch.interrupts import Interrupts
from . import carry
from .settings import plan_for
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    plan = plan_for(variables, ("tokenize",))
    run = runs.run_of(plan.config.name)
    with Interrupts() as interrupts:
        for request in plan.requests:
            runs.write_atomic(run.config, dump_resolved(plan.config))
            if not carry.tokenize(plan, request, interrupts):
                print("stopped; the units that were done stay: make tokenize goes on from there")
                return carry.STOPPED
    dataset = find(plan.config.data)
    assert dataset is not None
    print(f"{runs.DATA / plan.config.data.name}: {dataset.tokens:,} tokens of {dataset.documents:,} documents")
    print("next: make train")
    return 0
