"""make eval: loss, perplexity and accuracy of the newest checkpoint on the validation split; or TASKS, by lm-eval."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

from ..errors import ConfigError, Problem
from ..launch.settings import run_named, run_started
from ..launch.whereabouts import carried_out, export
from ..processes import run_module
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    if "TASKS" in variables:
        return judge(variables, variables["TASKS"])
    if (code := carried_out("eval", variables)) is not None:
        return code
    return run_module("trainfleet.engine.evaluate", str(run_started(variables).folder))


def judge(variables: Variables, tasks: str) -> int:
    """Has EleutherAI's lm-evaluation-harness judge the exported model; what it finds stays in the run folder.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        message = "needs lm-eval, which is not installed"
        raise ConfigError([Problem(0, "TASKS", "", message)], next="scripts/venv.sh apply requirements-extras.lock")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        if code := export({**variables, "OUT": str(model)}):
            return code
        found = run_named(variables).folder / "evaluation"
        words = ["--model", "hf", "--model_args", f"pretrained={model}", "--tasks", tasks, "--output_path", str(found)]
        return run_module("lm_eval", *words)
