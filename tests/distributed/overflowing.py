"""As ranks.py, with gradients that overflow: `python overflowing.py N PORT RUN_FOLDER ...`.

OVERFLOWS names the steps, with commas between, in which the last rank's gradients are infinite after the ranks have reduced them:
nobody else can tell but by being told. LOSS_SCALE is the first loss scale.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import ranks
import torch
from torch import Tensor

import trainfleet.engine.__main__  # noqa: F401  imported once, before the forks
from trainfleet.engine import step_guard
from trainfleet.engine.parallel.gradients import local
from trainfleet.engine.parallel.rank_model import TorchParts
from trainfleet.engine.trainer import Trainer


def plant(steps: set[int]) -> None:
    """Has the last rank's gradients be infinite in those steps."""
    advance, update, now = Trainer.advance, TorchParts.update, 0

    def told(self: Trainer, step: int) -> None:
        nonlocal now
        now = step
        advance(self, step)

    def overflown(self: TorchParts, rate: float, skips: Callable[[Tensor], Tensor]) -> None:
        if now in steps and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            held = [
                parameter for parameter in self.model.parameters() if parameter.grad is not None
            ]
            local(held[-1]).fill_(
                torch.inf
            )  # no first one: a last stage's copy of tied weights has the first stage's gradient
        update(self, rate, skips)

    Trainer.advance, TorchParts.update = told, overflown  # type: ignore[method-assign]


if __name__ == "__main__":
    plant({int(step) for step in os.environ["OVERFLOWS"].split(",")})
    step_guard.START = float(os.environ.get("LOSS_SCALE", step_guard.START))
    ranks.run_all(sys.argv[1:])
