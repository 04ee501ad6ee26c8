"""make tokenize: the sources become data/<name>, or nothing is done because it is there."""

from __future__ import annotations

from ..launch import execution, tokenizing
from ..launch.settings import plan_for
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    plan = plan_for(variables, ("tokenize",))
    execution.warn(plan)
    return tokenizing.tokenize(plan, started)
