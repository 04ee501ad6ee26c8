"""make inspect: a sample of the training order as text; VERIFY=1 checks every file of the dataset
first.
"""

from __future__ import annotations

from tempfile import NamedTemporaryFile

from ..config import dump_resolved
from ..launch.command import config_of, settings_of
from ..launch.run_location import forwarded
from ..process.processes import run_module
from .variables import Variables, flag, number


def main(variables: Variables, started: float) -> int:
    sample = number(variables, "SAMPLE", 0)
    config, _ = config_of(settings_of(variables))
    if (code := forwarded("inspect", variables, config)) is not None:
        return code
    with NamedTemporaryFile(
        "w", encoding="utf-8", suffix=".yaml"
    ) as file:  # outside the run's folder, which inspecting does not change
        file.write(dump_resolved(config))
        file.flush()
        return run_module(
            "trainfleet.data.inspect",
            file.name,
            str(sample),
            VERIFY="1" if flag(variables, "VERIFY") else "0",
        )
