"""Describes the kinds of nodes, and this machine. The accelerators of nodes:
hardware/accelerators.py.

EC2's types are rows of instance_types.json, which names each figure's source.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .accelerators import BY_NAME, CHIPS, Accelerator, find_accelerator

NEURON_DEVICES = Path("/sys/devices/virtual/neuron_device")  # Neuron Sysfs User Guide, SDK 2.32
RDMA = ("efa", "infiniband", "roce")  # fabrics that bypass the nodes' kernels
FABRICS = (*RDMA, "ethernet")
# Gbit/s of a node's network if the config does not set it: of a server, of a workstation
FAST, SLOW = 100, 10


@dataclass(frozen=True)
class NodeType:
    """A kind of node: an EC2 type, or machines that somebody owns (fleet.accelerator).

    vCPUs, memory in GiB (0: unknown), accelerator, network in Gbit/s, EFA interfaces (0: none or
    unknown), US dollars per hour (None: sold as capacity blocks only). `owned`: it is not an EC2
    type. For owned ones, `network`: one of FABRICS, "" if unknown; `assumed`: network_gbps is the
    usual rate of such machines. `is_direct`: its network reads and writes the memory of its GPUs
    (GPUDirect RDMA). `is_switched`: its GPUs communicate only while NVIDIA's fabric manager runs.

    For EC2's types: `slots`, the interfaces that network card 0 holds, of the four that are ever
    needed; `first_efa`, the first card that has EFA; `efa_only`, its EFA interfaces take no
    addresses, so a plain one comes first; `lustre_efa`, the number of them that an FSx client uses;
    `nvme_gb` of local disks; `sold` on-demand, spot or block (every type can be reserved); `quota`
    and `spot_quota`, the classes of its quotas (cloud/instances.py), "" if AWS has not
    published it; whether `sagemaker` trains on it, and its price per hour there (None: unknown).
    """

    name: str
    vcpus: int
    memory_gib: int
    accelerator: Accelerator | None
    accelerators: int  # ranks: devices that one process each owns
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

    @property
    def kind(self) -> str:
        """Its kind of device: cuda or neuron; cpu without an accelerator."""
        return self.accelerator.kind if self.accelerator else "cpu"

    @property
    def fabric(self) -> str:
        """One of FABRICS; "" if unknown."""
        return self.network if self.owned else "efa" if self.efa else "ethernet"

    @property
    def family(self) -> str:
        """EC2's name of the types of one generation and board: p5en."""
        return self.name.partition(".")[0]


def type_of(name: str, row: dict[str, Any]) -> NodeType:
    """Makes an EC2 type from its row of the file. Raises KeyError for an accelerator that
    accelerators.json lacks.
    """
    chip = row["accelerator"]
    return NodeType(
        name, **row | {"accelerator": chip and BY_NAME[chip], "sold": frozenset(row["sold"])}
    )


TABLE = Path(__file__).with_name("instance_types.json")
_TABLE = json.loads(TABLE.read_text(encoding="utf-8"))
INSTANCE_TYPES = {name: type_of(name, row) for name, row in _TABLE["types"].items()}
# US dollars per hour of types without accelerators: a bastion, a head node of Slurm
HEADS: dict[str, float] = _TABLE["heads"]
LUSTRE_CONNECTIONS = 1024  # limit of one file system over EFA; each interface of each client counts


