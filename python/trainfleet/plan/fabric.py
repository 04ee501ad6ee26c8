"""The fabric's environment, from the instance type: which variables are set, why, and which well-known ones are not. Pure.

Sources: libfabric's fi_efa(7); github.com/aws/aws-ofi-nccl; github.com/awslabs/awsome-distributed-ai, 1.architectures/
efa-cheatsheet.md; Neuron's setup-trn1-multi-node-execution and TorchNeuron's environment variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .. import hardware

# Families whose EFA reads GPU memory by itself (GPUDirect RDMA).
DIRECT = ("p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "p6-b300")
NCCL_LOGS = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}  # NCCL then logs over what it talks (watch/nccl.py)
FLOOR = 0.6  # of the line rate: sound links keep to it whatever the number of nodes; from reports, not measured by us


@dataclass(frozen=True)
class Setting:
    """One environment variable and its reason; a value of None: known from recipes, and left out on purpose."""

    name: str
    value: str | None
    why: str


def fabric_settings(instance_type: str | None, card: str) -> tuple[Setting, ...]:
    """What a rank on this instance type needs to use its fabric; `card` is the network card of the nodes' own addresses."""
    row = hardware.instance(instance_type)
    settings = [Setting("GLOO_SOCKET_IFNAME", card, "the card of the nodes' addresses; gloo would look the host name up")]
    if row is None or row.accelerator is None:
        return tuple(settings)
    if row.accelerator.kind == "cuda":
        settings.append(Setting("NCCL_SOCKET_IFNAME", f"={card}", "NCCL meets on this card, never on docker0 (=: exactly it)"))
    else:
        settings.append(Setting("CCOM_SOCKET_IFNAME", card, "Neuron's collectives meet on this card only"))
    if row.efa:
        settings += [*_efa(row), *_left_out(row)]
    return tuple(settings)


def _efa(row: hardware.InstanceType) -> Iterator[Setting]:
    yield Setting("FI_PROVIDER", "efa", f"{row.name} has {row.efa} EFA interfaces: without them fail, don't crawl over TCP")
    yield Setting("FI_EFA_USE_HUGE_PAGE", "0", "data loaders fork, and with EFA's huge pages os.fork runs out of memory")
    if row.accelerator and row.accelerator.kind == "neuron":
        yield Setting("FI_EFA_USE_DEVICE_RDMA", "1", "Neuron's collectives write to the other node's memory directly")
        yield Setting("FI_EFA_FORK_SAFE", "1", "kernels before 5.15 lose memory registrations at a fork")


def _left_out(row: hardware.InstanceType) -> Iterator[Setting]:
    yield Setting("FI_OFI_RXR_RX_COPY_UNEXP", None, "in recipes for libfabric 1.8 (2019); the option is gone")
    yield Setting("FI_OFI_RXR_RX_COPY_OOO", None, "as above")
    if row.accelerator and row.accelerator.kind == "cuda":
        yield Setting("NCCL_TREE_THRESHOLD", None, "in recipes for NCCL 2.4; NCCL 2.5 took it out")
        yield Setting(
            "NCCL_PROTO", None, "OFI-NCCL chooses by instance type since 1.7; `simple` would cost p5 and later bandwidth"
        )
        yield Setting("FI_EFA_USE_DEVICE_RDMA", None, "on by itself where the instance can, since libfabric 1.18")


def fabric_environment(instance_type: str | None, card: str) -> dict[str, str]:
    """The variables that are set."""
    return {setting.name: setting.value for setting in fabric_settings(instance_type, card) if setting.value is not None}


def least_bandwidth(instance_type: str | None) -> float | None:
    """Bus GB/s that an all-reduce must reach; None where there is no accelerator's fabric to judge by."""
    row = hardware.instance(instance_type)
    return FLOOR * row.network_gbps / 8 if row and row.accelerator and row.efa else None


def judge_nccl(lines: Iterable[str], instance_type: str | None) -> list[str]:
    """What NCCL's own words (NCCL_DEBUG=INFO) say against the fabric: EFA not used, too few interfaces, no GPUDirect."""
    row = hardware.instance(instance_type)
    if row is None or not row.efa or row.accelerator is None or row.accelerator.kind != "cuda":
        return []
    text = [line for line in lines if "NCCL INFO" in line or "NCCL WARN" in line]
    if not text:
        return ["NCCL said nothing: was NCCL_DEBUG=INFO set?"]
    wrong = []
    if not any("selected provider is efa" in line.lower() for line in text):
        instead = _first(text, "NET/Socket") or _first(text, "Using network") or "no network line"
        wrong.append(f"NCCL did not choose EFA: {instead}")
    found = [int(match[1]) for line in text if (match := re.search(r"is efa.*found ([0-9]{1,9}) nics", line))]
    if found and min(found) != row.efa:
        wrong.append(f"NCCL found {min(found)} EFA interfaces, {row.name} has {row.efa}")
    channels = [line for line in text if "via NET/" in line]
    if (instance_type or "").partition(".")[0] in DIRECT and channels and not any("GDRDMA" in line for line in channels):
        wrong.append(f"GPUDirect is off: {_first(channels, 'via NET/')}")
    return wrong


def _first(lines: list[str], word: str) -> str:
    return next((line[line.index("NCCL ") :].strip() for line in lines if word in line), "")
