"""The fabric's environment, from what joins the nodes: which variables are set, why, and which
well-known ones are not. Pure.

Sources: libfabric's fi_efa(7); github.com/aws/aws-ofi-nccl;
github.com/awslabs/awsome-distributed-ai, 1.architectures/ efa-cheatsheet.md; Neuron's
setup-trn1-multi-node-execution and TorchNeuron's environment variables; NCCL's user guide 2.30,
"Environment Variables".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..hardware.node_types import NodeType
from ..node.placement import LOOPBACK_CARD

# NCCL then logs over what it talks (watch/monitor.py)
NCCL_LOGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
# of the line rate: sound links keep to it whatever the number of nodes; from reports, not measured
# by us
FLOOR = 0.6
# the fabrics that NCCL itself speaks by verbs, in words
RDMA = {"infiniband": "InfiniBand", "roce": "RoCE"}
PORTS = "<ports>"  # stands for what a node finds


@dataclass(frozen=True)
class Setting:
    """One environment variable and its reason; a value of None: known from recipes, and left out on
    purpose.
    """

    name: str
    value: str | None
    why: str


def fabric_settings(
    kind: NodeType | None, card: str, ports: str = PORTS, alone: bool = False
) -> tuple[Setting, ...]:
    """What a rank on such a node needs to use its fabric.

    `card` is the network card of the nodes' own addresses; `ports`: those of InfiniBand or RoCE, as
    mlx5_0:1,mlx5_1:1, "" where none was found; `alone`: there is no other node. The ranks of one
    node meet on its loopback, where nobody else listens in.
    """
    card = LOOPBACK_CARD if alone else card
    settings = [
        Setting(
            "GLOO_SOCKET_IFNAME",
            card,
            "the card of the nodes' addresses; gloo would look the host name up",
        )
    ]
    if kind is None or kind.accelerator is None:
        return tuple(settings)
    if kind.accelerator.kind == "cuda":
        settings.append(
            Setting(
                "NCCL_SOCKET_IFNAME",
                f"={card}",
                "NCCL meets on this card, never on docker0 (=: exactly it)",
            )
        )
    if alone:
        return tuple(settings)  # its ranks need no other card, and it may have no EFA interface
    if kind.accelerator.kind != "cuda":
        settings.append(
            Setting("CCOM_SOCKET_IFNAME", card, "Neuron's collectives meet on this card only")
        )
    if kind.fabric == "efa":
        settings += [*_efa(kind), *_left_out(kind)]
    elif kind.owned:
        settings += _verbs(kind.fabric, ports) if kind.fabric in RDMA else _plain(kind.fabric)
    return tuple(settings)


def _efa(kind: NodeType) -> Iterator[Setting]:
    has = f"{kind.name} has {kind.efa} EFA interfaces" if kind.efa else "the nodes have EFA"
    yield Setting("FI_PROVIDER", "efa", f"{has}: without them fail, don't crawl over TCP")
    yield Setting(
        "FI_EFA_USE_HUGE_PAGE",
        "0",
        "data loaders fork, and with EFA's huge pages os.fork runs out of memory",
    )
    if kind.kind == "neuron":
        yield Setting(
            "FI_EFA_USE_DEVICE_RDMA",
            "1",
            "Neuron's collectives write to the other node's memory directly",
        )
        yield Setting(
            "FI_EFA_FORK_SAFE", "1", "kernels before 5.15 lose memory registrations at a fork"
        )


def _verbs(fabric: str, ports: str) -> Iterator[Setting]:
    """InfiniBand and RoCE, which NCCL speaks by itself."""
    yield Setting(
        "NCCL_NET",
        "IB",
        f"{RDMA[fabric]} by verbs, or an error: without it fail, don't crawl over TCP",
    )
    if ports:
        why = (
            f"the node's fastest active ports of {RDMA[fabric]} (=: exactly these), and no "
            "slower one for storage or logins"
        )
        yield Setting("NCCL_IB_HCA", f"={ports}", why)
    if fabric == "roce":
        yield Setting(
            "NCCL_IB_GID_INDEX", None, "NCCL finds the address of RoCE v2 by itself since 2.21"
        )
    yield Setting(
        "FI_PROVIDER", None, "libfabric's, for EFA: with efa, NCCL fails where there is none"
    )


def _plain(fabric: str) -> Iterator[Setting]:
    """TCP, and a fabric that nobody has named."""
    if fabric:
        yield Setting(
            "NCCL_IB_DISABLE",
            "1",
            "plain Ethernet: a card that can do RDMA would be taken, and fail by its switches",
        )
    else:
        why = (
            "what joins the nodes is not told (fleet.accelerator.network): NCCL takes RDMA "
            "where it finds a port, else TCP"
        )
        yield Setting("NCCL_NET", None, why)
    yield Setting(
        "FI_PROVIDER", None, "libfabric's, for EFA: with efa, NCCL fails where there is none"
    )


def _left_out(kind: NodeType) -> Iterator[Setting]:
    yield Setting(
        "FI_OFI_RXR_RX_COPY_UNEXP", None, "in recipes for libfabric 1.8 (2019); the option is gone"
    )
    yield Setting("FI_OFI_RXR_RX_COPY_OOO", None, "as above")
    if kind.kind == "cuda":
        yield Setting("NCCL_TREE_THRESHOLD", None, "in recipes for NCCL 2.4; NCCL 2.5 took it out")
        yield Setting(
            "NCCL_PROTO",
            None,
            "OFI-NCCL chooses by instance type since 1.7; `simple` would cost p5 and later "
            "bandwidth",
        )
        yield Setting(
            "FI_EFA_USE_DEVICE_RDMA",
            None,
            "on by itself where the instance can, since libfabric 1.18",
        )


def fabric_environment(
    kind: NodeType | None, card: str, ports: str = "", alone: bool = False
) -> dict[str, str]:
    """The variables that are set."""
    settings = fabric_settings(kind, card, ports, alone)
    return {setting.name: setting.value for setting in settings if setting.value is not None}


def least_bandwidth(kind: NodeType | None) -> float | None:
    """Bus GB/s that an all-reduce must reach; None where there is no accelerator's fabric to judge
    by, or its rate is a guess.
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
    """What NCCL's own words (NCCL_DEBUG=INFO) say against the fabric: it is not used, too few
    interfaces, no GPUDirect.
    """
    if kind is None or kind.kind != "cuda" or kind.fabric not in ("efa", *RDMA):
        return []
    text = [line for line in lines if "NCCL INFO" in line or "NCCL WARN" in line]
    if not text:
        return ["NCCL said nothing: was NCCL_DEBUG=INFO set?"]
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
    """`NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE`: which ports NCCL takes, and what each
    speaks (NCCL, net_ib.cc).
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
            f"NCCL speaks {' and '.join(sorted(spoken))}, not {RDMA[fabric]} "
            "(fleet.accelerator.network)"
        )
        yield f"{instead}: {_first(text, 'NET/IB')}"


def _chosen(text: list[str]) -> str:
    """NCCL's own line on what it talks over."""
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
