"""make eval: loss, perplexity and accuracy of the newest checkpoint on the validation split; or TASKS, by lm-eval."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

from ..errors import ConfigError, Problem
from ..launch.settings import run_started
from ..processes import run_module
from ..runs import Run
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    run = run_started(variables)
    if "TASKS" in variables:
        return judge(run, variables["TASKS"])
    return run_module("trainfleet.engine.evaluate", str(run.folder))


def judge(run: Run, tasks: str) -> int:
    """Has EleutherAI's lm-evaluation-harness judge the exported model; what it finds stays in the run folder.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        message = "needs lm-eval, which is not installed"
        raise ConfigError([Problem(0, "TASKS", "", message)], next="scripts/venv.sh apply requirements-extras.lock")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        if code := run_module("trainfleet.engine.export", str(run.folder), str(model)):
            return code
        found = run.folder / "evaluation"
        words = ["--model", "hf", "--model_args", f"pretrained={model}", "--tasks", tasks, "--output_path", str(found)]
        return run_module("lm_eval", *words)
