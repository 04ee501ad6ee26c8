"""Where a rehearsal is played: on this machine, on hosts, or in jobs of Slurm; real ones are harmed by consent alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from ..backends import backend_of
from ..backends.base import Can
from ..backends.slurm import Slurm
from ..backends.ssh import Ssh
from ..config import Config
from ..errors import ConfigError, RunError
from ..output import is_agreed
from .rehearsal import Stage, stage
from .rehearsal_hosts import require_hosts, stage_on
from .rehearsal_slurm import require_cluster, stage_in_jobs

OWN = "runs of its own, in a folder of its own: none of yours is touched. First the one to which nothing happens"
ENGINES = "nodes that an engine in the cloud starts let nobody in: kill -9, tc or a mount can't be had there"


def stage_for(config: Config, names: Sequence[str], sure: bool) -> AbstractContextManager[Stage]:
    """The stage for the faults called `names`; where nodes are real somebody has agreed. `sure`: nobody is asked.

    Raises:
        ConfigError: they can't be played on that fleet.
        RunError: nobody agreed.
    """
    backend = backend_of(config)
    if backend.is_here:
        made = stage()
    elif isinstance(backend, Slurm):
        require_cluster(backend)
        agree("kill and stop processes in short jobs of your own", backend.fleet.slurm.partition or "the cluster", sure)
        made = stage_in_jobs(config, backend)
    elif isinstance(backend, Ssh) and Can.EXAMINE in backend.can:
        located = require_hosts(config)
        agree("kill, stop and cut off processes of a short run", ", ".join(located.fleet.hosts), sure)
        made = stage_on(located, names)
    else:
        problem = f"{ENGINES}; played on local, ssh, ec2 and slurm"
        raise ConfigError.of("fleet.backend", problem, next="make rehearse SET='fleet.backend=local'")
    print(OWN, flush=True)
    return made


def agree(what: str, where: str, sure: bool) -> None:
    """RunError where nobody agrees to do `what` on `where`."""
    if not sure and not is_agreed(f"{what} on {where}?"):
        raise RunError("a rehearsal harms real hosts, and nobody has agreed", where=where, next="make rehearse YES=1")
