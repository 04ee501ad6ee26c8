"""The accelerators that the planner knows: one data row each, with its source, and what people and drivers call them.

Peaks are dense (no sparsity), with sums in fp32, as training has them. Memory is what torch reports (`total_memory`), which is
less than the name says where error correction and the driver take their part. Machines that have them: hardware/node_types.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


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
    `domain`: devices that the links join, where these are more than a node's; 0: a node's.

    Of machines that are not EC2's: `per_node`, how many a node usually has; `rail`, Gbit/s of the network card for each device
    that such nodes usually have, 0 where there is no usual number. `stack`: the only one that supports it, if not its kind's
    newest. `arm`: its host's processors are ARM's. The last word of the name is the memory, as makers and people say it.
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
    domain: int = 0
    per_node: int = 1
    rail: int = 0
    stack: str = ""
    arm: bool = False
    source: str = ""

    @property
    def half(self) -> str:
        """The format of two bytes that its products are best computed in; fp32 where there is none."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @property
    def words(self) -> tuple[str, ...]:
        """The words of its name without the memory: rtx, 6000, ada."""
        return tuple(self.name.lower().split("-")[:-1])

    @property
    def label(self) -> str:
        """What fleet.accelerator.name calls it: rtx-6000-ada."""
        return "-".join(self.words)

    @property
    def size(self) -> int:
        """Its memory in GB as its name says it; 0 where that says none."""
        match = re.fullmatch(r"([0-9]+)GB", self.name.rpartition("-")[2])
        return int(match[1]) if match else 0

    def peak(self, format_: str) -> float:
        """FLOP/s of products in fp8, bf16, fp16 or fp32; the last where there are no instructions for the format."""
        return {"fp8": self.fp8, "bf16": self.bf16, "fp16": self.fp16 or self.bf16}.get(format_) or self.fp32


def _gpu(
    name: str, memory: float, half: float, fp32: float, fp8: float, bandwidth: float, links: str, source: str,
    like: tuple[float, float, bool] = (0.75, 0.4, False), bf16: bool = True, **more: Any,
) -> Accelerator:  # fmt: skip
    """A row of NVIDIA's: memory in GiB, peaks in TFLOP/s (0: no such instructions), bandwidth in TB/s, links both ways."""
    each_way = re.search(r"([0-9]+) GB/s", links)
    return Accelerator(
        name, "cuda", memory, half * 1e12 if bf16 else None, fp32 * 1e12, links, fp8 * 1e12 if fp8 else None,
        bandwidth * 1e12, int(each_way[1]) / 2 * 1e9 if each_way else 16e9, *like,
        fp16=None if bf16 else half * 1e12, source=source, **more,
    )  # fmt: skip


# Efficiency and attention, and whether they were fitted. V100: of six runs of 52B in fp16 (tests/bench/LOG.md)
VOLTA, AMPERE, HOPPER, BLACKWELL = (0.57, 0.4, False), (0.77, 0.43, True), (0.69, 0.31, True), (0.50, 0.40, True)
NEURON = (0.76, 0.50, True)
# Not fitted, as nobody has published enough runs. Cards of 300 to 400 W are held back as H100 of 500 W are against those of 700
# (0.56, fitted: tests/bench/fit_planner.py), T4 of 70 W more so (Jia et al. 2019, arXiv:1903.07486, 5: clocks fall under load);
# GB200 has B200's, and 12 % more for 1,200 W instead of 1,000, by the same runs of H100
HOPPER_CARD, TURING, RACK = (0.56, 0.31, False), (0.45, 0.4, False), (0.56, 0.40, False)
B300_LIKE = (0.53, 0.45, False)
OLD: dict[str, Any] = {"stack": "cuda-volta"}  # the newest CUDA no longer supports them
BOARD: dict[str, Any] = {"per_node": 8}
NV2, NV3, NV4, NV5 = (f"NVLink, {rate} GB/s" for rate in (300, 600, 900, 1800))
SHEET = "NVIDIA data sheet"

