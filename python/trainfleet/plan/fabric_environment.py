"""Defines the fabric's environment variables: which are set for each kind of network, which
well-known variables are not, and why. The functions have no side effects.

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

# Variables that make NCCL log which network it uses (parsed by watch/monitor.py)
NCCL_LOGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}
# Share of the line rate that healthy links reach with any number of nodes. It comes from reports,
# not from our measurements.
FLOOR = 0.6
# Names of the fabrics that NCCL uses through verbs, without a plug-in
RDMA = {"infiniband": "InfiniBand", "roce": "RoCE"}
PORTS = "<ports>"  # placeholder for the ports that a node detects


@dataclass(frozen=True)
class Setting:
    """An environment variable and the reason for its value. None means that recipes set the
    variable, but it stays unset on purpose.
    """

    name: str
    value: str | None
    why: str


def fabric_settings(
    kind: NodeType | None, card: str, ports: str = PORTS, alone: bool = False
) -> tuple[Setting, ...]:
    """Returns the variables that a rank on a node of this kind needs to use its fabric.

    `card` is the network card with the nodes' addresses. `ports` are its InfiniBand or RoCE ports,
    such as mlx5_0:1,mlx5_1:1, or "". `alone` means a job of one node. The ranks of such a job
    connect over loopback, which other machines can't reach.
    """
    card = LOOPBACK_CARD if alone else card
    settings = [
        Setting(
            "GLOO_SOCKET_IFNAME",
            card,
            "the card of the nodes' addresses; gloo would resolve the host name",
        )
    ]
    if kind is None or kind.accelerator is None:
        return tuple(settings)
    if kind.accelerator.kind == "cuda":
        settings.append(
            Setting(
                "NCCL_SOCKET_IFNAME",
                f"={card}",
                "NCCL meets on this card, never on docker0 (= means exactly this card)",
            )
        )
    if alone:
        return tuple(settings)  # A single node needs no other card, and may lack an EFA interface.
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
    yield Setting("FI_PROVIDER", "efa", f"{has}; without them the job fails, instead of using TCP")
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
    """Yields the settings for InfiniBand and RoCE, which NCCL uses without a plug-in."""
    yield Setting(
        "NCCL_NET",
        "IB",
        f"{RDMA[fabric]} through verbs; without it the job fails, instead of using TCP",
    )
    if ports:
        why = (
            f"the node's fastest active ports of {RDMA[fabric]} (= means exactly these), without a "
            "slower port for storage or logins"
        )
        yield Setting("NCCL_IB_HCA", f"={ports}", why)
    if fabric == "roce":
        yield Setting(
            "NCCL_IB_GID_INDEX", None, "NCCL finds the address of RoCE v2 since version 2.21"
        )
    yield Setting(
        "FI_PROVIDER", None, "libfabric's, for EFA: with efa, NCCL fails on nodes without EFA"
    )


def _plain(fabric: str) -> Iterator[Setting]:
    """Yields the settings for TCP, and for fleets without a network in their config."""
    if fabric:
        yield Setting(
            "NCCL_IB_DISABLE",
            "1",
            "plain Ethernet: NCCL would use a card with RDMA, and fail at the switches",
        )
    else:
        why = (
            "the config names no network (fleet.accelerator.network): NCCL uses RDMA if it "
            "finds a port, else TCP"
        )
        yield Setting("NCCL_NET", None, why)
    yield Setting(
        "FI_PROVIDER", None, "libfabric's, for EFA: with efa, NCCL fails on nodes without EFA"
    )


def _left_out(kind: NodeType) -> Iterator[Setting]:
    yield Setting(
        "FI_OFI_RXR_RX_COPY_UNEXP", None, "in recipes for libfabric 1.8 (2019); removed since"
    )
    yield Setting("FI_OFI_RXR_RX_COPY_OOO", None, "as above")
    if kind.kind == "cuda":
        yield Setting("NCCL_TREE_THRESHOLD", None, "in recipes for NCCL 2.4; NCCL 2.5 removed it")
        yield Setting(
            "NCCL_PROTO",
            None,
            "OFI-NCCL chooses by instance type since 1.7; `simple` would cost p5 and later "
            "bandwidth",
        )
        yield Setting(
            "FI_EFA_USE_DEVICE_RDMA",
            None,
            "on by default since libfabric 1.18, if the instance supports it",
        )


def fabric_environment(
    kind: NodeType | None, card: str, ports: str = "", alone: bool = False
) -> dict[str, str]:
    """Returns the variables to set, with their values."""
    settings = fabric_settings(kind, card, ports, alone)
    return {setting.name: setting.value for setting in settings if setting.value is not None}


def least_bandwidth(kind: NodeType | None) -> float | None:
    """Returns the bus bandwidth in GB/s that an all-reduce must reach. Returns None without a
    fabric for accelerators, or if its rate is assumed.
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
    few interfaces, no GPUDirect.
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
    """Checks the ports that NCCL uses and the link of each, from lines such as `NET/IB : Using
    [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE` (NCCL, net_ib.cc).
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
    """Returns the line of NCCL's log that names its network."""
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
