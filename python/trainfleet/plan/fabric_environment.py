"""Chooses the network fabric's environment variables. environment.yaml lists those that each fabric
sets, and well-known ones that it deliberately leaves unset, with the reasons.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ..config.tables import read_table
from ..hardware.node_types import NodeType
from ..node.placement import LOOPBACK_CARD

# makes NCCL log the network it uses, for watch/monitor.py to parse
NCCL_LOGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
# Fraction of line rate that healthy links are assumed to reach at any node count, based on reports
# rather than our own measurements.
FLOOR = 0.6
# fabrics that NCCL uses through verbs, without a plug-in
RDMA = {"infiniband": "InfiniBand", "roce": "RoCE"}
TABLE = read_table(Path(__file__).with_name("environment.yaml"))
PORTS = "<ports>"  # placeholder for the ports that a node detects


@dataclass(frozen=True)
class Setting:
    """Environment variable, with the reason for its value. None means that common recipes set it,
    but trainfleet deliberately does not.
    """

    name: str
    value: str | None
    why: str


def settings_of(groups: Iterable[str], **words: str) -> Iterator[Setting]:
    """Yields the variables in these groups of environment.yaml, with `words` filled in."""
    for name, value, why in chain.from_iterable(TABLE.get(group, ()) for group in groups):
        yield Setting(name, value and value.format(**words), why.format(**words))


def fabric_settings(
    kind: NodeType | None, card: str, ports: str = PORTS, alone: bool = False
) -> tuple[Setting, ...]:
    """Returns the variables that a rank on a node of this kind needs to use its fabric.

    `card` is the network interface with the node's address. `ports` lists the node's InfiniBand or
    RoCE ports, such as mlx5_0:1,mlx5_1:1, or is "". `alone` means a single-node job. Its ranks
    connect over loopback, so that other machines can't reach them.
    """
    words = {"card": LOOPBACK_CARD if alone else card, "ports": ports}
    if kind:
        has = f"{kind.name} has {kind.efa} EFA interfaces" if kind.efa else "the nodes have EFA"
        words |= {"has": has, "network": RDMA.get(kind.fabric, "")}
    return tuple(settings_of(_groups(kind, ports, alone), **words))


def _groups(kind: NodeType | None, ports: str, alone: bool) -> Iterator[str]:
    yield "any"
    if kind is None or kind.accelerator is None:
        return
    if kind.kind == "cuda" or not alone:
        yield kind.kind
    if alone:
        return  # a single node needs only loopback, and may lack an EFA interface
    if kind.fabric == "efa":
        yield from ("efa", f"efa {kind.kind}", "efa unset", f"efa unset {kind.kind}")
    elif kind.fabric in RDMA:
        yield from ("verbs", *["ports"] * bool(ports), kind.fabric, "not efa")
    elif kind.owned:
        yield from (kind.fabric or "unknown", "not efa")


def fabric_environment(
    kind: NodeType | None, card: str, ports: str = "", alone: bool = False
) -> dict[str, str]:
    """Returns the variables to set, with their values."""
    return values_of(fabric_settings(kind, card, ports, alone))


def values_of(settings: Iterable[Setting]) -> dict[str, str]:
    return {setting.name: setting.value for setting in settings if setting.value is not None}


def least_bandwidth(kind: NodeType | None) -> float | None:
    """Returns the minimum all-reduce bus bandwidth in GB/s, or None if there is no accelerator
    fabric or its rate is only assumed.
    """
    if (
        kind is None
        or kind.accelerator is None
        or kind.assumed
        or kind.fabric not in ("efa", *RDMA)
    ):
        return None
    return FLOOR * kind.network_gbps / 8


def judge_nccl(lines: Iterable[str], kind: NodeType | None) -> list[str]:
    """Returns the problems in NCCL's log (NCCL_DEBUG=INFO): a network other than the fabric, too
    few interfaces, or no GPUDirect.
    """
    if kind is None or kind.kind != "cuda" or kind.fabric not in ("efa", *RDMA):
        return []
    text = [line for line in lines if re.search("NCCL (INFO|WARN)", line)]
    if not text:
        return ["NCCL printed nothing: check that NCCL_DEBUG=INFO is set"]
    wrong = list(
        _judge_efa(text, kind) if kind.fabric == "efa" else _judge_verbs(text, kind.fabric)
    )
    channels = [line for line in text if "via NET/" in line]
    if kind.is_direct and channels and not any("GDRDMA" in line for line in channels):
        wrong.append(f"GPUDirect is off: {_first(channels, 'via NET/')}")
    return wrong


def _judge_efa(text: list[str], kind: NodeType) -> Iterator[str]:
    if not any("selected provider is efa" in line.lower() for line in text):
        yield f"NCCL did not choose EFA: {_chosen(text)}"
    found = [
        int(match[1])
        for line in text
        if (match := re.search(r"is efa.*found ([0-9]{1,9}) nics", line))
    ]
    if found and kind.efa and min(found) != kind.efa:
        yield f"NCCL found {min(found)} EFA interfaces, {kind.name} has {kind.efa}"


def _judge_verbs(text: list[str], fabric: str) -> Iterator[str]:
    """Yields a problem if NCCL does not use the fabric's ports, according to log lines such as
    `NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE` (NCCL, net_ib.cc).
    """
    spoken = {
        word
        for line in text
        if "NET/IB" in line
        for word in re.findall(r"\][^\s/]{1,99}/(IB|RoCE)\b", line)
    }
    if not any(re.search(r"Using network IB", line) for line in text):
        yield f"NCCL did not choose {RDMA[fabric]}: {_chosen(text)}"
    elif spoken and {"infiniband": "IB", "roce": "RoCE"}[fabric] not in spoken:
        instead = (
            f"NCCL uses {' and '.join(sorted(spoken))}, not {RDMA[fabric]} "
            "(fleet.accelerator.network)"
        )
        yield f"{instead}: {_first(text, 'NET/IB')}"


def _chosen(text: list[str]) -> str:
    """Returns the line of NCCL's log that names the network it chose."""
    return next(
        (
            said
            for word in ("NET/Socket", "Using network", "NET/IB")
            if (said := _first(text, word))
        ),
        "no network line",
    )


def _first(lines: list[str], word: str) -> str:
    return next((line[line.index("NCCL ") :].strip() for line in lines if word in line), "")
