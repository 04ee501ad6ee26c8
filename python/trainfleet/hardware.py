"""The tables of kinds of nodes, and what this machine has. The accelerators that they have: accelerators.py.

Sources: instance figures, EC2 instance type pages (docs.aws.amazon.com/ec2/latest/instancetypes); EFA interfaces, EC2 user guide
"Elastic Fabric Adapter"; prices, On-Demand Linux in us-east-1 in US dollars an hour (aws.amazon.com/ec2/pricing/on-demand), None
where AWS sells the type only as capacity blocks.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from .accelerators import (
    A10G,
    A100_40,
    A100_80,
    B200,
    B300,
    CHIPS,
    H100,
    H200,
    L4,
    L40S,
    TRAINIUM1,
    TRAINIUM2,
    V100,
    Accelerator,
    find_accelerator,
)  # fmt: skip

NEURON_DEVICES = Path("/sys/devices/virtual/neuron_device")  # Neuron Sysfs User Guide, SDK 2.32
RDMA = ("efa", "infiniband", "roce")  # what nodes talk over without their kernels
FABRICS = (*RDMA, "ethernet")
HGX = ("p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "p6-b300")  # EC2's families of boards whose GPUs NVSwitch joins
FAST, SLOW = 100, 10  # Gbit/s of a node's network that is assumed where nobody has said it: of a server, of a workstation


@dataclass(frozen=True)
class NodeType:
    """A kind of node, EC2's or of machines that somebody owns (fleet.accelerator).

    vCPUs, memory in GiB (0: not told), what accelerates it, network in Gbit/s, EFA interfaces (0: none, or not told), US dollars
    an hour. `owned`: it is no EC2 type. Of those, `network`: one of FABRICS, "" where nobody has said which; `assumed`: whether
    network_gbps is what such machines usually have.
    """

    name: str
    vcpus: int
    memory_gib: int
    accelerator: Accelerator | None
    accelerators: int  # ranks: devices that a process owns
    network_gbps: float
    efa: int
    usd_per_hour: float | None
    owned: bool = False
    network: str = ""
    assumed: bool = False

    @property
    def kind(self) -> str:
        """cuda or neuron; cpu where nothing accelerates it."""
        return self.accelerator.kind if self.accelerator else "cpu"

    @property
    def fabric(self) -> str:
        """One of FABRICS; "" where nobody has said which."""
        return self.network if self.owned else "efa" if self.efa else "ethernet"

    @property
    def is_direct(self) -> bool:
        """Whether its network reads and writes the memory of its GPUs (GPUDirect RDMA)."""
        if self.owned:
            return self.fabric in RDMA and self.accelerator is not None and bool(self.accelerator.links)
        return self.name.partition(".")[0] in HGX

    @property
    def is_switched(self) -> bool:
        """Whether its GPUs speak only while NVIDIA's fabric manager runs."""
        if self.owned:
            row = self.accelerator
            return row is not None and bool(row.links and row.bf16) and self.accelerators >= 8
        return self.name.partition(".")[0] in HGX


INSTANCE_TYPES = {
    row.name: row
    for row in (
        NodeType("trn1.2xlarge", 8, 32, TRAINIUM1, 2, 12, 0, 1.34),
        NodeType("trn1.32xlarge", 128, 512, TRAINIUM1, 32, 800, 8, 21.50),
        NodeType("trn1n.32xlarge", 128, 512, TRAINIUM1, 32, 1600, 16, 24.78),
        NodeType("trn2.3xlarge", 12, 128, TRAINIUM2, 4, 200, 1, None),
        NodeType("trn2.48xlarge", 192, 2048, TRAINIUM2, 64, 3200, 16, None),
        NodeType("trn2u.48xlarge", 192, 2048, TRAINIUM2, 64, 3200, 16, None),
        NodeType("p3dn.24xlarge", 96, 768, V100, 8, 100, 1, 31.21),
        NodeType("p4d.24xlarge", 96, 1152, A100_40, 8, 400, 4, 21.96),
        NodeType("p4de.24xlarge", 96, 1152, A100_80, 8, 400, 4, 27.45),
        NodeType("p5.4xlarge", 16, 256, H100, 1, 100, 1, 6.88),
        NodeType("p5.48xlarge", 192, 2048, H100, 8, 3200, 32, 55.04),
        NodeType("p5e.48xlarge", 192, 2048, H200, 8, 3200, 32, None),
        NodeType("p5en.48xlarge", 192, 2048, H200, 8, 3200, 16, 63.30),
        NodeType("p6-b200.48xlarge", 192, 2048, B200, 8, 3200, 8, 113.93),
        NodeType("p6-b300.48xlarge", 192, 4096, B300, 8, 6400, 16, 142.42),
        NodeType("g5.48xlarge", 192, 768, A10G, 8, 100, 1, 16.29),
        NodeType("g6.48xlarge", 192, 768, L4, 8, 100, 1, 13.35),
        NodeType("g6e.48xlarge", 192, 1536, L40S, 8, 400, 4, 30.13),
        NodeType("c5n.18xlarge", 72, 192, None, 0, 100, 1, 3.89),
        NodeType("c7i.8xlarge", 32, 64, None, 0, 12, 0, 1.43),
    )
}


