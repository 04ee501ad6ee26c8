"""Steps beside the ranks of a job of Slurm (srun --overlap): how a rehearsal strikes them, and what
ends its jobs.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from ...config import Config
from ...node.placement import expand_hosts
from ...trust.errors import ConfigError
from ..base import LINKS, OWN_HEAD, Handle, JobSteps
from .client import SlurmClient

# It reads a word, or that whom it guards is dead: then the folder is nobody's. A squeue that fails
# says nothing of jobs.
GUARD = """read -r over
for _ in $(seq 180); do
said=$(squeue --me --noheader --format='%i %Z') || {{ sleep 2; continue; }}
jobs=$(echo "$said" | while read -r job folder; do [ "$folder" != {folder} ] || echo "$job"; done)
[ -n "$jobs" ] || {{ [ -n "$over" ] || {{ {remove}; }}; exit 0; }}
scancel $jobs
sleep 1
done
echo "still there: $jobs"; exit 1"""
OWN_LINKS = "a node's link carries Slurm too: without it the node is gone for everybody"
HEAD_LOST = (
    "the head is Slurm's own (slurmctld): jobs go on without it, and nobody but its "
    "keeper may end it"
)


class Beside(JobSteps):
    """Steps (base.py) of Slurm."""

    lacking = MappingProxyType({LINKS: OWN_LINKS, OWN_HEAD: HEAD_LOST})

    def __init__(
        self, config: Config, engine: SlurmClient, folder: str, interpreter: str, elsewhere: bool
    ) -> None:
        self.config, self.engine, self.folder, self.interpreter = (
            config,
            engine,
            folder,
            interpreter,
        )
        self.elsewhere = elsewhere  # sbatch is on another machine
        self.where = config.fleet.slurm.partition or "the cluster"

    def require(self) -> None:
        fleet = self.config.fleet
        if self.elsewhere:
            host = next(iter(fleet.hosts), "the head node")
            problem = "faults are played from the machine that has sbatch"
            raise ConfigError.of(
                "fleet.hosts",
                problem,
                next=f"ssh {host.partition('=')[0]}, and make rehearse there",
            )
        if fleet.image != "none":
            problem = (
                f"{fleet.image}: processes in an image can't be reached by a step beside "
                "them; none works"
            )
            mended = "make rehearse SET='fleet.image=none fleet.slurm.container=null'"
            raise ConfigError.of("fleet.image", problem, next=mended)

    def run_beside(self, handle: Handle, node: int, words: Sequence[str]) -> str | None:
        number = handle.id.rpartition(":")[2]
        hosts = list(expand_hosts(self.engine.look(number).nodes)) if number else []
        if node >= len(hosts):
            return None
        step = [
            "srun",
            f"--jobid={number}",
            "--overlap",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={hosts[node]}",
            "--input=none",
            "--mpi=none",
            "--chdir=/",
            *words,
        ]
        # a rank that was struck may end the step with its job
        said = self.engine.ask(step, "", None)
        return said.out.strip() or said.error.strip()

    def jobs_in(self, folder: Path) -> list[str]:
        said = self.engine.run("squeue", "--me", "--noheader", "--format=%i %Z")
        return [
            line.split(" ", 1)[0]
            for line in said.splitlines()
            if line.rstrip().partition(" ")[2] == str(folder)
        ]

    def guard(self, folder: Path, remove: str) -> str:
        return GUARD.format(folder=shlex.quote(str(folder)), remove=remove)
