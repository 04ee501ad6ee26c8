"""make scaling: the same job at several numbers of nodes, each a short run of its own; a table, with efficiency, and a plot."""

from __future__ import annotations

import time
from dataclasses import replace

from .. import hardware, runs
from ..config import Config, Derived, load
from ..plan.measurement import WARM_UP, counts_of, measured, measures_of, steady
from ..plan.plan import degrees
from ..report import scaling
from .settings import plan_of, settings_of
from .train import carry_out
from .variables import Variables, flag, number

STEPS = 20


def main(variables: Variables, started: float) -> int:
    weak, steps = flag(variables, "WEAK"), number(variables, "STEPS", STEPS, least=1)
    sizes = sized(variables, weak)
    base = f"{sizes[0][0].name}-scaling-{time.strftime('%m%d-%H%M%S')}"
    done = []
    for config, derived in sizes:
        short = measured(config, f"{base}-{config.fleet.nodes}", WARM_UP + steps)
        print(f"{config.fleet.nodes} nodes: {degrees(config)}, {config.train.global_batch} sequences a step", flush=True)
        if code := carry_out(plan_of(short, derived), started, summarize=False):
            return code
        run = runs.run_of(short.name)
        done.append((config, degrees(config), run.read_results() | scaling.speed_of(steady(list(run.read_metrics())))))
    run = runs.run_of(base)
    found = measures_of(done)
    scaling.write(run, found, weak)
    print("\n".join(["", *scaling.describe(found, weak), *_remark(sizes[-1][0]), "", f"table  {run.folder}/scaling.md"]))
    fastest = max(found, key=lambda measure: measure.tokens_per_second)
    print(f"plot   {run.plots}/scaling.png\nnext   make train NODES={fastest.nodes}  the fastest of these")
    return 0


def sized(variables: Variables, weak: bool) -> list[tuple[Config, list[Derived]]]:
    """The config at each number of nodes, with all that follows from that number derived again, and checked before anything runs.

    Strong scaling keeps the global batch; weak scaling keeps the smallest size's batch a rank.
    """
    whole = {name: value for name, value in variables.items() if name != "NODES"}
    settings = settings_of(whole)
    counts = counts_of(variables.get("NODES", ""), load(settings)[0].fleet.nodes)
    first = load(settings)[0].train.global_batch
    sizes = []
    for count in counts:
        short = {"NODES": ("fleet.nodes", str(count)), "": ("fleet.nodes_min", "null")}  # a size of its own, or none
        if weak:
            short["WEAK"] = ("train.global_batch", str(first * count // counts[0]))
        sizes.append(load(replace(settings, short=short)))
    return sizes


def _remark(config: Config) -> list[str]:
    """What nodes that this machine plays can show: they share it, and a single one has all of it."""
    if config.fleet.backend != "local" or hardware.local_accelerators():
        return []
    cores = hardware.local_cores()
    return ["", f"note: all sizes share this machine's {cores} cores: this is what dividing costs, not what more machines bring"]
