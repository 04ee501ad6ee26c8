"""make sample: the newest checkpoint continues PROMPT, token by token."""

from __future__ import annotations

from ..launch.settings import run_started
from ..launch.whereabouts import carried_out
from ..processes import run_module
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    if (code := carried_out("sample", variables)) is not None:
        return code
    run = run_started(variables)
    # After `--` all is data: a prompt may begin with a dash.
    return run_module("trainfleet.engine.generate", "--", str(run.folder), variables.get("PROMPT", "def "))
