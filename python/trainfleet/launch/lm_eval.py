"""Runs EleutherAI's lm-evaluation-harness on the exported model (make eval TASKS=...)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..process.install_paths import installing
from ..process.processes import run_module
from ..trust.errors import ConfigError, Problem
from ..trust.spelling import distance
from ..trust.untrusted_input import show
from .command import run_named
from .run_location import export

NAMES = "from lm_eval.tasks import TaskManager; print(*TaskManager().all_tasks, sep='\\n')"
PATTERN = "*?/"  # characters that indicate a task pattern or the path of a user's task file


def evaluate(variables: Mapping[str, str], tasks: str) -> int:
    """Runs lm-eval on the newest checkpoint and keeps the results in the run folder. Returns the
    exit code.

    Raises:
        ConfigError: lm-eval is not installed or does not support one of the tasks.
    """
    if importlib.util.find_spec("lm_eval") is None:
        message = "needs lm-eval, which is not installed"
        raise ConfigError.of("TASKS", message, next=installing("eval"))
    # Uses a separate process because lm_eval imports torch.
    known = subprocess.run(
        [sys.executable, "-c", NAMES], capture_output=True, text=True, check=False
    )
    require_known(tasks, known.stdout.split())
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        if code := export({**variables, "OUT": str(model)}):
            return code
        found = run_named(variables).folder / "evaluation"
        words = [
            "--model",
            "hf",
            "--model_args",
            f"pretrained={model}",
            "--tasks",
            tasks,
            "--output_path",
            str(found),
        ]
        return run_module("lm_eval", *words)


def require_known(tasks: str, known: list[str]) -> None:
    """Raises a ConfigError listing unknown tasks with the closest known names. Accepts any task if
    `known` is empty.
    """
    named = [task.strip() for task in tasks.split(",")]
    unknown = [
        task
        for task in named
        if known and task not in known and not any(sign in task for sign in PATTERN)
    ]
    if unknown:
        said = [
            f"lm-eval has no task {show(task)}; nearest: {_near(task, known)}" for task in unknown
        ]
        problems = [Problem(0, "TASKS", "", message) for message in said]
        raise ConfigError(problems, next=f"run {sys.executable} -m lm_eval ls tasks to list them")


def _near(task: str, known: list[str]) -> str:
    return ", ".join(sorted(known, key=lambda name: distance(task.lower(), name.lower()))[:3])
