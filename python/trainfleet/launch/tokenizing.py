"""Tokenizes by a plan, from the machine that launches it."""

from __future__ import annotations

from ..backends import backend_of
from ..config import dump_resolved
from ..data import description
from ..data.dataset import find
from ..plan.plan import Plan
from ..report import plots
from ..run import run_folder
from ..watch.signals import Interrupts
from . import execution
from .launching import launching


def tokenize(plan: Plan, started: float) -> int:
    """Turns the sources into data/<name> by this plan; the command's exit code."""
    with launching(plan.config, "tokenize"):
        run = run_folder.run_of(plan.config.name)
        if backend_of(plan.config).hands_over:
            from .remote_launch import hand_over  # loads SSH

            return hand_over("tokenize", plan, started, summarize=False)
        place = backend_of(plan.config).place(run)
        place.refresh()
        with execution.in_charge(plan.config, run, place) as lease, Interrupts() as interrupts:
            if not _is_whole(execution.Launch(plan, place, lease, interrupts, started)):
                print("stopped; the units that were done stay: make tokenize resumes from there")
                lease.code = execution.STOPPED
                return lease.code
            lease.code = 0
        describe(plan)
        return 0


def _is_whole(launch: execution.Launch) -> bool:
    """Tells whether every request of the plan has ended well; False after a stop."""
    found = launch.following()
    if found is None:
        return False
    launch, running = found
    if not running:
        run_folder.write_atomic(launch.run.config, dump_resolved(launch.config))
    return all(launch.do(request, running) for request in launch.plan.requests)


def describe(plan: Plan) -> None:
    """Draws and prints what the dataset holds."""
    dataset = find(plan.config.data)
    assert dataset is not None
    folder = run_folder.DATA / plan.config.data.name
    plots.draw_lengths(plan.config.data.name, dataset, folder / "lengths.png")
    for name, value in [*description.table(dataset), ("lengths", str(folder / "lengths.png"))]:
        print(f"{name:>16}  {value}")
    print("next: make train")
