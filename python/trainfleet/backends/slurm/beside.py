"""Runs steps next to the ranks of a Slurm job (srun --overlap), so that a rehearsal can inject
faults.

Also cancels the rehearsal's jobs when it ends.
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

# Cleanup script that cancels the folder's jobs when it reads a line from stdin or stdin closes. If
# stdin closes without a line, the rehearsal died, so the script also removes the folder. A failed
# squeue is retried, because it does not prove that no jobs remain.
GUARD = """read -r over
for _ in $(seq 180); do
said=$(squeue --me --noheader --format='%i %Z') || {{ sleep 2; continue; }}
jobs=$(echo "$said" | while read -r job folder; do [ "$folder" != {folder} ] || echo "$job"; done)
[ -n "$jobs" ] || {{ [ -n "$over" ] || {{ {remove}; }}; exit 0; }}
scancel $jobs
sleep 1
done
echo "still there: $jobs"; exit 1"""
OWN_LINKS = "Slurm uses the node's network link too; if it is cut, all users lose the node"
HEAD_LOST = "the head is slurmctld; jobs continue without it, and only an administrator may stop it"


class Beside(JobSteps):
    """Job steps (base.py) on a Slurm cluster."""

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
        self.elsewhere = elsewhere  # whether sbatch is on another machine
        self.where = config.fleet.slurm.partition or "the cluster"

    def require(self) -> None:
        fleet = self.config.fleet
        if self.elsewhere:
            host = next(iter(fleet.hosts), "the head node")
            problem = "a rehearsal must run on the machine that has sbatch"
            raise ConfigError.of(
                "fleet.hosts",
                problem,
                next=f"run ssh {host.partition('=')[0]}, then make rehearse there",
            )
        if fleet.container != "none":
            problem = (
                f"{fleet.container}: a job step can't reach processes in a container; set none"
            )
            mended = "make rehearse SET='fleet.container=none fleet.slurm.container_runtime=null'"
            raise ConfigError.of("fleet.container", problem, next=mended)

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
        # ignore the exit code, because killing a rank can end the job along with this step
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
