"""Reads the hardware of a cluster's nodes from sinfo (gres, features) and from one free node.

Also defines the machines of an existing cluster, and the SSH host that runs Slurm's commands for
machines without them.

Sources: slurm.schedmd.com, sinfo.html (--format) and srun.html (--immediate). The output comes from
another machine, so it is validated here. Its free text is in the last fields.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ...cloud.calls import through_agent
from ...config import Config
from ...config.host_list import Host
from ...config.owned_machines import KEY, gpus_of
from ...config.types import Devices, SlurmConfig
from ...hardware.accelerators import find_accelerator
from ...hosts import facts as reading
from ...hosts import host_setup, probe
from ...hosts.facts import Facts
from ...hosts.fleet import hosts_of
from ...hosts.host_results import Implausible
from ...hosts.transport import Transport
from ...trust import untrusted_input
from ...trust.errors import BackendError
from ...trust.untrusted_input import show
from ..head import Head
from ..own_machines import Standing
from .client import SlurmClient, read_partitions
from .parallelcluster import Cluster

# sinfo columns: numbers first, names next, and administrators' free text last
COLUMNS = "%D|%c|%m|%R|%N|%G|%f"
MOST_ROWS = 1000
# seconds to wait for a free node to examine; without one, only sinfo's report is used
FREE_WITHIN = 20
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


USERS = {
    "ubuntu2204": "ubuntu",
    "ubuntu2404": "ubuntu",
    "rocky9": "rocky",
    "alinux2023": "ec2-user",
    "rhel9": "ec2-user",
}


class Login(Head):
    """SSH host with sbatch: the created cluster's head node, or the host in the config."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.folder = folder_of(config)

    @functools.cached_property
    def located(self) -> Config:
        fleet = self.config.fleet
        if fleet.hosts:
            return self.config
        address = Cluster(self.config).head()
        user = fleet.ssh.user or USERS[fleet.slurm.parallelcluster.os]
        ssh = replace(fleet.ssh, user=user)
        return replace(
            self.config,
            fleet=replace(fleet, hosts=(f"head={address}",) if address else (), ssh=ssh),
        )

    @functools.cached_property
    def transport(self) -> Transport:
        """Transport to the SSH host.

        Uses Session Manager if the created cluster has no open SSH port.
        """
        aws = self.fleet.aws
        proxy = through_agent(str(aws.region)) if aws.ssm_only and not self.fleet.hosts else ""
        return Transport(hosts_of(self.located), self.located.fleet.ssh, proxy=proxy)

    @property
    def leads(self) -> bool:
        return False  # no standby, because Slurm jobs need no launcher

    def enter(self) -> int:
        """Sets up the shared folder and Python on the nodes' shared file system, through the host.
        Returns an exit code.
        """
        self.look_again()
        return host_setup.main(self.located, whole=False)

    def known(self, name: str) -> Host | None:
        return as_slurm_says(name)


def folder_of(config: Config) -> str:
    """Returns the folder that contains runs/ and data/, as the nodes see it."""
    return config.fleet.shared_folder or str(Path.cwd())


def as_slurm_says(name: str) -> Host:
    """Returns a host with the node's Slurm name as both its name and its address."""
    return Host(name, name)
