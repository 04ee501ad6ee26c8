"""From the variables of a command to its config, its run and its plan."""

from __future__ import annotations

from pathlib import Path

from .. import hardware
from ..backends import Backend, backend_of
from ..config import Config, Derived, Settings, load, load_name
from ..data.dataset import find
from ..data.sources import have_changed, plan_units
from ..errors import RunError
from ..plan.job import Job, tokenize_job, train_job
from ..plan.plan import Plan, make_plan
from ..runs import DATA, Run, run_of
from .variables import Variables


def settings_of(variables: Variables) -> Settings:
    """The config file and what overrides it."""
    short = {"NODES": ("fleet.nodes", variables["NODES"])} if "NODES" in variables else {}
    return Settings(Path(variables.get("CONFIG", "config.yaml")), variables.get("SET", ""), short)


def run_named(variables: Variables) -> Run:
    """The run that the config names, for verbs that only look at it."""
    return run_of(load_name(settings_of(variables)))


def run_started(variables: Variables) -> Run:
    """The run that the config names, for verbs that need what it has made.

    Raises:
        RunError: it was never started.
    """
    run = run_named(variables)
    if not run.config.exists():
        raise RunError("was never started", where=str(run.folder), next="make train")
    return run


def plan_for(variables: Variables, kinds: tuple[str, ...] = ("tokenize", "train")) -> Plan:
    """The plan of a command: what is done already (a finished dataset) is left out, and said."""
    return plan_of(*load(settings_of(variables)), kinds)


def plan_of(config: Config, derived: list[Derived], kinds: tuple[str, ...] = ("tokenize", "train")) -> Plan:
    """The plan of a config."""
    backend = backend_of(config)
    notes, jobs = _data(config, backend)
    jobs += [train_job(config)] if "train" in kinds else []
    return make_plan(config, derived, [backend.plan(job) for job in jobs], notes)


def _data(config: Config, backend: Backend) -> tuple[list[str], list[Job]]:
    """What is to be said of the dataset, and the job that makes it, if it is not there yet."""
    folder = DATA / config.data.name
    dataset = find(config.data) if backend.shares_disk else None
    if dataset is not None:
        notes = [f"{folder} is there: {dataset.tokens:,} tokens of {dataset.documents:,} documents"]
        if have_changed(config.data, dataset.listing):
            notes.append(f"warning: data.sources have changed since; {folder} stays as it was made, until rm -r {folder}")
        return notes, []
    job = tokenize_job(config)
    if not backend.shares_disk:
        return [f"{folder} is made from what data.sources are on the nodes"], [job]
    units = plan_units(config.data)  # finds out now, and not on the nodes, that a source is missing
    seconds = units.seconds(hardware.local_cores())
    size = f"{units.bytes / 1e6:,.1f} MB in {units.files:,} files, {len(units.units):,} units"
    return [f"{folder} is made: {size}, about {seconds:.0f} s", *(f"warning: {warning}" for warning in units.warnings)], [job]
