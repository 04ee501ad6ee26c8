"""Ahead-of-time compilation: a separate run of a few steps fills the compile cache that all nodes
share.

The run is named `compile-<12 digits>`, after a hash of everything that affects its programs. Any
machine that can read the runs can therefore tell whether the cache is warm. Runs with identical
programs share one compile run. Any change to the programs, such as a different micro-batch size,
requires a new one. The compiler's own cache is keyed by version, flags and graph, so no program is
compiled twice.

If the scheduler has a queue, training is queued behind the compile job. Training starts once the
compile job succeeds, with or without a launcher. The launcher follows the compile job first.
`train` then finds the training job as if an earlier launcher had submitted it. Each compile attempt
is a separate job, so training is queued again behind each attempt. If no attempt succeeds, or you
stop either job, the training job is cancelled.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from ..backends import backend_of, shared
from ..backends.base import Can, Handle, save_job
from ..config import Config, Derivation, load_resolved
from ..hardware import node_types
from ..health import fence
from ..hosts.install_steps import lock_name
from ..hosts.platform import load_platform
from ..plan.job import compiles_ahead
from ..plan.measurement import compile_only
from ..plan.plan import Plan
from ..process.install_paths import PACKAGE, PACKAGES
from ..report.history import duration
from ..report.measurements import describe_compilation
from ..run.run_folder import COMPILED, RUNS, Run, run_of
from ..trust.errors import ConfigError, TrainfleetError
from ..watch.monitor import Sequel
from . import execution, job_image, training
from .command import plan_of, was_handed_over
from .execution import STOPPED
from .training import train


def can_wait(config: Config) -> bool:
    """Returns whether the scheduler can queue training behind another job from this machine."""
    backend = backend_of(config)
    return Can.FOLLOWS in backend.can and not backend.hands_over


class ChainedTraining:
    """A training job that waits in the queue behind another job. `started` is the command's start
    time in unix seconds.
    """

    def __init__(self, config: Config, derived: Derivation, started: float) -> None:
        self.config = config
        self.derived = derived
        self.started = started
        self.run = run_of(config.name)
        self.backend = backend_of(config)
        self.begun = False
        self.submitted: Handle | None = None

    @property
    def sequel(self) -> Sequel | None:
        """Returns the job to queue behind the first job, or None if the scheduler does not support
        dependent jobs.
        """
        return Sequel(self.queue, self.is_asked_to_stop) if can_wait(self.config) else None

    def is_asked_to_stop(self) -> bool:
        return self.begun and self.run.is_asked_to_stop()

    def queue(self, first: Handle) -> None:
        """Submits the training job so that it starts once `first` has succeeded. Replaces a
        training job that was queued behind an earlier attempt.

        Raises:
            ConfigError, RunError, BackendError: the config can't be trained; `train` would raise
                the same error.
        """
        if self.is_asked_to_stop():  # The stop request also applies to the first job.
            return
        if self.submitted:
            self.backend.stop(self.submitted, at_once=True)
        plan = plan_of(self.config, self.derived, launch=secrets.token_hex(8))
        place = self.backend.place(self.run)
        place.refresh()
        training.require_same(plan.config, self.run)
        if execution.is_finished(plan, self.run):
            return
        training.require_able(plan.config, self.run)
        with execution.in_charge(plan.config, self.run, place) as lease:
            self._submit(plan, first)
            lease.leave()
        print(f"{self.run.name} is queued behind the compile job")

    def _submit(self, plan: Plan, first: Handle) -> None:
        request = backend_of(plan.config).plan(replace(plan.requests[-1].job, after=first.id), {})
        self.begun = True
        training.prepare(plan, self.run)
        training.describe(plan, self.run, self.started, restarts=0, status="running")
        execution.record_launch(self.run, request)
        request = request.with_environment({fence.VARIABLE: str(fence.begin(self.run.folder))})
        self.submitted = self.backend.submit(request)
        save_job(self.run, self.submitted, request)
        status = self.backend.status(self.submitted)
        self.run.note("queued", phase=status.phase.value, reason=status.reason)

    def withdraw(self, status: str) -> None:
        """Cancels the queued training job, if any, and records `status` in its results."""
        if self.submitted:
            self.backend.stop(self.submitted, at_once=True)
        if self.begun:
            self.run.stop.unlink(missing_ok=True)
            training.report(self.run, self.config, status)


# Packages whose source code affects the compiled programs, in addition to the config.
WRITTEN_IN = ("engine", "models", "devices")
# `train` keys that do not affect the compiled programs, or that are inputs to them at runtime.
GIVEN = (
    "steps",
    "learning_rate",
    "min_lr_ratio",
    "schedule",
    "schedule_steps",
    "schedule_power",
    "decay_steps",
    "warmup_steps",
    "seed",
    "max_consecutive_skips",
    "log_every",
    "validate_every",
    "validation_sequences",
    "init_from",
    "profile_steps",
    "compile_only",
    "loggers",
)


def require(config: Config) -> None:
    """Raises ConfigError if there is nothing to compile ahead of time, or no shared folder to keep
    the compiled programs in.
    """
    if compiles_ahead(config) or config.train.compile:
        return
    why = "false compiles nothing; set it to true"
    if node_types.device_of(config.fleet.platform) == "neuron":
        why = (
            "TorchNeuron caches compiled programs in a folder, but these nodes don't share one; "
            "make train compiles them during training"
        )
    raise ConfigError.of("train.compile", why, next="make train")


def is_due(config: Config) -> bool:
    """Returns whether a separate compile job should run before training."""
    if was_handed_over():  # already handled on the user's machine
        return False
    if not compiles_ahead(config) or config.train.compile_only or is_warm(config):
        return False
    # If training is already queued or running, no separate compile job is needed.
    return not (can_wait(config) and execution.left_running(config, run_of(config.name)))


def is_warm(config: Config) -> bool:
    """Returns whether the config's compile run has finished, according to the backend's run
    storage.
    """
    run, backend = run_of(name_of(config)), backend_of(config)
    with backend.place(run) as place:
        place.refresh()
    return run.read_results().get("status") == "finished" and (
        not backend.is_here or COMPILED.exists()
    )


def compile_first(config: Config, derived: Derivation, started: float) -> int:
    """Runs `compile_ahead` with training queued behind the compile job, if the scheduler supports
    dependent jobs. Cancels the training job if compilation fails.
    """
    waiting, code = ChainedTraining(config, derived, started), 1
    try:
        code = compile_ahead(config, derived, started, waiting.sequel)
    finally:
        if code:
            waiting.withdraw("stopped" if code == STOPPED else "failed")
    return code


def compile_ahead(
    config: Config, derived: Derivation, started: float, sequel: Sequel | None = None
) -> int:
    """Fills the compile cache, and prints the compile time and any failed programs. Returns the
    exit code.
    """
    job_image.make_ready(config)
    run = run_of(name_of(config))
    print(f"compiling ahead of time in {run.folder}: {expected_duration(config)}")
    plan = plan_of(compile_only(shared(config), run.name), derived, launch=secrets.token_hex(8))
    code = train(plan, started, summarize=False, sequel=sequel)
    if code == 0:
        print("\n".join(describe_compilation(run)))
    return code


def outlook(config: Config) -> list[str]:
    """Returns the lines about compilation for `make plan`."""
    behind = "; training is queued behind the compile job" if can_wait(config) else ""
    return [
        "",
        f"compiled ahead of time unless cached: {name_of(config)}; "
        f"{expected_duration(config)}{behind}",
        "",
    ]


def name_of(config: Config) -> str:
    """Returns the name of the config's compile run. Its last 12 digits are a hash of everything
    that affects the programs.
    """
    fleet = config.fleet
    inputs = {
        "platform": lock_name(load_platform(fleet.platform)),
        "type": fleet.instance_type,
        "image": fleet.container,
        "ranks": [fleet.nodes, fleet.ranks_per_node],
        "model": asdict(config.model),
        "train": {name: value for name, value in asdict(config.train).items() if name not in GIVEN},
        "validates": config.train.validate_every > 0,
        "code": _code(),
    }
    return f"compile-{hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:12]}"


def expected_duration(config: Config) -> str:
    """Returns a compile time estimate as text, based on earlier runs."""
    taken = [
        seconds
        for path in RUNS.glob("compile-*/results.json")
        if (seconds := _seconds(path, config))
    ]
    if taken:
        least, most = duration(int(min(taken))), duration(int(max(taken)))
        return (
            "earlier compile runs of this model and platform took "
            f"{least if least == most else f'{least} to {most}'}"
        )
    if not compiles_ahead(config):
        return "a few minutes at most"
    # Source: AWS Neuron documentation (awsdocs-neuron.readthedocs-hosted.com), tutorial dp_bert,
    # 2026-08-17.
    return (
        "this model has not been compiled here before; AWS's BERT-Large takes 13 min on a "
        "trn1.32xlarge, and larger models take longer"
    )


def _seconds(path: Path, config: Config) -> float | None:
    with suppress(TrainfleetError, OSError):
        run = Run(path.parent)
        other, results = load_resolved(run.config), run.read_results()
        if (other.fleet.platform, other.model) == (
            config.fleet.platform,
            config.model,
        ) and results.get("status") == "finished":
            return (results.get("seconds") or {}).get("compile")
    return None


def _code() -> str:
    digest = hashlib.sha256()
    folders = [*(PACKAGE / room for room in WRITTEN_IN), *PACKAGES[1:]]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