# Over how many EFA interfaces a client of FSx for Lustre goes: none before Nitro v4, and none of Trn2's family. FSx for Lustre's
# user guide, "Configuring EFA clients", and its script for p6-b300; Nitro versions: EC2's instance types guide (read 2026-11-23).
LUSTRE_EFA = {"p5": 8, "p5e": 8, "p5en": 8, "p6-b200": 8, "p6-b300": 16, "g6": 1, "g6e": 2, "trn1": 2, "trn1n": 2}
LUSTRE_CONNECTIONS = 1024  # of one file system over EFA, each interface of each client counts


def lustre_efa(row: NodeType, nodes: int) -> int:
    """The EFA interfaces by which each of `nodes` of a type reaches an FSx file system; 0 where FSx does not offer that."""
    most = min(row.efa, LUSTRE_EFA.get(row.name.partition(".")[0], 0))
    return min(most, max(1, LUSTRE_CONNECTIONS // nodes))


LEFT_OUT = {  # types that EC2 has and the table lacks, by how their names begin, and why; public pages as of 2026-11-22
    "p6e-": "its processors are ARM's, and drivers and images here are x86-64's; p6-b200.48xlarge and p6-b300.48xlarge work",
    "trn3": "EC2's guide names no type of Trainium3 yet; trn2.48xlarge is the newest that is known",
    "p3.": "it has no EFA; p3dn.24xlarge has, and V100 too",
}


def left_out(name: str) -> str:
    """Why an EC2 type is not in the table, where that is known."""
    return next((why for begins, why in LEFT_OUT.items() if name.startswith(begins)), "")


def instance(name: str | None) -> NodeType | None:
    """The row of an EC2 type; None without a type, or for one that the table lacks."""
    return INSTANCE_TYPES.get(name or "")


@dataclass(frozen=True)
class Node:
    """What one node offers a job: its ranks, the stack of versions that they need, and the reason for both.

    `cores`: of a node simulated on this machine, if its ranks compute on CPU cores; else 0.
    """

    ranks: int
    reason: str
    stack: str = "cpu"
    cores: int = 0


def own_machine(
    name: str, per_node: int, memory_gib: float | None, network: str | None, gbps: float | None, usd_per_hour: float | None
) -> NodeType | None:
    """The kind of machines with so many accelerators of that name; None for one that the table lacks. None: as is usual."""
    row = find_accelerator(name, None if memory_gib is None else memory_gib * 2**30)
    if row is None:
        return None
    if memory_gib is not None and not same_size(row, memory_gib):
        row = replace(row, name=f"{'-'.join(row.name.split('-')[:-1])}-{memory_gib:g}GB",
                      memory_gib=row.memory_gib * memory_gib / row.size)  # fmt: skip
    usual = usual_network(row, per_node, network)
    return NodeType(
        f"{per_node} x {row.name}", 0, 0, row, per_node, gbps or usual, 0, usd_per_hour or 0.0, True, network or "", gbps is None
    )


def same_size(row: Accelerator, memory_gib: float) -> bool:
    """Whether that is the row's memory, be it said in GB or GiB, as its name has it or as its driver reports it."""
    return 0.95 * row.memory_gib <= memory_gib <= 1.1 * max(row.size, row.memory_gib)


def usual_network(row: Accelerator, per_node: int, network: str | None) -> float:
    """Gbit/s of the network that nodes with such accelerators usually have."""
    if network in RDMA and row.rail:
        return float(row.rail * per_node)
    return FAST if row.links or network in RDMA else SLOW


def node(row: NodeType | None, nodes: int) -> Node:
    """A node of that kind; without one, an even share of this machine, which then simulates all `nodes`."""
    if row:
        unit = row.accelerator.name if row.accelerator else "CPU node"
        reason = f"a node has {row.name}" if row.owned else f"{row.name}: {row.accelerators or 'one rank, a'} {unit}"
        return Node(max(1, row.accelerators), reason, stack_of(row))
    devices = local_accelerators()
    if not devices:
        return Node(1, "a node without accelerators runs one rank", cores=max(1, local_cores() // nodes))
    return Node(max(1, devices // nodes), f"this machine's {devices} accelerators over {nodes} nodes", _local_stack())


def local_accelerators() -> int:
    """The number of accelerators of this machine, from the driver's files: no library is loaded and no driver woken."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    gpus = Path("/proc/driver/nvidia/gpus")
    found = list(gpus.iterdir()) if gpus.is_dir() else list(Path("/dev").glob("nvidia[0-9]*"))  # a container may have these alone
    return len(found) or len(list(Path("/dev").glob("neuron[0-9]*"))) * local_chip()[1]


@functools.cache
def local_chip() -> tuple[Accelerator | None, int]:
    """The row for a core of this machine's Neuron devices, and the cores of a device; None and 1 when the table lacks it."""
    try:
        words = (NEURON_DEVICES / "neuron0/info/architecture/instance_type").read_text().strip().lower()
    except OSError:
        return None, 1
    return next((row for name, row in CHIPS.items() if words.startswith(name)), (None, 1))


@functools.cache
def local_accelerator() -> Accelerator | None:
    """The row for this machine's accelerators, by the driver's name of the first; None when the table lacks it."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = [line.partition(":")[2] for file in files[:1] for line in file.read_text().splitlines() if line.startswith("Model")]
    if not local_accelerators():
        return None
    return find_accelerator(models[0]) if models else local_chip()[0]


def local_cores() -> int:
    """Cores that this process may use: its CPU set, limited by its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def local_memory() -> int:
    """Bytes of memory that this process may use: this machine's, or a control group's limit (v2, and v1's root)."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([whole, *memory_limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def spare_memory() -> int | None:
    """Bytes available to new processes without swapping; None where the kernel does not say (not Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min(local_memory(), *found) if found else None


def memory_limits(root: Path, membership: Path) -> Iterator[int]:
    """The limits of this process's control group and its ancestors; docs.kernel.org/admin-guide/cgroup-v2.html, memory.max."""
    try:
        groups = [line.split(":", 2)[2].lstrip("/") for line in membership.read_text().splitlines() if line.startswith("0::")]
    except OSError:
        groups = []
    folders = [folder for group in groups or [""] for folder in ((root / group), *(root / group).parents)]
    for file in [
        *(folder / "memory.max" for folder in folders if folder.is_relative_to(root)),
        root / "memory/memory.limit_in_bytes",
    ]:
        try:
            yield int(file.read_text())
        except (OSError, ValueError):  # not there, or "max"
            continue


def stack_of(row: NodeType | None) -> str:
    """The stack of docker/stack.lock.yaml that a kind of node needs; cpu without accelerators."""
    return _stack_for(row.accelerator) if row and row.accelerator else "cpu"


def _local_stack() -> str:
    """The stack that this machine's accelerators need."""
    known = local_accelerator()
    return _stack_for(known) if known else "neuron" if any(Path("/dev").glob("neuron[0-9]*")) else "cuda"


def _stack_for(accelerator: Accelerator) -> str:
    return accelerator.stack or accelerator.kind


def device_of(stack: str) -> str:
    """The kind of device (devices/) that ranks open with a stack, whatever else a node may have."""
    return {"cuda-volta": "cuda", "neuron-xla": "neuron_xla"}.get(stack, stack)
