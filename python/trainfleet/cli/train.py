"""make train: compiles and tokenizes what is missing, trains from the newest checkpoint to
train.steps, reports.
"""

from __future__ import annotations

from ..launch import compiling, execution, training
from ..launch.command import config_of, plan_for, settings_of
from ..launch.launching import launching
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    config, derived = config_of(settings_of(variables))
    with launching(config, "train"):
        if compiling.is_due(config) and (code := compiling.compile_first(config, derived, started)):
            return code
        plan = plan_for(variables)
        execution.warn(plan)
        return training.train(plan, started)
