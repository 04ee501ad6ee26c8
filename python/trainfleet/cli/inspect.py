"""make inspect: a sample of the training order as text; VERIFY=1 checks every file of the dataset first."""

from __future__ import annotations

from tempfile import NamedTemporaryFile

from ..config import dump_resolved, load
from ..errors import ConfigError, Problem
from ..processes import run_module
from .settings import settings_of
from .variables import Variables, flag


def main(variables: Variables, started: float) -> int:
    sample = variables.get("SAMPLE", "0")
    if not sample.isdigit():
        raise ConfigError([Problem(0, "SAMPLE", "", f"must be a whole number from 0, not {sample!r}")])
    config, _ = load(settings_of(variables))
    with NamedTemporaryFile("w", encoding="utf-8", suffix=".yaml") as file:  # a look leaves nothing in the run's folder
        file.write(dump_resolved(config))
        file.flush()
        return run_module("trainfleet.data.inspect", file.name, sample, VERIFY="1" if flag(variables, "VERIFY") else "0")