V100 = _gpu("V100-32GB", 31.7, 125, 15.7, 0, 0.9, NV2, f"{SHEET} V100, 2020-01", VOLTA, False, rail=50, **OLD, **BOARD)
A100_40 = _gpu("A100-40GB", 39.4, 312, 156, 0, 1.555, NV3, f"{SHEET} A100, 2020-11", AMPERE, rail=200, **BOARD)
A100_80 = _gpu("A100-80GB", 79.2, 312, 156, 0, 2.039, NV3, f"{SHEET} A100, 2021-06", AMPERE, rail=200, **BOARD)
H100 = _gpu("H100-80GB", 79.2, 989.4, 494.7, 1978.9, 3.35, NV4, f"{SHEET} H100, 2023-04", HOPPER, rail=400, **BOARD)
H200 = _gpu("H200-141GB", 139.8, 989.4, 494.7, 1978.9, 4.8, NV4, f"{SHEET} H200, 2024-11", HOPPER, rail=400, **BOARD)
B200 = _gpu("B200-180GB", 178.4, 2250, 1125, 4500, 7.7, NV5, f"{SHEET} HGX B200, 2025-03", BLACKWELL, rail=400, **BOARD)
B300 = _gpu("B300-288GB", 267.7, 2250, 1125, 4500, 7.7, NV5, f"{SHEET} HGX B300, 2025-09", B300_LIKE, rail=800, **BOARD)
A10G = _gpu("A10G-24GB", 22.1, 70, 35, 0, 0.6, "", "EC2 guide of G5 and NVIDIA data sheet A10, 2021-11")
L4 = _gpu("L4-24GB", 22.0, 121, 60, 242, 0.3, "", f"{SHEET} L4, 2023-03")
L40S = _gpu("L40S-48GB", 44.4, 362, 183, 733, 0.864, "", f"{SHEET} L40S, 2023-08")
GB200 = _gpu("GB200-186GB", 184.3, 2500, 1250, 5000, 8.0, NV5, f"{SHEET} GB200 NVL72, 2025-03", RACK,
             domain=72, per_node=4, rail=400, arm=True)  # fmt: skip
TRAINIUM1 = Accelerator(
    "NeuronCore-v2", "neuron", 16, 95e12, 23.75e12, "NeuronLink", None, 0.41e12, 48e9, *NEURON, side=8, stack="neuron-xla",
    source="AWS Neuron, Trn1 Architecture, 2026-02",
)  # fmt: skip
TRAINIUM2 = Accelerator(  # a logical core of two physical ones
    "NeuronCore-v3 x2", "neuron", 24, 166.75e12, 45.25e12, "NeuronLink", None, 0.725e12, 64e9, 0.70, 0.50, side=16,
    source="AWS Neuron, Trn2 Architecture, 2026-02",
)  # fmt: skip

ACCELERATORS = (
    V100,
    _gpu("V100-16GB", 15.8, 125, 15.7, 0, 0.9, NV2, f"{SHEET} V100, 2020-01", VOLTA, False, rail=50, **OLD, **BOARD),
    _gpu("V100-PCIe-32GB", 31.7, 112, 14, 0, 0.9, "", f"{SHEET} V100, 2020-01", VOLTA, False, **OLD),
    _gpu("V100-PCIe-16GB", 15.8, 112, 14, 0, 0.9, "", f"{SHEET} V100, 2020-01", VOLTA, False, **OLD),
    _gpu("T4-16GB", 14.6, 65, 8.1, 0, 0.32, "", f"{SHEET} T4, 2019-03", TURING, False),
    A100_40,
    A100_80,
    _gpu("A100-PCIe-40GB", 39.4, 312, 156, 0, 1.555, "", f"{SHEET} A100, 2020-11", (0.70, 0.43, False)),
    _gpu("A100-PCIe-80GB", 79.2, 312, 156, 0, 1.935, "", f"{SHEET} A100, 2021-06", (0.70, 0.43, False)),
    A10G,
    _gpu("A10-24GB", 22.1, 125, 62.5, 0, 0.6, "", f"{SHEET} A10, 2021-04", (0.56, 0.4, False)),
    _gpu("A40-48GB", 44.4, 149.7, 74.8, 0, 0.696, "", f"{SHEET} A40, 2020-10"),
    _gpu("RTX-A6000-48GB", 47.5, 154.8, 77.4, 0, 0.768, "", "NVIDIA Ampere GA102 white paper, 2021-01"),
    L4,
    _gpu("L40-48GB", 44.4, 181, 90.5, 362, 0.864, "", f"{SHEET} L40, 2022-10"),
    L40S,
    _gpu("RTX-3090-24GB", 23.7, 71, 35.6, 0, 0.936, "", "NVIDIA Ampere GA102 white paper, 2021-01"),
    _gpu("RTX-4090-24GB", 23.6, 165.2, 82.6, 330.3, 1.008, "", "NVIDIA Ada white paper, 2022-09"),
    _gpu("RTX-5090-32GB", 31.4, 209.5, 104.8, 419, 1.792, "", "NVIDIA RTX Blackwell white paper, 2025-01"),
    _gpu("RTX-6000-Ada-48GB", 47.5, 364.2, 182.1, 728.5, 0.96, "", f"{SHEET} RTX 6000 Ada, 2023-01"),
    _gpu("RTX-PRO-6000-96GB", 95.0, 503.8, 251.9, 1007.6, 1.792, "", "NVIDIA RTX Blackwell PRO white paper, 2025-03"),
    H100,
    _gpu("H100-PCIe-80GB", 79.2, 756, 378, 1513, 2.0, "", f"{SHEET} H100, 2023-04", HOPPER_CARD),
    _gpu("H100-NVL-94GB", 93.1, 835, 417.5, 1671, 3.9, "", f"{SHEET} H100 NVL, 2024-02", HOPPER_CARD),
    H200,
    _gpu("H200-NVL-141GB", 139.8, 835, 417.5, 1671, 4.8, "", f"{SHEET} H200, 2024-11", HOPPER_CARD),
    _gpu("GH200-96GB", 94.5, 989.4, 494.7, 1978.9, 4.0, "", f"{SHEET} GH200, 2023-08", (*HOPPER[:2], False), rail=400, arm=True),
    B200,
    B300,
    GB200,
    TRAINIUM1,
    TRAINIUM2,
)
NVIDIA = tuple(row for row in ACCELERATORS if row.kind == "cuda")
NAMES = tuple(dict.fromkeys(row.label for row in NVIDIA))  # that fleet.accelerator.name takes
CHIPS = {"trn1": (TRAINIUM1, 2), "trn2": (TRAINIUM2, 4)}  # by the driver's name of a device: its cores, as ranks see them
# What drivers, Slurm and people put around a name, and what is no other product. Any other word makes it one: a Laptop GPU, a Ti
AROUND = re.compile(
    r"nvidia|tesla|geforce|gpu|generation|ada|dgxs|sxm[0-9]?|hbm[0-9]e?|blackwell|server|workstation|edition|ac|nvl72|tensor|core"
)
GRACE = {"480gb", "144g"}  # of the processor of a Grace Hopper, which its GPU's name tells

