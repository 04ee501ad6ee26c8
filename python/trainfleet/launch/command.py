"""Resolves a command's variables (CONFIG, RUN, SET, NODES) into its config, run and plan."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from ..backends import BACKENDS, Backend, backend_of, terms_of, terms_to_examine
from ..backends.base import Can
from ..checkpoints.store import CheckpointStore, store_of
from ..config import (
    Config,
    Derivation,
    Settings,
    dump_asked,
    load,
    load_name,
    load_resolved,
    place_of,
)
from ..data.dataset import find
from ..data.manifest import MANIFEST, skippable
from ..data.source_survey import look
from ..data.sources import epochs, have_changed, repeated
from ..hardware import node_types
from ..plan.job import Request, tokenize_job, train_job
from ..plan.measurement import counts_of
from ..plan.plan import Plan, make_plan
from ..report.history import by_name, few_digits
from ..run.run_folder import DATA, Run, named_runs, read_json, run_of
from ..trust.errors import ConfigError, NoSource, Problem, RunError
from ..trust.spelling import suggest
from ..trust.untrusted_input import show
from . import job_image, preflight
from .calibration import experience_of

Variables = Mapping[str, str]
# Environment variable that holds the path of a JSON file with the requests that this launcher must
# execute.
ORDER = "TRAINFLEET_ORDER"
KINDS = ("tokenize", "train")
TOKEN_BYTES = 4  # approximate bytes of text per token, for common tokenizers and most languages


def settings_of(variables: Variables) -> Settings:
    """Returns the config file and its overrides from a command's variables.

    Raises:
        ConfigError: no run has the name in RUN, or its config or SET names another run.
    """
    short = {"NODES": ("fleet.nodes", variables["NODES"])} if "NODES" in variables else {}
    path, given = Path(variables.get("CONFIG", "config.yaml")), variables.get("SET", "")
    if "RUN" not in variables:
        return Settings(path, given, short)
    run = run_called(variables["RUN"])
    settings = Settings(run.document, given, short)
    # A copied or renamed folder still contains the name of the original run.
    if (name := load_name(settings)) != run.name:
        raise ConfigError.of(
            "RUN",
            f"{run.document} or SET gives {run.name} the name {name}",
            next=f"rename the folder to runs/{name}, or set name: {run.name} in {run.document}",
        )
    return settings


def run_called(name: str) -> Run:
    """Returns the local run with the given name. Raises ConfigError if no run has that name."""
    here = named_runs()
    if name not in here:
        message = f"there is no run named {show(name)}{suggest(name, here)}"
        if name in named_runs("results.json"):
            message = f"runs/{name} has lost its config.yaml"
        raise ConfigError.of("RUN", message, next="run make runs to list them")
    return run_of(name)


def placed(error: NoSource, variables: Variables) -> ConfigError:
    """Converts a missing-source error to a ConfigError that points to the source's line in
    config.yaml, or to the variable that sets the source.
    """
    settings = settings_of(variables)
    line, where = place_of(settings, ("data", "sources", error.entry))
    message = f"{error.where or 'it'} {error.what}: {error.why}"
    return ConfigError(
        [Problem(line, where, f"data.sources[{error.entry}]", message)],
        next=error.next or "fix this entry in data.sources",
    )


def config_of(settings: Settings) -> tuple[Config, Derivation]:
    """Returns the config with all derived values, and each value's origin. Raises a ConfigError
    listing all errors, including violations of the backend's rules.
    """
    return load(settings, terms_of)


def elsewhere(settings: Settings, config: Config) -> Settings:
    """Returns settings with a backend that is not limited to this machine: the config's own, or
    else the first scheduler whose machines are fully described by the config.
    """
    if not backend_of(config).is_here:
        return settings
    name = next(name for name, one in BACKENDS.items() if one.owned and Can.RETRIES in one.can)
    return replace(settings, set=f"{settings.set} fleet.backend={name}".strip())


def on_type(settings: Settings, name: str) -> Config:
    """Returns the config for nodes of an EC2 instance type. Keeps the configured node count if it
    is valid, and otherwise tries a few common ones.

    Raises:
        ConfigError: no node count is valid. The error lists the problems with the configured one.
    """
    errors = []
    for nodes in ({}, *({"NODES": ("fleet.nodes", str(count))} for count in (1, 8, 64))):
        short = {"ANY": ("fleet.instance_type", name), "": ("fleet.accelerator", "null")}
        try:
            return config_of(replace(settings, short={**settings.short, **short, **nodes}))[0]
        except ConfigError as error:
            errors.append(error)
    raise errors[0]


def config_to_examine(settings: Settings) -> Config:
    """Returns the config for node-inspection commands. Unlike other commands, these accept unknown
    hardware.
    """
    return load(settings, terms_to_examine)[0]


def run_named(variables: Variables) -> Run:
    """Returns the run that the config names, for commands that only read it."""
    return run_of(load_name(settings_of(variables)))


def run_started(variables: Variables) -> Run:
    """Returns the run that the config names, for commands that need its files. Raises RunError if
    the run was never started.
    """
    run = run_named(variables)
    if not run.config.exists():
        what = (
            "the run's config.yaml is missing"
            if run.results.exists()
            else "the run was never started"
        )
        raise RunError(what, where=str(run.folder), next="make train")
    return run


def store_named(variables: Variables) -> tuple[str, CheckpointStore]:
    """Returns the run's name and the checkpoint store it last trained with. Raises RunError if the
    run was never started.
    """
    run = run_started(variables)
    return run.name, store_of(run, load_resolved(run.config).checkpoint.path)


def run_trained(variables: Variables) -> Run:
    """Returns the run that the config names, for commands that load its model.

    Raises:
        RunError: the run was never started or has no checkpoint yet.
    """
    name, store = store_named(variables)
    if not store.steps() and not store.broken():
        raise RunError("the run has no checkpoint yet", where=name, next="make train")
    return run_of(name)


def plan_for(variables: Variables, kinds: Iterable[str] = KINDS) -> Plan:
    """Returns the plan that the command will execute. Skips jobs whose result already exists, such
    as a dataset, and notes them in the plan.
    """
    config, derived = config_of(settings_of(variables))
    if not _given():
        job_image.make_ready(config)
    return plan_of(config, derived, kinds, launch=secrets.token_hex(8))


def plan_of(
    config: Config, derived: Derivation, kinds: Iterable[str] = KINDS, launch: str = ""
) -> Plan:
    """Returns a config's plan. If the user's machine handed its requests over to this launcher, the
    plan uses exactly those.
    """
    given = {request.job.kind: request for request in _given()}
    asked = dump_asked(config, derived)
    config = job_image.named(config, [request.job.image for request in given.values()])
    backend = backend_of(config)
    if "train" in kinds:
        preflight.require(config)
    notes, is_tokenized = _data(config, backend)
    notes += preflight.warnings(config) if "train" in kinds else []
    if not given:  # The user's machine has already printed these notes.
        notes += [note for note in preflight.preset_notes(config) if note not in notes]
    jobs = [] if is_tokenized else [tokenize_job(config)]
    jobs += [train_job(config)] if "train" in kinds else []
    requests = [
        given.get(job.kind) or backend.plan(replace(job, launch=launch), {}) for job in jobs
    ]
    return make_plan(config, derived, requests, notes, backend.bill(), experience_of(config), asked)


def was_handed_over() -> bool:
    """Returns whether this process runs on a fleet's head on behalf of another machine."""
    return ORDER in os.environ


