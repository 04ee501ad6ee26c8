"""Table of the accelerators that the planner supports, with lookup by common product names.

accelerators.json contains the data, with a source for each accelerator. Peaks are dense (without
sparsity), with fp32 accumulation as in training. Memory is torch's `total_memory`, which is less
than the product name says because error correction and the driver reserve some.
hardware/node_types.py lists the machines with these accelerators.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ..trust.validation import fit_row


@dataclass(frozen=True)
class Accelerator:
    """Accelerator as one rank sees it: memory in GiB, dense peaks in FLOP/s, and links within the
    node.

    `bf16` or `fp8` may be None, if the device lacks the instructions or trainfleet does not use
    them. `fp32` is the peak of the engine's fp32 matmuls, which use TF32 if available
    (devices/cuda.py). `bandwidth` is the memory bandwidth in bytes/s. `links` describes the
    interconnect, and is "" if devices communicate over PCIe. `neighbours` is the rate in bytes/s at
    which a rank sends to other devices. It defaults to 16 GB/s for PCIe, which is NCCL's value
    between two AMD Zen 2 sockets (topo.h). It is also half of PCIe 4, because without peer-to-peer
    each byte passes through host memory.

    `efficiency` is the fraction of the peak that large matmuls reach in training. `attention` is
    the efficiency of attention relative to that. If `fitted`, both are fitted to published results
    (tests/bench/fit_planner.py). Otherwise, they are derived from a similar device. B200's are
    fitted only to Megatron's results, and torch's results differ (tests/bench/LOG.md).

    B300 is B200 plus 6 % for 1,100 W instead of 1,000 W, based on H100's gain from 500 to 700 W.
    Its attention is 13 % faster, because it computes 10.7e12 exponentials per second instead of
    5e12 (NVIDIA's numbers). Each attention score needs two exponentials and 1,800 FLOPs, forward
    and backward. GB200 is B200 plus 12 % for 1,200 W instead of 1,000 W, based on the same H100
    runs. V100 is based on six runs of a 52B model in fp16 (tests/bench/LOG.md). Devices of 300 to
    400 W are scaled down like H100 at 500 W relative to 700 W (0.56, fitted). The 70 W T4 is scaled
    down further, because its clocks drop under load (Jia et al. 2019, arXiv:1903.07486, section 5).
    A logical NeuronCore-v3 consists of two physical cores.

    `side` is the number of ranks along a side of the 4 x 4 chip torus (AWS Neuron, Trn1 and Trn2
    Architecture), or 0 without a torus. `domain` is the number of devices that the links connect,
    or 0 if they connect only the devices in a node.

    For machines outside EC2, `per_node` is the typical number of devices per node, and `rail` the
    typical network rate per device in Gbit/s, or 0 if unknown. `platform` is the only platform that
    supports the device, or "" if that is the newest of its kind. `arm` marks devices with an Arm
    host CPU. The last word of `name` is the memory size, as vendors write it.
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
    fp16: float | None = None  # peak in fp16 if it differs from bf16
    side: int = 0
    domain: int = 0
    per_node: int = 1
    rail: int = 0
    platform: str = ""
    arm: bool = False
    source: str = ""

    @property
    def half(self) -> str:
        """Best two-byte matmul dtype, or fp32 if the device supports none."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the name without the memory size, such as rtx, 6000, ada."""
        return tuple(self.name.lower().split("-")[:-1])

    @property
    def label(self) -> str:
        """Value of fleet.accelerator.name, such as rtx-6000-ada."""
        return "-".join(self.words)

    @property
    def size(self) -> int:
        """Memory size in GB from the name, or 0 if the name has no size."""
        match = re.fullmatch(r"([0-9]+)GB", self.name.rpartition("-")[2])
        return int(match[1]) if match else 0

    def peak(self, format_: str) -> float:
        """Returns the peak matmul FLOP/s in fp8, bf16, fp16 or fp32.

        Falls back to fp32 if the device does not support the dtype.
        """
        return {"fp8": self.fp8, "bf16": self.bf16, "fp16": self.fp16 or self.bf16}.get(
            format_
        ) or self.fp32


def _rows() -> Iterator[Accelerator]:
    for name, row in json.loads(FILE.read_text(encoding="utf-8")).items():
        made = fit_row(Accelerator, row | {"name": name}, FILE, f'"{name}"')
        yield replace(made, **{key: row[key] * unit for key, unit in UNITS.items() if row.get(key)})


FILE = Path(__file__).with_name("accelerators.json")
# Units in accelerators.json: TFLOP/s for peaks, TB/s for memory bandwidth, GB/s for traffic to
# neighbours.
UNITS = {
    "bf16": 1e12,
    "fp16": 1e12,
    "fp8": 1e12,
    "fp32": 1e12,
    "bandwidth": 1e12,
    "neighbours": 1e9,
}
ACCELERATORS = tuple(_rows())
BY_NAME = {row.name: row for row in ACCELERATORS}
NVIDIA = tuple(row for row in ACCELERATORS if row.kind == "cuda")
NAMES = tuple(dict.fromkeys(row.label for row in NVIDIA))  # values of fleet.accelerator.name
# Neuron devices by driver name: the core that a rank uses, and the number of cores per device.
CHIPS = {"trn1": (BY_NAME["NeuronCore-v2"], 2), "trn2": (BY_NAME["NeuronCore-v3 x2"], 4)}
# Words that drivers, Slurm and users add to a product name. Any other word, such as Laptop or Ti,
# makes it a different product.
AROUND = re.compile(
    r"nvidia|tesla|geforce|gpu|generation|ada|dgxs|sxm[0-9]?|hbm[0-9]e?|blackwell|server|workstation|edition|ac|nvl72|tensor|core"
)
GRACE = {"480gb", "144g"}  # CPU memory of Grace Hopper, which is part of the GPU's name

# Devices that no platform supports: a pattern for the start of the name, and the reason
UNSUPPORTED = (
    (
        r"amd|radeon|instinct|rx\b|mi[0-9]{2,3}[a-z]?\b",
        "not supported, because no platform has ROCm",
    ),
    (
        r"(intel )?(habana )?gaudi|hpu|intel|arc",
        "not supported, because no platform has Intel's software",
    ),
    (
        r"(google )?tpu|v[2-6][ep]|ironwood|trillium",
        "not supported, because no platform has Google's TPU software",
    ),
    (
        r"(apple )?m[1-9]( (pro|max|ultra))?$|mps|apple",
        "not supported; training on Apple computers uses the CPU cores",
    ),
    (
        r"(tesla )?(k[1-9]0m?|m[1-9]0|p4|p6|p40|p100)\b|gtx|titan",
        "older than Volta, and the platforms' torch does not support it",
    ),
    (
        r"trainium|trn[0-9]|inf[0-9]|inferentia|neuron",
        "an AWS accelerator; set fleet.instance_type, for example trn1.32xlarge",
    ),
)


def find_accelerator(name: str, memory_bytes: float | None = None) -> Accelerator | None:
    """Finds an accelerator by the name that a driver, Slurm or a user gives it.

    Examples are `NVIDIA H200`, `a100_80gb` and `rtx4090`. Returns None if the name is unknown. If
    several accelerators match, returns the one with the closest memory size. Without
    `memory_bytes`, returns the one with the size in the name (`A100-SXM4-80GB`), or else the
    smallest.
    """
    words = _words(name)
    rows = [
        row
        for row in NVIDIA
        if {*row.words} - {"rtx"} <= words.keys() and _is_only(words.keys() - set(row.words), row)
    ]
    longest = max((len(row.words) for row in rows), default=0)
    rows = [row for row in rows if len(row.words) == longest]
    if memory_bytes is None:
        sizes = {_size(word) for word in words}
        rows = [row for row in rows if row.size in sizes] or rows
    return min(
        rows, key=lambda row: abs(row.memory_gib - (memory_bytes or 0) / 2**30), default=None
    )


def _words(name: str) -> dict[str, None]:
    """Returns the lower-case words of a name. For example, `rtx6000ada` has three."""
    text = re.sub(r"[^a-z0-9]+", " ", name[:200].lower())
    text = re.sub(r"\b(rtx|geforce|tesla|gtx)(?=[a-z0-9])", r"\1 ", text)
    return dict.fromkeys(re.sub(r"(?<=[0-9])(ada|pcie|sxm[0-9]?|nvl)\b", r" \1", text).split())


def _is_only(rest: set[str], row: Accelerator) -> bool:
    """Returns whether a name with these additional words still means the same product."""
    sizes = {each.size for each in NVIDIA if each.words == row.words}
    return all(
        AROUND.fullmatch(word) or _size(word) in sizes or (row.label == "gh200" and word in GRACE)
        for word in rest
    )


def _size(word: str) -> int:
    """Returns the size in GB from a word such as 80gb, 80g or 80, otherwise 0."""
    match = re.fullmatch(r"([0-9]{2,3})(gb|g|gib)?", word)
    return int(match[1]) if match else 0


def unsupported(name: str) -> str:
    """Returns why no rank can run on the named device, or "" if there is no known reason."""
    words = " ".join(re.sub(r"[^a-z0-9]+", " ", name[:200].lower()).split())
    return next((why for begins, why in UNSUPPORTED if re.match(begins, words)), "")
