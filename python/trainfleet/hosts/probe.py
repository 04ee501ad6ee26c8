"""Derives fleet.accelerator from a node's hardware, and compares the hardware with the config.

The functions are pure and depend only on facts (facts.py). `make doctor` prints the result for
users who do not know their hardware.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict

from ..config.types import Devices, Fleet
from ..hardware.accelerators import Accelerator, find_accelerator, unsupported
from ..hardware.node_types import RDMA, NodeType, same_size
from ..process.rdma_adapters import Port, fastest
from .facts import Facts, Gpu

WORDS = {"efa": "EFA", "infiniband": "InfiniBand", "roce": "Ethernet (RoCE)"}
# fraction of the expected Gbit/s or GiB below which a port or GPU is reported
LESS = 0.95


def row_of(facts: Facts) -> Accelerator | None:
    """Returns the accelerator table entry for a node's GPUs.

    Returns None if the node has no GPUs, has several models, or has a model that the table does not
    contain.
    """
    kinds = {(gpu.name, gpu.memory_mib) for gpu in facts.gpus}
    name, mib = next(iter(kinds)) if len({name for name, _ in kinds}) == 1 else ("", 0)
    return find_accelerator(name, mib * 2.0**20) if name else None


def devices_of(facts: Facts) -> Devices | None:
    """Returns the fleet.accelerator value for a node, or None if its GPUs are not in the
    accelerator table.
    """
    row = row_of(facts)
    if row is None:
        return None
    least = _least_gib(facts.gpus)
    memory = float(row.size) if same_size(row, least) else round(least, 1)
    network, gbps = network_of(facts)
    return Devices(row.label, len(facts.gpus), memory, network, gbps or None)


def network_of(facts: Facts) -> tuple[str, float]:
    """Returns the fabric between nodes, and its total Gbit/s per node.

    Without RDMA, uses the fastest Ethernet interface. The speed is 0 if unknown.
    """
    for fabric in RDMA:
        if ports := used(facts, fabric):
            return fabric, sum(port.gbps for port in ports)
    cards = [rate for card, rate in facts.speeds.items() if card != "lo"]
    return "ethernet", max(cards, default=0) / 1000


def used(facts: Facts, fabric: str) -> tuple[Port, ...]:
    """Returns the ports that training would use: the fastest ones.

    If the GPU topology is known, returns only those next to a GPU.
    """
    ports, near = fastest(facts.ports, fabric), facts.topology.near if facts.topology else ()
    return tuple(port for port in ports if port.adapter in near) or ports


def block(devices: Devices) -> str:
    """Returns the lines to copy into the config."""
    values = {name: value for name, value in asdict(devices).items() if value is not None}
    words = [
        f"{name}: {f'{value:g}' if isinstance(value, float) else value}"
        for name, value in values.items()
    ]
    return f"fleet:\n  accelerator: {{{', '.join(words)}}}"


def describe(facts: Facts) -> Iterator[str]:
    """Yields lines that describe a node's hardware."""
    yield from _gpus(facts)
    if facts.slices:
        yield f"{_sliced(facts)}; on that host, run: sudo nvidia-smi -mig 0"
    yield from (f"nvidia-smi reports: {line}" for line in facts.gpu_trouble)
    if not facts.gpus and "nvidia" in facts.bus:
        yield f"{facts.bus.count('nvidia')} NVIDIA GPUs are on the PCI bus, but no driver responds"
    for maker, what in (("amd", "AMD Instinct"), ("gaudi", "Gaudi")):
        if count := facts.bus.count(maker):
            yield f"{count} x {what} on the PCI bus: {unsupported(maker)}"
    if facts.cores:
        yield f"{facts.cores} cores, {facts.memory_kib / 2**20:,.0f} GiB of memory"
    yield from _ports(facts)


