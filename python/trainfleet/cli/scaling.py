"""make scaling: the same job at several numbers of nodes, each in a short, separate run; a table
with efficiency, and a plot.
"""

from __future__ import annotations

import time

from ..backends import shared
from ..config import Config
from ..hardware import node_types
from ..launch.command import plan_of, sized
from ..launch.provisioning import shares_one_machine
from ..launch.training import train
from ..plan.measurement import WARM_UP, measured, measures_of, steady
from ..plan.plan import degrees
from ..report import scaling_table
from ..run import run_folder
from .variables import Variables, flag, number

STEPS = 20


def main(variables: Variables, started: float) -> int:
    weak, steps = flag(variables, "WEAK"), number(variables, "STEPS", STEPS, least=1)
    sizes = sized(variables, weak)
    base = f"{sizes[0][0].name}-scaling-{time.strftime('%m%d-%H%M%S')}"
    done = []
    for config, derived in sizes:
        short = measured(shared(config), f"{base}-{config.fleet.nodes}", WARM_UP + steps)
        nodes = f"{config.fleet.nodes} node{'s' * (config.fleet.nodes > 1)}"
        print(
            f"{nodes}: {degrees(config)}, {config.train.global_batch_size} sequences per step",
            flush=True,
        )
        if code := train(plan_of(short, derived, launch=short.name), started, summarize=False):
            return code
        run = run_folder.run_of(short.name)
        done.append(
            (
                config,
                degrees(config),
                run.read_results() | scaling_table.speed_of(steady(list(run.read_metrics()))),
            )
        )
    run = run_folder.run_of(base)
    found = measures_of(done)
    scaling_table.write(run, found, weak)
    print(
        "\n".join(
            [
                "",
                *scaling_table.describe(found, weak),
                *_remark(sizes[-1][0]),
                "",
                f"table  {run.folder}/scaling.md",
            ]
        )
    )
    fastest = max(found, key=lambda measure: measure.tokens_per_second)
    print(
        f"plot   {run.plots}/scaling.png\nnext   make train NODES={fastest.nodes}  the fastest "
        "of these"
    )
    return 0


def _remark(config: Config) -> list[str]:
    """Warns that nodes simulated on this machine share its cores."""
    if not shares_one_machine(config) or node_types.local_accelerators():
        return []
    cores = node_types.local_cores()
    return [
        "",
        f"note: all sizes share this machine's {cores} cores, so this shows the cost of "
        "splitting, not the gain of more machines",
    ]
