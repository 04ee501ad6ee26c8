"""Checks that a cluster can run a job before the job is submitted, because sbatch might otherwise
reject it or leave it pending forever.

While a job runs, also checks whether its nodes respond, because Slurm detects a dead node only
after SlurmdTimeout. Each check opens a TCP connection to slurmd's port on the node. A refused
connection also counts as a response, because it means that only slurmd has stopped. A node counts
as absent only if another node of the job responds. If none respond, the network between this
machine and the nodes may be down.
"""

from __future__ import annotations

import getpass
import re
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from errno import EHOSTDOWN, EHOSTUNREACH, ENETUNREACH, ETIMEDOUT

from ...config.types import SlurmConfig
from ...trust import untrusted_input
from ...trust.errors import BackendError
from .client import Partition, SlurmClient, read_partitions, refused

PARTITION = "fleet.slurm.partition"
# seconds for nodes to register after slurmctld starts, before which they can't be allocated
REGISTERS = 60.0
# Messages about unavailable or busy nodes, for which a job can wait, so sbatch still accepts it:
# ESLURM_NODE_NOT_AVAIL and ESLURM_NODES_BUSY (slurm_errno.c).
WAITS = re.compile("(?i)required node not available|requested nodes are busy")


def require(
    engine: SlurmClient, slurm: SlurmConfig, nodes: int, script: str, without: Mapping[str, str]
) -> None:
    """Raises BackendError if the cluster can't run the job. The message lists the partitions or
    hosts.
    """
    chosen = partitions(engine, slurm)
    _require_time(slurm, chosen)
    names = ",".join(row.name for row in chosen)
    _require_nodes(engine, nodes, names, without)
    said, until = engine.sbatch(["--test-only"], script, {}), time.monotonic() + REGISTERS
    while said.code and time.monotonic() < until and _nodes(engine, names, "--states=unknown"):
        time.sleep(1)
        said = engine.sbatch(["--test-only"], script, {})
    if not said.code or WAITS.search(said.error + said.out):
        return
    error = refused("sbatch", said.error + said.out)
    # not an error if nodes are down or drained, because the job can wait for them
    if error.where != "fleet.nodes" or not engine.unavailable(names):
        raise explained(engine, error)


def partitions(engine: SlurmClient, slurm: SlurmConfig) -> list[Partition]:
    """Returns the configured partitions, or the cluster's default partition.

    Raises:
        BackendError: a partition does not exist or is not accepting jobs. The message lists the
            cluster's partitions.
    """
    rows = read_partitions(engine.run("scontrol", "--oneliner", "show", "partition"))
    asked = set(filter(None, (slurm.partition or "").split(",")))
    names = [row.name for row in rows]
    known = ", ".join(names)
    chosen = [row for row in rows if (row.name in asked if asked else row.is_default)]
    then = f"make plan SET='{PARTITION}={rows[0].name}'" if rows else "sinfo"
    if unknown := sorted(asked - {*names}):
        raise BackendError(
            f"partition {', '.join(unknown)} does not exist; the cluster has {known}",
            where=PARTITION,
            next=then,
        )
    if not chosen:
        raise BackendError(
            f"the cluster has no default partition; its partitions are {known}",
            where=PARTITION,
            next=then,
        )
    if not any(row.is_up for row in chosen):
        up = ", ".join(row.name for row in rows if row.is_up) or "none"
        raise BackendError(
            f"partition {chosen[0].name} does not accept jobs now; partitions that do: {up}",
            where=PARTITION,
            next="sinfo",
        )
    return chosen


def _require_time(slurm: SlurmConfig, chosen: Sequence[Partition]) -> None:
    """Raises BackendError if the time limit exceeds the partitions' limits.

    sbatch would accept such a job from an administrator, but Slurm would never start it.
    """
    limits = [row.most_minutes for row in chosen if row.most_minutes is not None]
    if (
        slurm.time_limit_minutes is not None
        and len(limits) == len(chosen)
        and slurm.time_limit_minutes > max(limits)
    ):
        what = (
            f"{slurm.time_limit_minutes} min exceeds the limit of partition {chosen[0].name}, "
            f"{max(limits)} min"
        )
        key = "fleet.slurm.time_limit_minutes"
        raise BackendError(
            what,
            where=key,
            next=(
                f"make plan SET='{key}={max(limits)}'; the job then requeues itself at the limit"
            ),
        )