UNSUPPORTED = (  # what people own and no stack here computes on: how the name begins, and why
    (r"amd|radeon|instinct|rx\b|mi[0-9]{2,3}[a-z]?\b", "AMD's: no stack here has ROCm, so no rank can compute on it"),
    (r"(intel )?(habana )?gaudi|hpu|intel|arc", "Intel's: no stack here has its software"),
    (r"(google )?tpu|v[2-6][ep]|ironwood|trillium", "Google's: no stack here has its software"),
    (r"(apple )?m[1-9]( (pro|max|ultra))?$|mps|apple", "Apple's: training there runs on the CPU cores"),
    (r"(tesla )?(k[1-9]0m?|m[1-9]0|p4|p6|p40|p100)\b|gtx|titan", "older than Volta: the stacks' torch has no code for it"),
    (r"trainium|trn[0-9]|inf[0-9]|inferentia|neuron", "AWS's: fleet.instance_type says which, as trn1.32xlarge"),
)


def find_accelerator(name: str, memory_bytes: float | None = None) -> Accelerator | None:
    """The row of a device as its driver, Slurm or a person calls it: `NVIDIA H200`, `a100_80gb`, `rtx4090`; None for another.

    Among several the nearest in memory; where that is unknown, as the name has it (`A100-SXM4-80GB`), else the smallest.
    """
    words = _words(name)
    rows = [row for row in NVIDIA if {*row.words} - {"rtx"} <= words.keys() and _is_only(words.keys() - set(row.words), row)]
    longest = max((len(row.words) for row in rows), default=0)
    rows = [row for row in rows if len(row.words) == longest]
    if memory_bytes is None:
        sizes = {_size(word) for word in words}
        rows = [row for row in rows if row.size in sizes] or rows
    return min(rows, key=lambda row: abs(row.memory_gib - (memory_bytes or 0) / 2**30), default=None)


def _words(name: str) -> dict[str, None]:
    """The words of a name in lower case: `rtx6000ada` has three."""
    text = re.sub(r"[^a-z0-9]+", " ", name[:200].lower())
    text = re.sub(r"\b(rtx|geforce|tesla|gtx)(?=[a-z0-9])", r"\1 ", text)
    return dict.fromkeys(re.sub(r"(?<=[0-9])(ada|pcie|sxm[0-9]?|nvl)\b", r" \1", text).split())


def _is_only(rest: set[str], row: Accelerator) -> bool:
    """Whether the other words of a name leave it the row's."""
    sizes = {each.size for each in NVIDIA if each.words == row.words}
    return all(AROUND.fullmatch(word) or _size(word) in sizes or (row.label == "gh200" and word in GRACE) for word in rest)


def _size(word: str) -> int:
    """GB that a word says: 80gb, 80g, 80."""
    match = re.fullmatch(r"([0-9]{2,3})(gb|g|gib)?", word)
    return int(match[1]) if match else 0


def unsupported(name: str) -> str:
    """Why no rank can compute on a device of that name, where that is known; else ""."""
    words = " ".join(re.sub(r"[^a-z0-9]+", " ", name[:200].lower()).split())
    return next((why for begins, why in UNSUPPORTED if re.match(begins, words)), "")
