"""Checks whether the machines of a job's nodes still answer, by asking each: Slurm notices a dead
one only after SlurmdTimeout.

Each is asked for a TCP connection to its slurmd's port. A refusal is an answer too: then only
slurmd has ended. A node counts as absent only if another node of the job answers: if none does, the
network between here and them may be down.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from errno import EHOSTDOWN, EHOSTUNREACH, ENETUNREACH, ETIMEDOUT

from ...trust import untrusted_input
from ...trust.errors import BackendError
from .client import SlurmClient

WAIT = 5.0  # seconds for a machine to answer: its kernel does, even under load
AT_ONCE = 64  # machines that are asked at once
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,252}"
# scontrol shows a port only if a node has its own. An administrator's free text follows all of
# this.
NODE = re.compile(
    rf"NodeName=({NAME}) .*?\bNodeAddr=([A-Za-z0-9_.:-]{{1,253}}) NodeHostName=\S+(?: "
    rf"Port=([0-9]{{1,5}}))?(?= |$)"
)
PORT = re.compile(r"(?m)^SlurmdPort\s*=\s*([0-9]{1,5})\s*$")
UNHEARD = (EHOSTDOWN, EHOSTUNREACH, ENETUNREACH, ETIMEDOUT)


@dataclass(frozen=True)
class SlurmdAddress:
    """The address of a node's slurmd."""

    address: str
    port: int


def absent(engine: SlurmClient, hosts: Sequence[str]) -> dict[str, str]:
    """Returns the machines that do not answer, each with a message; empty if no other answers, or
    Slurm reports no addresses.
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
        host: f"no answer from {known[host].address}, port {known[host].port} (slurmd), {told}"
        for host in gone
    }


def places(engine: SlurmClient, hosts: Sequence[str]) -> dict[str, SlurmdAddress]:
    """Returns the slurmd addresses of these machines that Slurm reports."""
    asked = [host for host in hosts if re.fullmatch(NAME, host)]
    if not asked:
        return {}
    try:
        usual = PORT.search(engine.run("scontrol", "show", "config"))
        rows = engine.run("scontrol", "--oneliner", "show", "node", ",".join(asked)).splitlines()
    except BackendError:  # slurmctld is being restarted, and reports nothing
        return {}
    found = [match for row in rows if (match := NODE.match(row)) and match[1] in asked]
    ports = [untrusted_input.whole(match[3] or (usual[1] if usual else "")) for match in found]
    return {
        match[1]: SlurmdAddress(match[2], port)
        for match, port in zip(found, ports, strict=True)
        if port and port < 2**16
    }


def answer(place: SlurmdAddress) -> bool | None:
    """Tells whether a machine answers; None if that is unknown, as its name does not resolve."""
    try:
        socket.create_connection((place.address, place.port), WAIT).close()
    except (TimeoutError, OSError) as error:
        if isinstance(error, ConnectionError):
            return True
        return False if isinstance(error, TimeoutError) or error.errno in UNHEARD else None
    return True