def _gpus(facts: Facts) -> Iterator[str]:
    """Yields lines about each model of a node's GPUs."""
    names = sorted({gpu.name for gpu in facts.gpus})
    for name in names:
        alike = [gpu for gpu in facts.gpus if gpu.name == name]
        size = f"{_least_gib(alike):.1f} GiB"
        yield f"{len(alike)} x {name}, {size}, driver {alike[0].driver}{_joined(facts)}"
        if find_accelerator(name) is None:
            why = "not in hardware/accelerators.json, so its speed can't be predicted"
            yield f"{name}: {unsupported(name) or why}"
    if len(names) > 1:
        yield (
            "the GPU models differ: ranks wait for the slowest GPU; select one model with "
            "CUDA_VISIBLE_DEVICES or gres"
        )


def _sliced(facts: Facts) -> str:
    return f"MIG splits its GPUs into {facts.slices} slices, but a rank needs a whole GPU"


def _least_gib(gpus: Iterable[Gpu]) -> float:
    return min(gpu.memory_mib for gpu in gpus) / 2**10


def _joined(facts: Facts) -> str:
    """Describes the links between a node's GPUs, or returns "" if the topology is unknown."""
    found = facts.topology
    if found is None or len(facts.gpus) < 2:
        return ""
    if found.fewest:
        return f"; each pair has {found.fewest} NVLinks" + (
            " or more" if found.most > found.fewest else ""
        )
    if found.most:
        return "; some pairs are connected by NVLink, others only by PCIe"
    return "; connected by PCIe, without NVLink"


def _ports(facts: Facts) -> Iterator[str]:
    """Yields lines about a node's RDMA ports, starting with those that training would use."""
    for fabric, words in WORDS.items():
        ports = [port for port in facts.ports if port.fabric == fabric]
        chosen = used(facts, fabric)
        if chosen:
            names = ", ".join(port.adapter for port in chosen)
            yield (
                f"{len(chosen)} {words} port{'s' * (len(chosen) > 1)} of {chosen[0].gbps:g} "
                f"Gbit/s: {names}"
            )
        if rest := [port for port in ports if port not in chosen]:
            state = ", ".join(
                f"{port.adapter} ({port.gbps:g} Gbit/s{'' if port.active else ', down'})"
                for port in rest
            )
            yield f"{words} ports that training does not use: {state}"
    if not facts.ports:
        told = ", ".join(
            f"{card} {rate / 1000:g} Gbit/s" for card, rate in facts.speeds.items() if card != "lo"
        )
        yield f"no RDMA adapter; network: {told or 'its network cards report no speed'}"


def differing(facts: Facts, fleet: Fleet) -> Iterator[str]:
    """Yields one line per mismatch between a node's hardware and the config."""
    kind = fleet.node_type
    if kind is None or kind.kind != "cuda" or not facts.gpus or kind.accelerator is None:
        return
    row, wanted, least = row_of(facts), kind.accelerator, _least_gib(facts.gpus)
    names = ", ".join(sorted({gpu.name for gpu in facts.gpus}))
    if (row.words != wanted.words) if row else kind.owned:
        yield f"its GPUs are {names}, but the config has {wanted.label}"
    elif least < LESS * wanted.memory_gib:
        yield f"its GPUs have {least:.1f} GiB, but the config has {wanted.name}"
    if facts.slices:
        yield _sliced(facts)
    if fleet.nodes > 1:
        yield from _differing_ports(facts, kind)


def _differing_ports(facts: Facts, kind: NodeType) -> Iterator[str]:
    if not kind.owned or kind.fabric not in RDMA:
        return
    ports, words = fastest(facts.ports, kind.fabric), WORDS[kind.fabric]
    carried = sum(port.gbps for port in ports)
    if not ports:
        down = ", ".join(port.adapter for port in facts.ports if port.fabric == kind.fabric)
        yield (
            f"it has no active {words} port{f' ({down}: down)' if down else ''}, but the "
            f"config has {kind.fabric}"
        )
    elif not kind.assumed and carried < LESS * kind.network_gbps:
        yield (
            f"its {len(ports)} {words} ports have {carried:g} Gbit/s in total, but the config "
            f"has {kind.network_gbps:g}"
        )
