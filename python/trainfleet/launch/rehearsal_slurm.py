"""A stage in jobs of Slurm: a short run of two nodes in a folder of its own, struck by steps beside its ranks (srun --overlap).

What is touched: jobs that work in that folder, and the folder. Both are gone at the end, also after Ctrl-C and kill -9:
a guard on this machine waits for the end of this process, cancels the jobs, and removes the folder. A fault of one rank is a
change of that process alone (kill, prlimit), so nothing of it outlives its job.

What is not covered: this machine dies too, so that the jobs run to their end and the folder stays until the next rehearsal; jobs
in an image; a login node that is reached by SSH (the command is typed on it).
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..backends.base import load_job
from ..backends.slurm import Slurm
from ..config import Config
from ..errors import BackendError, ConfigError, RunError
from ..seat import expand_hosts
from . import rehearsal
from .rehearsal import APART, REMOVE, Stage, config_of_run, furnish, rehearse_unbroken

NODES = 2
STEPS = 240
PATIENCE = 1800.0  # seconds of a command, with its time in the queue
LEFT_WITHIN = 60.0  # seconds in which Slurm ends a job: KillWait and the nodes' epilog
KEPT = ("stack", "slurm", "instance_type", "accelerator", "exclusive", "device")  # of the user's fleet
# It reads a word, or that whom it guards is dead: then the folder is nobody's. A squeue that fails says nothing of jobs.
GUARD = """read -r over
for _ in $(seq 180); do
said=$(squeue --me --noheader --format='%i %Z') || {{ sleep 2; continue; }}
jobs=$(echo "$said" | while read -r job folder; do [ "$folder" != {folder} ] || echo "$job"; done)
[ -n "$jobs" ] || {{ [ -n "$over" ] || {{ {remove}; }}; exit 0; }}
scancel $jobs
sleep 1
done
echo "still there: $jobs"; exit 1"""
ROOT = "root may write everywhere, and what a step mounts would outlive it"
OWN_LINKS = "a node's link carries Slurm too: without it the node is gone for everybody"
LACKING = {
    "link-cut": OWN_LINKS,
    "link-slowed": OWN_LINKS,
    "head-lost": "the head is Slurm's own (slurmctld): jobs go on without it, and nobody but its keeper may end it",
}


@dataclass
class JobStage(Stage):
    """The stage, in jobs of Slurm: node 1's rank is the one that is struck."""

    backend: Slurm = field(kw_only=True)

    steps, patience, apart, left_within, outlives, things = STEPS, PATIENCE, APART, LEFT_WITHIN, True, "jobs"

    def at_rank(self, name: str, command: str) -> str:
        job = load_job(self.run(name))
        number = job[0].id.rpartition(":")[2] if job else ""
        hosts = list(expand_hosts(self.backend.engine.look(number).nodes)) if number else []
        if len(hosts) < NODES:
            raise RunError(f"{name} runs on no nodes", where=str(self.folder), next="make rehearse YES=1 again")
        step = ["srun", f"--jobid={number}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={hosts[1]}",
                "--input=none", "--mpi=none", "--chdir=/", "sh", "-c", self.words_at_rank(name, command)]  # fmt: skip
        said = self.backend.engine.ask(step, "", None)  # a rank that was struck may end the step with its job
        return said.out.strip() or said.error.strip()

    def at_work(self) -> Sequence[object]:
        """The jobs of the folder that are in the queue."""
        said = self.backend.engine.run("squeue", "--me", "--noheader", "--format=%i %Z")
        return [line.split(" ", 1)[0] for line in said.splitlines() if line.rstrip().partition(" ")[2] == str(self.folder)]


def require_cluster(backend: Slurm) -> None:
    """Raises ConfigError where faults can't be played in jobs of this cluster, from here."""
    if backend.hands_over:
        host = next(iter(backend.fleet.hosts), "the head node")
        problem = "faults are played from the machine that has sbatch"
        raise ConfigError.of("fleet.hosts", problem, next=f"ssh {host.partition('=')[0]}, and make rehearse there")
    if backend.fleet.image != "none":
        problem = f"{backend.fleet.image}: processes in an image can't be reached by a step beside them; none works"
        mended = "make rehearse SET='fleet.image=none fleet.slurm.container=null'"
        raise ConfigError.of("fleet.image", problem, next=mended)


@contextmanager
def stage_in_jobs(config: Config, backend: Slurm) -> Iterator[Stage]:
    """A stage in jobs of the cluster of a config; nothing of it is left behind.

    Raises:
        BackendError: another rehearsal is under way, or a job can't be ended.
        RunError: even the unbroken run failed.
    """
    with rehearsal.own_folder(Path(backend.folder)) as folder:
        made = JobStage(folder, LACKING | ({"read-only": ROOT} if os.getuid() == 0 else {}), backend=backend)
        _end(_guard(folder))  # jobs of a rehearsal whose machine died
        rehearsal.empty(made)
        guard = _guard(folder)
        try:
            _furnish(made, config)
            rehearse_unbroken(made)
            yield made
        finally:
            rehearsal.empty(made)
            _end(guard)


def _guard(folder: Path) -> subprocess.Popen[str]:
    """Who ends the folder's jobs once it is told to; by our death it is told too, and removes the folder."""
    quoted = shlex.quote(str(folder))
    words = GUARD.format(folder=quoted, remove=REMOVE.format(folder=quoted))
    return subprocess.Popen(
        ["sh", "-c", words], cwd="/", text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def _end(guard: subprocess.Popen[str]) -> None:
    said = guard.communicate("over\n")[0]
    if guard.returncode:
        raise BackendError("not everything is put back", why=said.strip()[-400:], next="squeue --me; scancel them")


def _furnish(made: JobStage, config: Config) -> None:
    given = rehearsal.plain({key: value for key, value in asdict(config.fleet).items() if key in KEPT})
    own = {"backend": Slurm.name, "nodes": NODES, "ranks_per_node": 1, "python": f"{made.folder}/python"}
    text = config_of_run(given | own, "text", batch=4 * NODES, steps=STEPS)
    python = rehearsal.python_of(made.place, made.backend.interpreter)
    furnish(made.folder, rehearsal.documents() | {"config.yaml": text.encode(), "python": python})
