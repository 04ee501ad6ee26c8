"""Reads the hardware of a cluster's nodes from sinfo (gres, features) and from one free node.

Also defines the machines of an existing cluster, and the steps that a rehearsal runs next to a
job's ranks to inject faults (srun --overlap). The rehearsal's jobs are canceled when it ends.

Sources: slurm.schedmd.com, sinfo.html (--format) and srun.html (--immediate). The output comes from
another machine, so it is validated here. Its free text is in the last fields.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ...config import Config
from ...config.owned_machines import KEY, gpus_of
from ...config.types import Devices, SlurmConfig
from ...hardware.accelerators import find_accelerator
from ...hosts import facts as reading
from ...hosts import probe
from ...hosts.facts import Facts
from ...hosts.host_results import Implausible
from ...node.placement import expand_hosts
from ...trust import untrusted_input
from ...trust.errors import BackendError, ConfigError
from ...trust.untrusted_input import show
from ..base import LINKS, OWN_HEAD, Handle, JobSteps
from ..own_machines import Standing
from .client import SlurmClient, read_partitions

# sinfo columns: numbers first, names next, and administrators' free text last
COLUMNS = "%D|%c|%m|%R|%N|%G|%f"
MOST_ROWS = 1000
FREE_WITHIN = (
    20  # seconds to wait for a free node to examine; without one, only sinfo's report is used
)
LOOK_MINUTES = 2


@dataclass(frozen=True)
class Nodes:
    """Group of identical nodes: count, cores and MiB per node, partition, names, gres and
    features.
    """

    count: int
    cores: int
    memory_mib: int
    partition: str
    names: str
    gres: str
    features: str


def read_nodes(out: str) -> list[Nodes]:
    """Parses sinfo's output in the COLUMNS format. Skips malformed lines."""
    found = []
    for line in out.splitlines()[:MOST_ROWS]:
        words = [
            untrusted_input.printable(word.strip()) for word in line.split("|", COLUMNS.count("|"))
        ]
        count, cores, memory, *names = words if len(words) == 7 else ["", "", "", ""]
        # `64+` means that the nodes differ, and 64 is the minimum
        numbers = [untrusted_input.whole(word.rstrip("+")) for word in (count, cores, memory)]
        if None not in numbers:
            count_, cores_, memory_ = (number or 0 for number in numbers)
            found.append(Nodes(count_, cores_, memory_, *names))
    return found


def nodes_of(engine: SlurmClient, slurm: SlurmConfig) -> list[Nodes]:
    """Returns the node groups of the configured partitions, or of all partitions."""
    which = [f"--partition={slurm.partition}"] if slurm.partition else []
    return read_nodes(engine.run("sinfo", "--noheader", *which, f"--format={COLUMNS}"))


def describe(rows: list[Nodes]) -> Iterator[str]:
    """Yields one line per group of identical nodes."""
    for row in rows:
        what = row.gres if row.gres not in ("", "(null)") else "no gres"
        features = f"; features {row.features}" if row.features not in ("", "(null)") else ""
        size = f"{row.cores} cores, {row.memory_mib / 1024:,.0f} GiB"
        yield (
            f"partition {row.partition}: {row.count} nodes ({row.names}) with {what}, "
            f"{size}{features}"
        )


def devices_of(rows: list[Nodes]) -> Devices | None:
    """Derives fleet.accelerator from the gres and features that sinfo reports.

    Returns None unless exactly one accelerator model matches.
    """
    gpus = {found for row in rows if (found := gpus_of(row.gres))}
    if len(gpus) != 1:
        return None
    (one,) = gpus
    words = [
        one.type,
        *(word for row in rows if gpus_of(row.gres) for word in row.features.split(",")),
    ]
    named = {row.label: row for word in words if word and (row := find_accelerator(word))}
    return Devices(next(iter(named)), one.count) if len(named) == 1 else None


