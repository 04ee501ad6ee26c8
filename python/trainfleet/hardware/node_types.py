"""EC2 instance types, machine types that users own, and this machine.

hardware/accelerators.py describes their accelerators. The EC2 data is in instance_types.json, with
a source for each value.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from ..trust.validation import fit_row
from .accelerators import BY_NAME, CHIPS, Accelerator, find_accelerator

NEURON_DEVICES = Path("/sys/devices/virtual/neuron_device")  # Neuron Sysfs User Guide, SDK 2.32
RDMA = ("efa", "infiniband", "roce")  # networks with kernel bypass
FABRICS = (*RDMA, "ethernet")
# default network rates of servers and workstations, in Gbit/s
FAST, SLOW = 100, 10
LISTED = "2026-11-22"  # date of the on-demand prices in instance_types.json
# maximum instances and days of a capacity block (EC2 user guide, Capacity Blocks for ML)
BLOCK_NODES, BLOCK_DAYS = 64, 182.0


@dataclass(frozen=True)
class Tariff:
    """Pricing option: terms, US dollars per node-hour, the dated source, and the maximum number of
    nodes and days.
    """

    terms: str  # on-demand, block or own
    usd_per_hour: float
    source: str
    nodes: float = inf
    days: float = inf


@dataclass(frozen=True)
class NodeType:
    """EC2 instance type, or a type of machine that the user owns (fleet.accelerator).

    `vcpus`, `memory_gib` and `efa`, the number of EFA interfaces, are 0 if unknown. `usd_per_hour`
    is the on-demand price, or None if EC2 does not list it. `owned` marks types outside EC2. For
    those, `network` is one of FABRICS, or "" if unknown. `assumed` means that network_gbps is only
    the typical rate of such machines. `is_direct` means that the network accesses GPU memory
    directly (GPUDirect RDMA). `is_switched` means that the GPUs can communicate only while NVIDIA's
    fabric manager runs.

    The other fields apply to EC2 types. `slots` is the number of interfaces that network card 0
    supports, capped at the four that nodes need at most. `first_efa` is the first network card with
    EFA. `efa_only` means that EFA interfaces can't have IP addresses, so a plain interface comes
    first. `lustre_efa` is the number of EFA interfaces that an FSx client uses. `nvme_gb` is the
    size of local disks. `sold` contains on-demand, spot or block; every type can also be reserved.
    `quota` and `spot_quota` are its quota classes (cloud/template.py), or "" if AWS has not
    published them. `sagemaker` is whether SageMaker trains on the type, even if SageMaker's hourly
    price is unknown (None).
    """

    name: str
    vcpus: int
    memory_gib: int
    accelerator: Accelerator | None
    accelerators: int  # devices per node, one rank each
    network_gbps: float
    efa: int
    usd_per_hour: float | None
    owned: bool = False
    network: str = ""
    assumed: bool = False
    is_direct: bool = False
    is_switched: bool = False
    slots: int = 4
    first_efa: int = 0
    efa_only: bool = False
    lustre_efa: int = 0
    nvme_gb: int = 0
    sold: frozenset[str] = frozenset()
    quota: str = ""
    spot_quota: str = ""
    sagemaker: bool = False
    sagemaker_usd_per_hour: float | None = None
    block_usd_per_hour: float | None = None  # effective rate of a capacity block
    block_read: str = ""  # date of that rate

    @property
    def tariffs(self) -> tuple[Tariff, ...]:
        """Tariffs with a known price. Estimates use the first one."""
        if self.owned:
            price = self.usd_per_hour or 0.0
            return (Tariff("own", price, "fleet.accelerator.usd_per_hour"),)
        found = []
        if self.usd_per_hour is not None:
            source = f"on-demand list price in us-east-1, {LISTED}"
            found.append(Tariff("on-demand", self.usd_per_hour, source))
        if self.block_usd_per_hour is not None:
            source = f"capacity block's effective rate, {self.block_read}"
            limits = BLOCK_NODES, BLOCK_DAYS
            found.append(Tariff("block", self.block_usd_per_hour, source, *limits))
        return tuple(found)

    @property
    def kind(self) -> str:
        """Device kind: cuda or neuron, or cpu without an accelerator."""
        return self.accelerator.kind if self.accelerator else "cpu"

    @property
    def fabric(self) -> str:
        """Network fabric, one of FABRICS, or "" if unknown."""
        return self.network if self.owned else "efa" if self.efa else "ethernet"

    @property
    def family(self) -> str:
        """EC2 instance family, such as p5en."""
        return self.name.partition(".")[0]


def type_of(name: str, row: dict[str, Any]) -> NodeType:
    """Creates an EC2 type from its entry in instance_types.json.

    Raises KeyError if the type's accelerator is not in accelerators.json.
    """
    chip = row["accelerator"]
    own = {"name": name, "accelerator": chip and BY_NAME[chip], "sold": frozenset(row["sold"])}
    return fit_row(NodeType, row | own, TABLE, f'"{name}"')


TABLE = Path(__file__).with_name("instance_types.json")
_TABLE = json.loads(TABLE.read_text(encoding="utf-8"))
INSTANCE_TYPES = {name: type_of(name, row) for name, row in _TABLE["types"].items()}
# US dollars per hour of instance types without accelerators, for bastions and Slurm head nodes
HEADS: dict[str, float] = _TABLE["heads"]
# maximum EFA connections per FSx file system, one per client interface
LUSTRE_CONNECTIONS = 1024


def lustre_efa(row: NodeType, nodes: int) -> int:
    """Returns the number of EFA interfaces per node for an FSx file system, or 0 if FSx does not
    support EFA on this type.
    """
    return min(row.lustre_efa, max(1, LUSTRE_CONNECTIONS // nodes))


def reach_lustre() -> list[str]:
    """Returns the instance families that can access an FSx file system over EFA."""
    return list(dict.fromkeys(row.family for row in INSTANCE_TYPES.values() if row.lustre_efa))


def left_out(name: str) -> str:
    """Returns why instance_types.json excludes an EC2 type, or "" if unknown."""
    return next((why for begins, why in _TABLE["left_out"].items() if name.startswith(begins)), "")


def instance(name: str | None) -> NodeType | None:
    """Returns the named EC2 type, or None if the name is empty or unknown."""
    return INSTANCE_TYPES.get(name or "")


@dataclass(frozen=True)
class Node:
    """Part of a node that a job uses: its ranks, the reason for their number, and their platform.

    `cores` is the number of CPU cores per simulated node, if this machine simulates nodes with CPU
    ranks. Otherwise, it is 0.
    """

    ranks: int
    reason: str
    platform: str = "cpu"
    cores: int = 0


@functools.cache  # the layout search calls this thousands of times
def own_machine(
    name: str,
    per_node: int,
    memory_gib: float | None,
    network: str | None,
    gbps: float | None,
    usd_per_hour: float | None,
) -> NodeType | None:
    """Creates the type for owned machines with `per_node` accelerators, or returns None if the
    accelerator is unknown.

    None arguments default to typical values.
    """
    row = find_accelerator(name, None if memory_gib is None else memory_gib * 2**30)
    if row is None:
        return None
    if memory_gib is not None and not same_size(row, memory_gib):
        row = replace(
            row,
            name=f"{'-'.join(row.name.split('-')[:-1])}-{memory_gib:g}GB",
            memory_gib=row.memory_gib * memory_gib / row.size,
        )
    usual = usual_network(row, per_node, network)
    return NodeType(
        f"{per_node} x {row.name}",
        0,
        0,
        row,
        per_node,
        gbps or usual,
        0,
        usd_per_hour or 0.0,
        True,
        network or "",
        gbps is None,
        is_direct=network in RDMA and bool(row.links),
        is_switched=bool(row.links and row.bf16) and per_node >= 8,
    )


def same_size(row: Accelerator, memory_gib: float) -> bool:
    """Returns whether a memory size, in GB or GiB, matches the accelerator's nominal size or the
    size that its driver reports.
    """
    return 0.95 * row.memory_gib <= memory_gib <= 1.1 * max(row.size, row.memory_gib)


def usual_network(row: Accelerator, per_node: int, network: str | None) -> float:
    """Returns the typical network rate of nodes with this accelerator, in Gbit/s."""
    if network in RDMA and row.rail:
        return float(row.rail * per_node)
    return FAST if row.links or network in RDMA else SLOW


def node(row: NodeType | None, nodes: int) -> Node:
    """Returns a node of the given type.

    Without a type, this machine simulates all `nodes`, so the result is an equal share of it.
    """
    if row:
        unit = row.accelerator.name if row.accelerator else "CPU node"
        reason = (
            f"a node has {row.name}"
            if row.owned
            else f"{row.name}: {row.accelerators or 'one rank on a'} {unit}"
        )
        return Node(max(1, row.accelerators), reason, platform_of(row))
    devices = local_accelerators()
    if not devices:
        return Node(
            1, "a node without accelerators runs one rank", cores=max(1, local_cores() // nodes)
        )
    return Node(
        max(1, devices // nodes),
        f"this machine's {devices} accelerators, divided among {nodes} nodes",
        _local_platform(),
    )


def local_accelerators() -> int:
    """Counts this machine's accelerators from driver files, without loading a library or waking a
    driver.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    gpus = Path("/proc/driver/nvidia/gpus")
    # A container may have only the device files.
    found = list(gpus.iterdir()) if gpus.is_dir() else list(Path("/dev").glob("nvidia[0-9]*"))
    return len(found) or len(list(Path("/dev").glob("neuron[0-9]*"))) * local_chip()[1]


