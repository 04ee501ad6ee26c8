"""make tokenize: turns the sources into data/<name>; does nothing if it exists."""

from __future__ import annotations

from ..launch import execution, tokenizing
from ..launch.command import config_of, plan_for, settings_of
from ..launch.launching import launching
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    with launching(config_of(settings_of(variables))[0], "tokenize"):
        plan = plan_for(variables, ("tokenize",))
        execution.warn(plan)
        return tokenizing.tokenize(plan, started)
