"""Verbs for jobs: tokenizing, compiling, training, and short runs that profile training or inject
faults into it.
"""

from __future__ import annotations

import json
import sys
import time
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

from ..launch.command import config_of, plan_for, plan_of, settings_of, sized
from ..process.processes import ask_module, run_module
from ..run.run_folder import Run, run_of
from ..trust.errors import ConfigError
from ..trust.safe_output import show_at_once
from .variables import Variables, flag, number

if TYPE_CHECKING:
    from ..config import Config
    from ..plan.measurement import Measure
    from ..report import rehearsal_table


def tokenize(variables: Variables, started: float) -> int:
    """Tokenizes the sources into the dataset data/<name>. Does nothing if the dataset is
    complete.
    """
    from ..launch import execution, training
    from ..launch.launching import launching

    with launching(config_of(settings_of(variables))[0], "tokenize"):
        plan = plan_for(variables, ("tokenize",))
        execution.warn(plan)
        return training.tokenize(plan, started)


def compile(variables: Variables, started: float) -> int:
    """Compiles the training programs on the fleet, into the cache that all nodes share."""
    from ..launch import compiling

    config, derived = config_of(settings_of(variables))
    compiling.require(config)
    return compiling.compile_ahead(config, derived, started)


def train(variables: Variables, started: float) -> int:
    """Compiles and tokenizes if needed, trains from the latest checkpoint to train.steps, and
    writes the report.
    """
    from ..launch import compiling, execution, training
    from ..launch.launching import launching

    config, derived = config_of(settings_of(variables))
    with launching(config, "train"):
        if compiling.is_due(config) and (code := compiling.compile_first(config, derived, started)):
            return code
        plan = plan_for(variables)
        execution.warn(plan)
        return training.train(plan, started)


def profile(variables: Variables, started: float) -> int:
    """Trains a few steps in a separate run, some of them under torch's profiler, and prints a time
    breakdown.
    """
    from ..backends import shared
    from ..launch.training import train
    from ..plan.measurement import PROFILED, TIMED, measured
    from ..report.measurements import describe_profile

    config, derived = config_of(settings_of(variables))
    steps = config.train.profile_steps or PROFILED
    name = f"{config.name}-profile-{time.strftime('%m%d-%H%M%S')}"
    last = int(steps.partition("-")[2])
    short = measured(shared(config), name, last + TIMED, steps)
    code = train(plan_of(short, derived, launch=name), started, summarize=False)
    if code == 0:
        print("\n".join(["", *describe_profile(run_of(name))]))
    return code


def scaling(variables: Variables, started: float) -> int:
    """Runs the same job on different node counts, each in a short, separate run. Writes a table and
    a plot of the scaling efficiency.
    """
    from ..backends import shared
    from ..launch.training import train
    from ..plan.measurement import WARM_UP, measured, measures_of
    from ..plan.plan import degrees
    from ..report.measurements import results_of

    weak, steps = flag(variables, "WEAK"), number(variables, "STEPS", 20, least=1)
    sizes = sized(variables, weak)
    base = f"{sizes[0][0].name}-scaling-{time.strftime('%m%d-%H%M%S')}"
    done = []
    for config, derived in sizes:
        short = measured(shared(config), f"{base}-{config.fleet.nodes}", WARM_UP + steps)
        layout, nodes, batch = degrees(config), config.fleet.nodes, config.train.global_batch_size
        print(f"{nodes} node{'s' * (nodes > 1)}: {layout}, {batch} sequences per step")
        if code := train(plan_of(short, derived, launch=short.name), started, summarize=False):
            return code
        done.append((config, layout, results_of(run_of(short.name))))
    _tell(run_of(base), measures_of(done), weak, _remark(sizes[-1][0]))
    return 0


def sweep(variables: Variables, started: float) -> int:
    """Trains a run for each combination of values in GRID, and compares the runs. With STOP=half,
    only the better half of the runs continues, for twice the steps, until one run is left.
    """
    from ..launch import job_image, sweep

    if variables.get("STOP", "half") != "half":
        message = f"must be half, not {variables['STOP']!r}"
        raise ConfigError.of("STOP", message, next="set STOP=half, or omit it")
    samples = number(variables, "SAMPLES", 0)
    points = sweep.points_of(settings_of(variables), variables.get("GRID", ""), samples)
    print(f"{len(points)} points: {sweep.require_affordable(points)}")
    job_image.make_ready(points[0].config)
    return sweep.run(points, started, "STOP" in variables)


