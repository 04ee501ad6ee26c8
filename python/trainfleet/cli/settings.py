"""From the variables of a command to its config, its run and its plan."""

from __future__ import annotations

from pathlib import Path

from ..backends import backend_of
from ..config import Config, Settings, load, load_name
from ..data.dataset import find
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


def plan_for(variables: Variables, kinds: tuple[str, ...] = ("tokenize", "train")) -> Plan:
    """The plan of a command: what is done already (a finished dataset) is left out, and said."""
    config, derived = load(settings_of(variables))
    backend = backend_of(config.fleet.backend)
    notes, jobs = _jobs(config, kinds)
    return make_plan(config, derived, [backend.plan(job) for job in jobs], notes)


def _jobs(config: Config, kinds: tuple[str, ...]) -> tuple[list[str], list[Job]]:
    dataset = find(config.data)
    jobs = [train_job(config)] if "train" in kinds else []
    if dataset is None:
        return [], [tokenize_job(config), *jobs]
    note = f"{DATA / config.data.name}: {dataset.tokens:,} tokens of {dataset.documents:,} documents are there already"
    return [note], jobs
