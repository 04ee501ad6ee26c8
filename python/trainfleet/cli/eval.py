"""make eval: loss, perplexity and accuracy of the newest checkpoint on the validation split; or
TASKS, with lm-eval.
"""

from __future__ import annotations

from ..launch.command import run_trained
from ..launch.lm_eval import evaluate
from ..launch.run_location import forwarded
from ..process.processes import run_module
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    if "TASKS" in variables:
        return evaluate(variables, variables["TASKS"])
    if (code := forwarded("eval", variables)) is not None:
        return code
    return run_module("trainfleet.engine.evaluate", str(run_trained(variables).folder))
