"""Where a rehearsal is played: on this machine, on hosts, or in jobs of an engine; real ones are harmed by consent alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from ..backends import backend_of
from ..config import Config
from ..trust.errors import ConfigError, RunError
from ..trust.safe_output import is_agreed
from .rehearsal import RehearsalStage, stage
from .rehearsal_hosts import require_hosts, stage_on
from .rehearsal_steps import stage_in_jobs

OWN = "runs of its own, in a folder of its own: none of yours is touched. First the one to which nothing happens"
ENGINES = "nodes that an engine in the cloud starts let nobody in: kill -9, tc or a mount can't be had there"


def stage_for(config: Config, names: Sequence[str], sure: bool) -> AbstractContextManager[RehearsalStage]:
    """The stage for the faults called `names`; where nodes are real somebody has agreed. `sure`: nobody is asked.

    Raises:
        ConfigError: they can't be played on that fleet.
        RunError: nobody agreed.
    """
    harm = backend_of(config).harm()
    if harm is None:
        problem = f"{ENGINES}; played on local, ssh, ec2 and slurm"
        raise ConfigError.of("fleet.backend", problem, next="make rehearse SET='fleet.backend=local'")
    if harm.steps:
        harm.steps.require()
        agree("kill and stop processes in short jobs of your own", harm.steps.where, sure)
        made = stage_in_jobs(config, harm.steps)
    elif harm.head:
        located = require_hosts(harm.head)
        agree("kill, stop and cut off processes of a short run", ", ".join(located.fleet.hosts), sure)
        made = stage_on(located, names)
    else:
        made = stage()
    print(OWN, flush=True)
    return made


def agree(what: str, where: str, sure: bool) -> None:
    """RunError where nobody agrees to do `what` on `where`."""
    if not sure and not is_agreed(f"{what} on {where}?"):
        raise RunError("a rehearsal harms real hosts, and nobody has agreed", where=where, next="make rehearse YES=1")
