"""make sample: the newest checkpoint continues PROMPT, token by token."""

from __future__ import annotations

from ..launch.command import run_trained
from ..launch.run_location import forwarded
from ..process.processes import run_module
from ..report.history import opening
from .variables import Variables, amount, number

LONGEST = 10**6  # tokens of a sample


def main(variables: Variables, started: float) -> int:
    if (code := forwarded("sample", variables)) is not None:
        return code
    length, temperature = (
        number(variables, "LENGTH", 200, 1, LONGEST),
        amount(variables, "TEMPERATURE", least=0),
    )
    top_p = amount(variables, "TOP_P", most=1)
    words = {
        "--tokens": length,
        "--temperature": temperature,
        "--top-p": top_p,
        "--seed": seed(variables),
    }
    options = [
        str(word) for name, value in words.items() if value is not None for word in (name, value)
    ]
    run = run_trained(variables)
    prompt = variables["PROMPT"] if "PROMPT" in variables else opening(run.read_results())
    # After `--` all is data: a prompt may begin with a dash.
    return run_module("trainfleet.engine.generate", *options, "--", str(run.folder), prompt)


def seed(variables: Variables) -> int | None:
    return number(variables, "SEED", 0) if "SEED" in variables else None
