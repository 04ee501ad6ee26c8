"""Rehearsal stage that runs in a scheduler's jobs (Slurm): a short two-node run in a separate
folder, with faults injected by additional job steps.

The stage only touches its folder and the jobs that run in it. Both are removed at the end, even
after Ctrl-C or kill -9. A guard process on this machine waits until this process ends, cancels the
jobs, and removes the folder. A fault in one rank only affects that process (kill, prlimit), so the
fault ends with its job.

If this machine dies, the jobs run to their end, and the next rehearsal removes the folder. Jobs in
container images are not supported. If the login node is only reachable by SSH, run the rehearsal on
the login node.

`stage_for` chooses the stage for a config: in jobs, on hosts, or on this machine.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..backends import backend_of
from ..backends.base import JobSteps, load_job
from ..config import Config
from ..trust.errors import BackendError, ConfigError, RunError
from ..trust.safe_output import is_agreed
from . import rehearsal
from .rehearsal import (
    APART,
    MOUNTS,
    REMOVE,
    RehearsalStage,
    config_of_run,
    furnish,
    rehearse_unbroken,
    stage,
)
from .rehearsal_hosts import require_hosts, stage_on

NODES = 2
STEPS = 240
PATIENCE = 1800.0  # timeout in seconds for a command, including its queue time
LEFT_WITHIN = 60.0  # seconds for Slurm to end a job: KillWait plus the nodes' epilog
# Keys that the rehearsal's config copies from the user's fleet.
KEPT = ("platform", "slurm", "instance_type", "accelerator", "exclusive", "device")
ROOT = "root can write to read-only folders, and a step's mounts would outlive the step"
OWN = "the rehearsal uses separate runs in a separate folder; first, an unbroken run"
ENGINES = "the nodes of a managed service allow no login, so kill -9, tc and mounts are impossible"


@dataclass
class JobStage(RehearsalStage):
    """Rehearsal stage that runs in a scheduler's jobs. Faults are injected into node 1's rank."""

    beside: JobSteps = field(kw_only=True)

    steps, patience, apart, left_within, outlives, things = (
        STEPS,
        PATIENCE,
        APART,
        LEFT_WITHIN,
        True,
        "jobs",
    )

    def at_rank(self, name: str, command: str) -> str:
        job = load_job(self.run(name))
        words = ["sh", "-c", self.words_at_rank(name, command)] if job else []
        said = self.beside.run_beside(job[0], 1, words) if job else None
        if said is None:
            raise RunError(
                f"the run {name} is not running on any node",
                where=str(self.folder),
                next="run make rehearse YES=1 again",
            )
        return said

    def at_work(self) -> Sequence[object]:
        """Returns the queued and running jobs that belong to the stage's folder."""
        return self.beside.jobs_in(self.folder)


@contextmanager
def stage_in_jobs(config: Config, beside: JobSteps) -> Iterator[RehearsalStage]:
    """Yields a stage that runs in jobs of the config's scheduler. Removes its jobs and files on
    exit.

    Raises:
        BackendError: another rehearsal is running, or a job can't be cancelled.
        RunError: the baseline run failed.
    """
    with rehearsal.own_folder(Path(beside.folder)) as folder:
        lacking = {**beside.lacking, **({MOUNTS: ROOT} if os.getuid() == 0 else {})}
        made = JobStage(folder, lacking, beside=beside)
        # Cancels jobs left by an earlier rehearsal whose machine died.
        _end(_guard(beside, folder))
        rehearsal.empty(made)
        guard = _guard(beside, folder)
        try:
            _furnish(made, config)
            rehearse_unbroken(made)
            yield made
        finally:
            rehearsal.empty(made)
            _end(guard)


def _guard(beside: JobSteps, folder: Path) -> subprocess.Popen[str]:
    """Starts a guard process that cancels the folder's jobs on request. If this process dies, the
    guard also removes the folder.
    """
    words = beside.guard(folder, REMOVE.format(folder=shlex.quote(str(folder))))
    return subprocess.Popen(
        ["sh", "-c", words],
        cwd="/",
        text=True,
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _end(guard: subprocess.Popen[str]) -> None:
    said = guard.communicate("over\n")[0]
    if guard.returncode:
        raise BackendError(
            "not all jobs of the rehearsal were cancelled",
            why=said.strip()[-400:],
            next="run squeue --me, then scancel these jobs",
        )


def _furnish(made: JobStage, config: Config) -> None:
    given = rehearsal.plain(
        {key: value for key, value in asdict(config.fleet).items() if key in KEPT}
    )
    own = {
        "backend": config.fleet.backend,
        "nodes": NODES,
        "ranks_per_node": 1,
        "python": f"{made.folder}/python",
    }
    text = config_of_run(given | own, "text", batch=4 * NODES, steps=STEPS)
    python = rehearsal.python_of(made.place, made.beside.interpreter)
    furnish(made.folder, rehearsal.documents() | {"config.yaml": text.encode(), "python": python})


def stage_for(
    config: Config, names: Sequence[str], sure: bool
) -> AbstractContextManager[RehearsalStage]:
    """Returns the stage on which to inject the given faults. Asks for consent before using real
    nodes, unless `sure` is set.

    Raises:
        ConfigError: the faults can't be injected on this fleet.
        RunError: the user did not consent.
    """
    harm = backend_of(config).harm()
    if harm is None:
        problem = f"{ENGINES}; use local, ssh, ec2 or slurm"
        raise ConfigError.of(
            "fleet.backend", problem, next="make rehearse SET='fleet.backend=local'"
        )
    if harm.steps:
        harm.steps.require()
        agree("kill and stop processes in separate short jobs", harm.steps.where, sure)
        made = stage_in_jobs(config, harm.steps)
    elif harm.head:
        located = require_hosts(harm.head)
        agree(
            "kill, stop and cut off processes of a separate short run",
            ", ".join(located.fleet.hosts),
            sure,
        )
        made = stage_on(located, names)
    else:
        made = stage()
    print(OWN, flush=True)
    return made


def agree(what: str, where: str, sure: bool) -> None:
    """Asks the user for consent to do `what` on `where`. Raises RunError if the user declines."""
    if not sure and not is_agreed(f"{what} on {where}?"):
        raise RunError(
            "a rehearsal disrupts real hosts and needs your consent",
            where=where,
            next="make rehearse YES=1",
        )
