"""make train: tokenizes what is not tokenized yet, trains from the newest checkpoint to train.steps, reports."""

from __future__ import annotations

from ..launch import execution, training
from ..launch.settings import plan_for
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    plan = plan_for(variables)
    execution.warn(plan)
    return training.train(plan, started)