def _require_nodes(engine: SlurmClient, nodes: int, names: str, without: Mapping[str, str]) -> None:
    """Raises BackendError if the partitions have fewer than `nodes` hosts, not counting
    `without`.
    """
    hosts = _nodes(engine, names)
    out = {host: why for host, why in without.items() if host in hosts}
    left = len(hosts) - len(out)
    if left < nodes:
        rows = "".join(f"\n  {host}: {why}" for host, why in out.items())
        raise BackendError(
            f"the job needs {nodes} nodes, but only {left} of {len(hosts)} hosts can take a job"
            f"{rows}",
            where=f"partition {names}",
            next=f"set NODES={left}, or another {PARTITION}" if left else "sinfo -R",
        )


def _nodes(engine: SlurmClient, names: str, *states: str) -> list[str]:
    return sorted(
        set(
            engine.run(
                "sinfo", "--noheader", "--Node", f"--partition={names}", *states, "--format=%N"
            ).split()
        )
    )


def explained(engine: SlurmClient, error: BackendError) -> BackendError:
    """Adds the user's accounts and QOS to the error if accounting lists them."""
    if error.where not in ("fleet.slurm.account", "fleet.slurm.qos"):
        return error
    user = getpass.getuser()
    said = engine.ask(
        ["sacctmgr", "-n", "-P", "show", "assoc", f"user={user}", "format=account,qos"], "", None
    )
    rows = [line.partition("|") for line in said.out.splitlines() if "|" in line]
    if said.code or not rows:
        return error
    yours = "; ".join(
        f"account {account} with {qos.rstrip('|') or 'no QOS'}" for account, _, qos in rows
    )
    return BackendError(
        f"{error.what}; {user} has {yours}", where=error.where, why=error.why, next=error.next
    )


def require_private(engine: SlurmClient) -> None:
    """Raises BackendError if the cluster's accounting stores job environments, which contain
    secrets.
    """
    said = engine.run("scontrol", "show", "config")
    if re.search(r"(?m)^AccountingStoreFlags\s*=.*\bjob_env\b", said):
        raise BackendError(
            "can't pass secrets to this cluster",
            where="fleet.secrets",
            why="AccountingStoreFlags includes job_env, so the cluster's database would store "
            "their values",
            next="ask its administrators to remove job_env, or use SET='fleet.secrets=[]'",
        )


WAIT = 5.0  # connection timeout in seconds; the kernel responds even under load
AT_ONCE = 64  # maximum concurrent connections
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}"
# scontrol shows a port only if it differs from the default. Free text from administrators comes
# after all of these fields.
NODE = re.compile(
    rf"NodeName=({NAME}) .*?\bNodeAddr=([A-Za-z0-9_.:-]{{1,253}}) NodeHostName=\S+(?: "
    rf"Port=([0-9]{{1,5}}))?(?= |$)"
)
PORT = re.compile(r"(?m)^SlurmdPort\s*=\s*([0-9]{1,5})\s*$")
UNHEARD = (EHOSTDOWN, EHOSTUNREACH, ENETUNREACH, ETIMEDOUT)


Address = tuple[str, int]  # address and port of a node's slurmd


def absent(engine: SlurmClient, hosts: Sequence[str]) -> dict[str, str]:
    """Returns machine → message for the machines that do not respond.

    Returns {} if no other machine responds, or if Slurm reports no addresses.
    """
    known = places(engine, hosts)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = dict(zip(known, pool.map(answer, known.values()), strict=True))
    there = sum(said is True for said in answers.values())
    told = (
        f"while {there} other node{'' if there == 1 else 's'} of the job "
        f"answer{'s' if there == 1 else ''}"
    )
    gone = [host for host, said in answers.items() if there and said is False]
    return {
        host: f"no answer from {known[host][0]}, port {known[host][1]} (slurmd), {told}"
        for host in gone
    }


def places(engine: SlurmClient, hosts: Sequence[str]) -> dict[str, Address]:
    """Returns machine → slurmd address, as reported by Slurm."""
    asked = [host for host in hosts if re.fullmatch(NAME, host)]
    if not asked:
        return {}
    try:
        usual = PORT.search(engine.run("scontrol", "show", "config"))
        rows = engine.run("scontrol", "--oneliner", "show", "node", ",".join(asked)).splitlines()
    except BackendError:  # slurmctld is restarting, so the addresses are unknown
        return {}
    found = [match for row in rows if (match := NODE.match(row)) and match[1] in asked]
    ports = [untrusted_input.whole(match[3] or (usual[1] if usual else "")) for match in found]
    return {
        match[1]: (match[2], port)
        for match, port in zip(found, ports, strict=True)
        if port and port < 2**16
    }


def answer(place: Address) -> bool | None:
    """Returns whether a machine responds, or None if its name does not resolve."""
    try:
        socket.create_connection(place, WAIT).close()
    except (TimeoutError, OSError) as error:
        if isinstance(error, ConnectionError):
            return True
        return False if isinstance(error, TimeoutError) or error.errno in UNHEARD else None
    return True
