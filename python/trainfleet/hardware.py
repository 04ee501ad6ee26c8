"""The tables of EC2 instance types and accelerators, and what this machine has.

Sources: instance figures, EC2 instance type pages (docs.aws.amazon.com/ec2/latest/instancetypes); EFA interfaces, EC2 user guide
"Elastic Fabric Adapter"; prices, On-Demand Linux in us-east-1 in US dollars an hour (aws.amazon.com/ec2/pricing/on-demand), None
where AWS sells the type only as capacity blocks. Peaks, dense (no sparsity), and links: NVIDIA's data sheets; Trainium, AWS
Neuron's architecture pages, per NeuronCore as a rank sees it. Memory: what torch and the Neuron runtime report, which is less
than the name says where error correction takes its part. Memory bandwidth and links: the same sheets; Trainium's per core.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Accelerator:
    """One device as one rank sees it: memory in GiB, dense peaks in FLOP/s, and what joins it to those of its node.

    `bf16` and `fp8` are None where there are no such instructions, or nothing here that uses them. `fp32` is that of fp32
    products as the engine has them computed: by TensorFloat-32 where the device has it (devices/cuda.py). `links` is empty where
    neighbours meet over PCIe; `neighbours` is what a rank sends to them, and `bandwidth` what its memory moves, in bytes/s.
    `efficiency` is the fraction of the peak that large products reach in training, and `attention` the fraction of that which
    attention reaches: fitted to published rows (tests/bench/fit_planner.py) where `fitted`, else taken from a similar device
    (B300: B200's, and 6 % more for 1,100 W instead of 1,000, by what 700 W bring H100 over 500; attention 13 % more for 10.7e12
    exponentials a second instead of 5e12, NVIDIA's figures: a score takes two beside 1,800 FLOPs, forward and backward).
    `side`: ranks along one side of the torus of chips, 4 x 4 (AWS Neuron, Trn1 and Trn2 Architecture); 0 where there is none.
    """

    name: str
    kind: str  # cuda or neuron
    memory_gib: float
    bf16: float | None
    fp32: float
    links: str
    fp8: float | None = None
    bandwidth: float = 0.0
    neighbours: float = 16e9
    efficiency: float = 0.75
    attention: float = 0.4
    fitted: bool = False
    fp16: float | None = None  # where it is not that of bf16
    side: int = 0

    @property
    def half(self) -> str:
        """The format of two bytes that its products are best computed in; fp32 where there is none."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    def peak(self, format: str) -> float:
        """FLOP/s of products in fp8, bf16, fp16 or fp32; the last where there are no instructions for the format."""
        return {"fp8": self.fp8, "bf16": self.bf16, "fp16": self.fp16 or self.bf16}.get(format) or self.fp32


AMPERE, HOPPER, BLACKWELL, NEURON = (0.77, 0.43, True), (0.69, 0.31, True), (0.50, 0.40, True), (0.76, 0.50, True)
V100 = Accelerator(  # efficiency: of six runs of 52B in fp16 (tests/bench/LOG.md)
    "V100-32GB", "cuda", 31.7, None, 15.7e12, "NVLink, 300 GB/s", None, 0.9e12, 150e9, 0.57, fp16=125e12
)  # fmt: skip
A100_40 = Accelerator("A100-40GB", "cuda", 39.4, 312e12, 156e12, "NVLink, 600 GB/s", None, 1.555e12, 300e9, *AMPERE)
A100_80 = Accelerator("A100-80GB", "cuda", 79.2, 312e12, 156e12, "NVLink, 600 GB/s", None, 2.039e12, 300e9, *AMPERE)
H100 = Accelerator("H100-80GB", "cuda", 79.2, 989.4e12, 494.7e12, "NVLink, 900 GB/s", 1978.9e12, 3.35e12, 450e9, *HOPPER)
H200 = Accelerator("H200-141GB", "cuda", 139.8, 989.4e12, 494.7e12, "NVLink, 900 GB/s", 1978.9e12, 4.8e12, 450e9, *HOPPER)
B200 = Accelerator("B200-180GB", "cuda", 178.4, 2250e12, 1125e12, "NVLink, 1800 GB/s", 4500e12, 7.7e12, 900e9, *BLACKWELL)
B300 = Accelerator("B300-288GB", "cuda", 267.7, 2250e12, 1125e12, "NVLink, 1800 GB/s", 4500e12, 7.7e12, 900e9, 0.53, 0.45)
A10G = Accelerator("A10G-24GB", "cuda", 22.1, 70e12, 35e12, "", None, 0.6e12)
L4 = Accelerator("L4-24GB", "cuda", 22.0, 121e12, 60e12, "", 242e12, 0.3e12)
L40S = Accelerator("L40S-48GB", "cuda", 44.4, 362e12, 183e12, "", 733e12, 0.864e12)
TRAINIUM1 = Accelerator("NeuronCore-v2", "neuron", 16, 95e12, 23.75e12, "NeuronLink", None, 0.41e12, 48e9, *NEURON, side=8)
TRAINIUM2 = Accelerator(  # a logical core of two physical ones
    "NeuronCore-v3 x2", "neuron", 24, 166.75e12, 45.25e12, "NeuronLink", None, 0.725e12, 64e9, 0.70, 0.50, side=16
)  # fmt: skip


CHIPS = {"trn1": (TRAINIUM1, 2), "trn2": (TRAINIUM2, 4)}  # by the driver's name of a device: its cores, as ranks see them
NEURON_DEVICES = Path("/sys/devices/virtual/neuron_device")  # Neuron Sysfs User Guide, SDK 2.32
ACCELERATORS = (V100, A100_40, A100_80, H100, H200, B200, B300, A10G, L4, L40S, TRAINIUM1, TRAINIUM2)


def find_accelerator(name: str, memory_bytes: int | None = None) -> Accelerator | None:
    """The row for a device by its driver's name (`NVIDIA H200`) and, among several, the nearest in memory.

    Where the memory is unknown, the name may have it (`A100-SXM4-80GB`); else the smallest is taken.
    """
    words = name.replace("-", " ").split()
    rows = [row for row in ACCELERATORS if row.name.split("-")[0] in words]
    if memory_bytes is None:
        rows = [row for row in rows if row.name.split("-")[1] in words] or rows
    return min(rows, key=lambda row: abs(row.memory_gib - (memory_bytes or 0) / 2**30), default=None)


@dataclass(frozen=True)
class InstanceType:
    """One EC2 type: vCPUs, memory in GiB, what accelerates it, network in Gbit/s, EFA interfaces, US dollars an hour."""

    name: str
    vcpus: int
    memory_gib: int
    accelerator: Accelerator | None
    accelerators: int  # ranks: devices that a process owns
    network_gbps: int
    efa: int
    usd_per_hour: float | None

    @property
    def kind(self) -> str:
        """cuda or neuron; cpu where nothing accelerates it."""
        return self.accelerator.kind if self.accelerator else "cpu"


INSTANCE_TYPES = {
    row.name: row
    for row in (
        InstanceType("trn1.2xlarge", 8, 32, TRAINIUM1, 2, 12, 0, 1.34),
        InstanceType("trn1.32xlarge", 128, 512, TRAINIUM1, 32, 800, 8, 21.50),
        InstanceType("trn1n.32xlarge", 128, 512, TRAINIUM1, 32, 1600, 16, 24.78),
        InstanceType("trn2.3xlarge", 12, 128, TRAINIUM2, 4, 200, 1, None),
        InstanceType("trn2.48xlarge", 192, 2048, TRAINIUM2, 64, 3200, 16, None),
        InstanceType("trn2u.48xlarge", 192, 2048, TRAINIUM2, 64, 3200, 16, None),
        InstanceType("p3dn.24xlarge", 96, 768, V100, 8, 100, 1, 31.21),
        InstanceType("p4d.24xlarge", 96, 1152, A100_40, 8, 400, 4, 21.96),
        InstanceType("p4de.24xlarge", 96, 1152, A100_80, 8, 400, 4, 27.45),
        InstanceType("p5.4xlarge", 16, 256, H100, 1, 100, 1, 6.88),
        InstanceType("p5.48xlarge", 192, 2048, H100, 8, 3200, 32, 55.04),
        InstanceType("p5e.48xlarge", 192, 2048, H200, 8, 3200, 32, None),
        InstanceType("p5en.48xlarge", 192, 2048, H200, 8, 3200, 16, 63.30),
        InstanceType("p6-b200.48xlarge", 192, 2048, B200, 8, 3200, 8, 113.93),
        InstanceType("p6-b300.48xlarge", 192, 4096, B300, 8, 6400, 16, 142.42),
        InstanceType("g5.48xlarge", 192, 768, A10G, 8, 100, 1, 16.29),
        InstanceType("g6.48xlarge", 192, 768, L4, 8, 100, 1, 13.35),
        InstanceType("g6e.48xlarge", 192, 1536, L40S, 8, 400, 4, 30.13),
        InstanceType("c5n.18xlarge", 72, 192, None, 0, 100, 1, 3.89),
        InstanceType("c7i.8xlarge", 32, 64, None, 0, 12, 0, 1.43),
    )
}


LEFT_OUT = {  # types that EC2 has and the table lacks, by how their names begin, and why; public pages as of 2026-11-22
    "p6e-": "its processors are ARM's, and drivers and images here are x86-64's; p6-b200.48xlarge and p6-b300.48xlarge work",
    "trn3": "EC2's guide names no type of Trainium3 yet; trn2.48xlarge is the newest that is known",
    "p3.": "it has no EFA; p3dn.24xlarge has, and V100 too",
}


def left_out(name: str) -> str:
    """Why an EC2 type is not in the table, where that is known."""
    return next((why for begins, why in LEFT_OUT.items() if name.startswith(begins)), "")


def instance(name: str | None) -> InstanceType | None:
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


def node(instance_type: str | None, nodes: int) -> Node:
    """A node of an EC2 type; without a type, an even share of this machine, which then simulates all `nodes`."""
    if row := instance(instance_type):
        unit = row.accelerator.name if row.accelerator else "CPU node"
        return Node(
            max(1, row.accelerators), f"{instance_type}: {row.accelerators or 'one rank, a'} {unit}", stack_of(instance_type)
        )
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


def accelerator_of(instance_type: str | None) -> Accelerator | None:
    """A rank's accelerator on an EC2 type, or on this machine without one; None for a CPU or an unknown device."""
    row = instance(instance_type)
    return row.accelerator if row else None if instance_type else local_accelerator()


def on_local_cpus(instance_type: str | None) -> bool:
    """Whether ranks of that type would compute on this machine's CPUs, as far as is known."""
    return instance_type is None and not local_accelerators()


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


def stack_of(instance_type: str | None) -> str:
    """The stack of docker/stack.lock.yaml that an EC2 type needs; cpu without a type."""
    row = instance(instance_type)
    return _stack_for(row.accelerator) if row and row.accelerator else "cpu"


def _local_stack() -> str:
    """The stack that this machine's accelerators need."""
    known = local_accelerator()
    return _stack_for(known) if known else "neuron" if any(Path("/dev").glob("neuron[0-9]*")) else "cuda"


def _stack_for(accelerator: Accelerator) -> str:
    old = {V100.name: "cuda-volta", TRAINIUM1.name: "neuron-xla"}  # the newest CUDA and Neuron no longer support these
    return old.get(accelerator.name, accelerator.kind)


def device_of(stack: str) -> str:
    """The kind of device (devices/) that ranks open with a stack, whatever else a node may have."""
    return {"cuda-volta": "cuda", "neuron-xla": "neuron_xla"}.get(stack, stack)