@functools.cache
def local_chip() -> tuple[Accelerator | None, int]:
    """Returns the core type of this machine's Neuron devices, and the number of cores per device.

    Returns (None, 1) if the device is unknown.
    """
    try:
        words = (
            (NEURON_DEVICES / "neuron0/info/architecture/instance_type").read_text().strip().lower()
        )
    except OSError:
        return None, 1
    return next((row for name, row in CHIPS.items() if words.startswith(name)), (None, 1))


@functools.cache
def local_accelerator() -> Accelerator | None:
    """Returns this machine's accelerator type, based on the driver's name for the first one.

    Returns None if the type is unknown.
    """
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = [
        line.partition(":")[2]
        for file in files[:1]
        for line in file.read_text().splitlines()
        if line.startswith("Model")
    ]
    if not local_accelerators():
        return None
    return find_accelerator(models[0]) if models else local_chip()[0]


def local_cores() -> int:
    """Counts the CPU cores that this process may use: its CPU affinity set, limited by the cgroup
    quota.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def local_memory() -> int:
    """Returns how much memory this process may use, in bytes.

    This is the machine's memory, or the limit of the cgroup (v2, or the root of v1) if it is lower.
    """
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *memory_limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def spare_memory() -> int | None:
    """Returns how many bytes new processes can use without swapping, or None if the kernel does not
    report it (not Linux).
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min(local_memory(), *found) if found else None