def _tell(run: Run, found: list[Measure], weak: bool, remark: list[str]) -> None:
    """Writes and prints the results of a scaling run, including the fastest node count."""
    from ..report import measurements

    measurements.write(run, found, weak)
    print("\n".join(["", *measurements.describe_scaling(found, weak), *remark, ""]))
    fastest = max(found, key=lambda measure: measure.tokens_per_second)
    print(
        f"table  {run.folder}/scaling.md\nplot   {run.plots}/scaling.png\n"
        f"next   make train NODES={fastest.nodes}  the fastest size"
    )


def _remark(config: Config) -> list[str]:
    """Returns a note if the simulated nodes share this machine's cores."""
    from ..hardware import node_types
    from ..launch.provisioning import shares_one_machine

    if not shares_one_machine(config) or node_types.local_accelerators():
        return []
    cores = node_types.local_cores()
    return [
        "",
        f"note: all sizes share this machine's {cores} cores, so this shows the cost of "
        "splitting, not the speedup of more machines",
    ]


WIDTHS = (18, 13, 20, 10, 15, 9, 9)


def rehearse(variables: Variables, started: float) -> int:
    """Injects faults into short, separate runs, and reports which guarantees held. Real nodes
    require YES=1.
    """
    from ..launch.faults import chosen, rehearse, stage_for
    from ..launch.rehearsal import WHOLE
    from ..report import html, rehearsal_table

    faults = chosen(variables.get("FAULTS", ""))
    config, _ = config_of(settings_of(variables))
    outcomes: list[rehearsal_table.FaultOutcome] = []
    run = run_of(f"{config.name}-rehearsal-{time.strftime('%m%d-%H%M%S')}")
    with stage_for(config, flag(variables, "YES")) as made:
        print(row(*rehearsal_table.HEAD))
        for fault in faults:
            # the rest of the row is printed once this fault's run has ended
            show_at_once(fault.name)
            try:
                outcomes.append(rehearse(fault, made))
            except BaseException:
                print()
                raise
            print(row(*outcomes[-1].cells).removeprefix(fault.name))
        rehearsal_table.write(run, made.run(WHOLE).folder, config.fleet.backend, outcomes)
    broken = [outcome for outcome in outcomes if outcome.broken]
    for outcome in broken:
        print(
            f"{outcome.name}: {outcome.what}: {'; '.join(outcome.broken)}",
            file=sys.stderr,
        )
    print(
        f"\n{rehearsal_table.Rehearsal(config.fleet.backend, tuple(outcomes)).summary}; "
        "all changes are undone"
    )
    print(f"report  {html.write(run)}")
    return 1 if broken else 0


def row(*cells: str) -> str:
    """Returns a table row with padded cells. For a fault that could not be injected, returns only
    its name and the reason.
    """
    shown = cells if all(cells) else (cells[0], cells[-1])
    return " ".join(
        [*(cell.ljust(width) for cell, width in zip(shown[:-1], WIDTHS, strict=False)), shown[-1]]
    )


def inspect(variables: Variables, started: float) -> int:
    """Prints a sample in training order. VERIFY=1 first checks all files of the dataset."""
    from ..config import dump_resolved
    from ..launch.run_location import forwarded
    from ..report.json_output import InspectOutput, emit

    sample = number(variables, "SAMPLE", 0)
    config, _ = config_of(settings_of(variables))
    if (code := forwarded("inspect", variables, config)) is not None:
        return code
    # Write to a temporary file, because this verb must not modify the run folder.
    with NamedTemporaryFile("w", encoding="utf-8", suffix=".yaml") as file:
        file.write(dump_resolved(config))
        file.flush()
        words = ("trainfleet.data.inspect", file.name, str(sample))
        full = "1" if flag(variables, "VERIFY") else "0"
        if not flag(variables, "JSON"):
            return run_module(*words, VERIFY=full, JSON="")
        code, text = ask_module(*words, VERIFY=full, JSON="1")
    if code == 0:
        emit(InspectOutput(**json.loads(text)))
    return code