def look(engine: SlurmClient, slurm: SlurmConfig, rows: list[Nodes]) -> Facts | str:
    """Returns the facts of one GPU node, read in a short allocation.

    Otherwise, returns the reason why no node was examined.
    """
    with_gpus = next((row for row in rows if gpus_of(row.gres)), None)
    if with_gpus is None:
        return "no node has GPUs in its gres"
    given = {
        "partition": slurm.partition or with_gpus.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "reservation": slurm.reservation,
        "gres": slurm.gres or f"gpu:{_most(with_gpus)}",
    }
    own = [f"--{name}={value}" for name, value in given.items() if value]
    words = [
        "srun",
        f"--immediate={FREE_WITHIN}",
        "--nodes=1",
        "--ntasks=1",
        f"--time={LOOK_MINUTES}",
        "--mpi=none",
        "--quiet",
        "--job-name=trainfleet-doctor",
        *own,
        "sh",
        "-s",
        "--",
        "--links",
        "",
        "",
        "",
        "localhost",
    ]
    try:
        said = engine.ask(words, reading.SCRIPT.read_text(encoding="utf-8"), None)
        return reading.parse(said.out) if not said.code else f"srun reports: {_last(said.error)}"
    except (BackendError, Implausible) as error:
        return str(error).partition("\n")[0]


def report(engine: SlurmClient, slurm: SlurmConfig) -> tuple[list[str], Facts | None]:
    """Returns lines that describe the nodes, and the facts of one node if it responded."""
    rows = nodes_of(engine, slurm)
    lines = list(describe(rows))
    if not any(gpus_of(row.gres) for row in rows):
        return lines, None
    found = look(engine, slurm, rows)
    if isinstance(found, Facts):
        return [
            *lines,
            f"a free node, {found.hostname}:",
            *(f"  {line}" for line in probe.describe(found)),
        ], found
    lines.append(
        f"could not examine a free node within {FREE_WITHIN} s, so the network is unknown: {found}"
    )
    if devices := devices_of(rows):
        lines += [f"{KEY} from the gres:", probe.block(devices)]
    else:
        lines.append(f"the gres names no known GPU type; set {KEY}, for example {KEY}: 8xh100")
    return lines, None


def _most(row: Nodes) -> int:
    gpus = gpus_of(row.gres)
    return gpus.count if gpus else 0


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return untrusted_input.printable(lines[-1])[:200] if lines else "nothing"


class Partitions(Standing):
    """Machines of a cluster that is managed by its own administrators."""

    def __init__(self, engine: SlurmClient, enter: Callable[[], int] = lambda: 0) -> None:
        self.engine, self.enter = engine, enter

    def apply(self) -> int:
        """Prints Slurm's version and the cluster's partitions, and prepares the shared folder."""
        version = self.engine.run("sinfo", "--version").strip()
        rows = read_partitions(self.engine.run("scontrol", "--oneliner", "show", "partition"))
        if not re.match(r"slurm\S* \d+\.\d+", version) or not rows:
            raise BackendError(
                "Slurm is not usable here",
                why=f"sinfo --version prints {show(version)}, and scontrol show partition lists "
                f"{len(rows)} partitions",
                next="run module load slurm, then scontrol ping",
            )
        print(version)
        for row in rows:
            most = f"at most {row.most_minutes} min" if row.most_minutes else "no time limit"
            print(
                f"partition {row.name}: {row.nodes} nodes, "
                f"{most}{', the default' if row.is_default else ''}"
                f"{'' if row.is_up else ', accepts no jobs now'}"
            )
        print("nothing to set up: the administrators manage this cluster\nnext: make train")
        return self.enter()


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
        self.config = config
        self.engine = engine
        self.folder = folder
        self.interpreter = interpreter
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
            raise ConfigError.of(
                "fleet.container",
                problem,
                next="make rehearse SET='fleet.container=none fleet.slurm.container_runtime=null'",
            )

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
