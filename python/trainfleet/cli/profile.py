"""make profile: trains a few steps in a run of their own, with torch's profiler on some, and says where the time went."""

from __future__ import annotations

import time

from .. import runs
from ..config import load
from ..plan.measurement import PROFILED, measured
from ..report.profile import describe
from .settings import plan_of, settings_of
from .train import carry_out
from .variables import Variables


def main(variables: Variables, started: float) -> int:
    config, derived = load(settings_of(variables))
    steps = config.train.profile_steps or PROFILED
    name = f"{config.name}-profile-{time.strftime('%m%d-%H%M%S')}"
    last = int(steps.partition("-")[2])
    code = carry_out(plan_of(measured(config, name, last, steps), derived), started, summarize=False)
    if code == 0:
        print("\n".join(["", *describe(runs.run_of(name))]))
    return code