def memory_limits(root: Path, membership: Path) -> Iterator[int]:
    """Yields the memory limits of this process's cgroup and its ancestors
    (docs.kernel.org/admin-guide/cgroup-v2.html, memory.max).
    """
    try:
        groups = [
            line.split(":", 2)[2].lstrip("/")
            for line in membership.read_text().splitlines()
            if line.startswith("0::")
        ]
    except OSError:
        groups = []
    folders = [
        folder for group in groups or [""] for folder in ((root / group), *(root / group).parents)
    ]
    for file in [
        *(folder / "memory.max" for folder in folders if folder.is_relative_to(root)),
        root / "memory/memory.limit_in_bytes",
    ]:
        try:
            yield int(file.read_text())
        except (OSError, ValueError):  # missing, or "max"
            continue


def platform_of(row: NodeType | None) -> str:
    """Returns a node type's platform in docker/platforms.lock.yaml, which is cpu without
    accelerators.
    """
    return _platform_for(row.accelerator) if row and row.accelerator else "cpu"


def _local_platform() -> str:
    """Returns the platform that this machine's accelerators need."""
    known = local_accelerator()
    return (
        _platform_for(known)
        if known
        else "neuron"
        if any(Path("/dev").glob("neuron[0-9]*"))
        else "cuda"
    )


def _platform_for(accelerator: Accelerator) -> str:
    return accelerator.platform or accelerator.kind


def device_of(platform: str) -> str:
    """Returns the device kind (devices/) of a platform's ranks, regardless of other devices in the
    node.
    """
    return {"cuda-volta": "cuda", "neuron-xla": "neuron_xla"}.get(platform, platform)
