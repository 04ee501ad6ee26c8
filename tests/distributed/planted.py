"""As ranks.py, with faults planted: `python planted.py FAULTS N PORT RUN_FOLDER`, FAULTS being `rank:step`s with commas between.

In such a step, that rank's gradients are not finite, after the ranks have reduced them: nobody else can tell but by being told.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import ranks
import torch
from torch import Tensor

from trainfleet.engine.batches import MicroBatch
from trainfleet.engine.parallel import Replicas
from trainfleet.engine.timing import Stopwatch


def plant(faults: set[str]) -> None:
    """Has a rank's gradients be NaN in the steps that are named."""
    train, step = Replicas.train, 0

    def poisoned(
        self: Replicas, batches: Iterator[tuple[int, MicroBatch]], watch: Stopwatch
    ) -> Tensor:
        nonlocal step
        step += 1
        loss = train(self, batches, watch)
        if f"{os.environ['RANK']}:{step}" in faults:
            for parameter in self.model.parameters():
                parameter.grad = torch.full_like(parameter, torch.nan)
        return loss

    Replicas.train = poisoned  # type: ignore[method-assign]


if __name__ == "__main__":
    plant(set(sys.argv[1].split(",")))
    ranks.run_all(sys.argv[2:])