def _given() -> list[Request]:
    """Returns the requests that the user's machine handed over to this head, or [] if this process
    is not on a head.
    """
    path = os.environ.get(ORDER)
    return (
        [Request.of(entry, path) for entry in (read_json(Path(path)) or {}).get("requests", [])]
        if path
        else []
    )


def _data(config: Config, backend: Backend) -> tuple[list[str], bool]:
    """Returns notes about the dataset, and whether the dataset exists."""
    folder = DATA / config.data.name
    if backend.hands_over:
        return [f"the nodes will tokenize data.sources into {folder}"], False
    dataset = find(config.data)
    if dataset is not None:
        notes = [
            f"{folder} exists: {dataset.tokens:,} tokens in {dataset.documents:,} documents",
            *seen(config, dataset.source_tokens),
        ]
        if count := dataset.skipped:
            notes.append(
                f"{count:,} bad record{'s' * (count > 1)} skipped; {folder / MANIFEST} lists them"
            )
        if have_changed(config.data, dataset.listing):
            notes.append(
                f"warning: data.sources changed after {folder} was created; run rm -r {folder} "
                "to tokenize again"
            )
        return notes, True
    found = look(config.data)  # Reports a missing source now rather than later on the nodes.
    seconds = found.seconds(node_types.local_cores())
    size = (
        f"{found.bytes / 1e6:,.1f} MB in {found.files:,} file{'s' * (found.files > 1)}, "
        f"{found.units:,} unit{'s' * (found.units > 1)}"
    )
    notes = [
        f"{folder} will be created: {size}, about {seconds:.0f} s",
        *seen(
            config, {key: size // TOKEN_BYTES for key, size in found.by_source.items()}, "about "
        ),
    ]
    if share := skippable(config.data):
        notes.append(
            f"bad records are skipped, up to {100 * share:g} % of all records (data.on_bad_record)"
        )
    return [*notes, *found.notes, *(f"warning: {warning}" for warning in found.warnings)], False


def seen(config: Config, tokens: Mapping[int, int], about: str = "") -> list[str]:
    """Returns notes with the number of epochs that training makes over a dataset and its sources,
    given the tokens of each source.
    """
    taken = config.train.steps * config.step_tokens
    found = epochs(config.data, tokens, taken)
    whole = few_digits(taken / max(sum(tokens.values()), 1))
    each = f" ({by_name(found, few_digits)})" if config.data.weights else ""
    # The estimate is far too low for compressed text, so it does not cause a warning.
    warnings = [] if about else [f"warning: {note}" for note in repeated(found)]
    return [f"training sees {taken:,} tokens: {about}{whole} epochs{each}", *warnings]


def sized(variables: Variables, weak: bool) -> list[tuple[Config, Derivation]]:
    """Returns a config for each node count. Each config is derived and checked separately before
    anything runs.

    Strong scaling keeps the global batch size constant, weak scaling the batch size per rank at the
    smallest node count.
    """
    whole = {name: value for name, value in variables.items() if name != "NODES"}
    settings = settings_of(whole)
    config, _ = config_of(settings)
    counts = counts_of(variables.get("NODES", ""), config.fleet.nodes)
    sizes = []
    for count in counts:
        # Unset fleet.min_nodes so that each run uses exactly this many nodes.
        short = {"NODES": ("fleet.nodes", str(count)), "": ("fleet.min_nodes", "null")}
        if weak:
            short["WEAK"] = (
                "train.global_batch_size",
                str(config.train.global_batch_size * count // counts[0]),
            )
        sizes.append(config_of(replace(settings, short=short)))
    return sizes
