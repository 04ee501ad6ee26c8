"""make profile: trains a few steps in a separate run, with torch's profiler on some, and prints
where the time went.
"""

from __future__ import annotations

import time

from ..backends import shared
from ..launch.command import config_of, plan_of, settings_of
from ..launch.training import train
from ..plan.measurement import PROFILED, TIMED, measured
from ..report.profile_table import describe
from ..run import run_folder
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    config, derived = config_of(settings_of(variables))
    steps = config.train.profile_steps or PROFILED
    name = f"{config.name}-profile-{time.strftime('%m%d-%H%M%S')}"
    last = int(steps.partition("-")[2])
    code = train(
        plan_of(measured(shared(config), name, last + TIMED, steps), derived, launch=name),
        started,
        summarize=False,
    )
    if code == 0:
        print("\n".join(["", *describe(run_folder.run_of(name))]))
    return code