def lustre_efa(row: NodeType, nodes: int) -> int:
    """Returns the number of EFA interfaces by which each of `nodes` of a type reaches an FSx file
    system; 0 if FSx does not offer that.
    """
    return min(row.lustre_efa, max(1, LUSTRE_CONNECTIONS // nodes))


def reach_lustre() -> list[str]:
    """Returns the families with nodes that reach an FSx file system over EFA."""
    return list(dict.fromkeys(row.family for row in INSTANCE_TYPES.values() if row.lustre_efa))


def left_out(name: str) -> str:
    """Returns why an EC2 type is not in the table, if known."""
    return next((why for begins, why in _TABLE["left_out"].items() if name.startswith(begins)), "")


def instance(name: str | None) -> NodeType | None:
    """Returns the row of an EC2 type; None without a type, or for one that the table lacks."""
    return INSTANCE_TYPES.get(name or "")


@dataclass(frozen=True)
class Node:
    """The part of a node that a job uses: its ranks, the platform of versions that they need, and
    the reason for both.

    `cores`: of a node simulated on this machine, if its ranks compute on CPU cores; else 0.
    """

    ranks: int
    reason: str
    platform: str = "cpu"
    cores: int = 0


def own_machine(
    name: str,
    per_node: int,
    memory_gib: float | None,
    network: str | None,
    gbps: float | None,
    usd_per_hour: float | None,
) -> NodeType | None:
    """Makes the kind of machines with that many accelerators of that name; None for one that the
    table lacks. Arguments of None get the usual value.
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
    """Tells whether that is the row's memory, in GB or GiB, by its name or by its driver."""
    return 0.95 * row.memory_gib <= memory_gib <= 1.1 * max(row.size, row.memory_gib)


def usual_network(row: Accelerator, per_node: int, network: str | None) -> float:
    """Returns the usual Gbit/s of the network of nodes with such accelerators."""
    if network in RDMA and row.rail:
        return float(row.rail * per_node)
    return FAST if row.links or network in RDMA else SLOW


def node(row: NodeType | None, nodes: int) -> Node:
    """Returns a node of that kind. Without one, returns an even share of this machine, which then
    simulates all `nodes`.
    """
    if row:
        unit = row.accelerator.name if row.accelerator else "CPU node"
        reason = (
            f"a node has {row.name}"
            if row.owned
            else f"{row.name}: {row.accelerators or 'one rank, a'} {unit}"
        )
        return Node(max(1, row.accelerators), reason, platform_of(row))
    devices = local_accelerators()
    if not devices:
        return Node(
            1, "a node without accelerators runs one rank", cores=max(1, local_cores() // nodes)
        )
    return Node(
        max(1, devices // nodes),
        f"this machine's {devices} accelerators over {nodes} nodes",
        _local_platform(),
    )


def local_accelerators() -> int:
    """Counts this machine's accelerators in the driver's files, without loading a library or waking
    a driver.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    gpus = Path("/proc/driver/nvidia/gpus")
    # a container may have only these
    found = list(gpus.iterdir()) if gpus.is_dir() else list(Path("/dev").glob("nvidia[0-9]*"))
    return len(found) or len(list(Path("/dev").glob("neuron[0-9]*"))) * local_chip()[1]


@functools.cache
def local_chip() -> tuple[Accelerator | None, int]:
    """Returns the row for a core of this machine's Neuron devices, and the cores of a device; None
    and 1 if the table lacks it.
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
    """Returns the row for this machine's accelerators, by the driver's name of the first; None if
    the table lacks it.
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
    """Counts the cores that this process may use: its CPU set, limited by its control group's
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
    """Returns bytes of memory that this process may use: this machine's, or a control group's limit
    (v2, and v1's root).
    """
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *memory_limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def spare_memory() -> int | None:
    """Returns bytes available to new processes without swapping; None if the kernel does not report
    it (not Linux).
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min(local_memory(), *found) if found else None


def memory_limits(root: Path, membership: Path) -> Iterator[int]:
    """Yields the limits of this process's control group and its ancestors;
    docs.kernel.org/admin-guide/cgroup-v2.html, memory.max.
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
    """Returns the platform of docker/platforms.lock.yaml that a kind of node needs; cpu without
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
    """Returns the kind of device (devices/) that ranks open with a platform, regardless of the
    node's other devices.
    """
    return {"cuda-volta": "cuda", "neuron-xla": "neuron_xla"}.get(platform, platform)
