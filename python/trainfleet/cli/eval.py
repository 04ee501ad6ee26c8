"""make eval: loss, perplexity and accuracy of the newest checkpoint on the validation split; or TASKS, by lm-eval."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

from ..door import show
from ..errors import ConfigError, Problem
from ..launch.settings import run_named, run_started
from ..launch.whereabouts import carried_out, export
from ..origin import installing
from ..processes import run_module
from ..spelling import distance
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
        raise ConfigError([Problem(0, "TASKS", "", message)], next=installing("eval"))
    _require_known(tasks)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        if code := export({**variables, "OUT": str(model)}):
            return code
        found = run_named(variables).folder / "evaluation"
        words = ["--model", "hf", "--model_args", f"pretrained={model}", "--tasks", tasks, "--output_path", str(found)]
        return run_module("lm_eval", *words)


def _require_known(tasks: str) -> None:
    """Raises ConfigError for a task that lm-eval does not have, with the nearest that it has.

    Asked in a process of its own: lm-eval loads torch.
    """
    command = [sys.executable, "-c", "from lm_eval.tasks import TaskManager; print(*TaskManager().all_tasks, sep='\\n')"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    known = found.stdout.split()
    named = [task.strip() for task in tasks.split(",")]
    unknown = [task for task in named if known and task not in known and not any(sign in task for sign in "*?/")]
    if found.returncode == 0 and unknown:
        problems = [
            Problem(0, "TASKS", "", f"lm-eval has no task {show(task)}; nearest: {_near(task, known)}") for task in unknown
        ]
        raise ConfigError(problems, next=f"{sys.executable} -m lm_eval ls tasks lists them")


def _near(task: str, known: list[str]) -> str:
    return ", ".join(sorted(known, key=lambda name: distance(task.lower(), name.lower()))[:3])
