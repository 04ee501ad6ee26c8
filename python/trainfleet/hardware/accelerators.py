"""The accelerators that the planner knows: a row of accelerators.json each, with its source, and
what people call them.

Peaks are dense (no sparsity), with sums in fp32, as training has them. Memory is what torch reports
(`total_memory`), which is less than the name says where error correction and the driver take their
part. Machines that have them: hardware/node_types.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Accelerator:
    """One device as one rank sees it: memory in GiB, dense peaks in FLOP/s, and what joins it to
    those of its node.

    `bf16` and `fp8` are None where there are no such instructions, or nothing here that uses them.
    `fp32` is that of fp32 products as the engine has them computed: by TensorFloat-32 where the
    device has it (devices/cuda.py). `links` is empty where neighbours meet over PCIe; `neighbours`
    is what a rank sends to them, and `bandwidth` what its memory moves, in bytes/s. `efficiency` is
    the fraction of the peak that large products reach in training, and `attention` the fraction of
    that which attention reaches: fitted to published rows (tests/bench/fit_planner.py) where
    `fitted`, else taken from a similar device (B300: B200's, and 6 % more for 1,100 W instead of
    1,000, by what 700 W bring H100 over 500; attention 13 % more for 10.7e12 exponentials a second
    instead of 5e12, NVIDIA's figures: a score takes two beside 1,800 FLOPs, forward and backward).
    V100's are of six runs of 52B in fp16 (tests/bench/LOG.md). Cards of 300 to 400 W are held back
    as H100 of 500 W are against those of 700 (0.56, fitted), T4 of 70 W more so (Jia et al. 2019,
    arXiv:1903.07486, 5: clocks fall under load); GB200 has B200's, and 12 % more for 1,200 W
    instead of 1,000, by the same runs of H100. A logical NeuronCore-v3 is two physical ones.
    `side`: ranks along one side of the torus of chips, 4 x 4 (AWS Neuron, Trn1 and Trn2
    Architecture); 0 where there is none. `domain`: devices that the links join, where these are
    more than a node's; 0: a node's.

    Of machines that are not EC2's: `per_node`, how many a node usually has; `rail`, Gbit/s of the
    network card for each device that such nodes usually have, 0 where there is no usual number.
    `stack`: the only one that supports it, if not its kind's newest. `arm`: its host's processors
    are ARM's. The last word of the name is the memory, as makers and people say it.
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
        """The format of two bytes that its products are best computed in; fp32 where there is
        none.
        """
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
        """FLOP/s of products in fp8, bf16, fp16 or fp32; the last where there are no instructions
        for the format.
        """
        return {"fp8": self.fp8, "bf16": self.bf16, "fp16": self.fp16 or self.bf16}.get(
            format_
        ) or self.fp32


def _rows() -> Iterator[Accelerator]:
    for name, row in json.loads(FILE.read_text(encoding="utf-8")).items():
        for key, unit in UNITS.items():
            if row.get(key) is not None:
                row[key] *= unit
        yield Accelerator(name, **row)


FILE = Path(__file__).with_name("accelerators.json")
# Of the numbers of a row: peaks are in TFLOP/s there, what memory moves in TB/s, and what goes to
# neighbours in GB/s
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
NAMES = tuple(dict.fromkeys(row.label for row in NVIDIA))  # that fleet.accelerator.name takes
# By the driver's name of a device: its cores, as ranks see them
CHIPS = {"trn1": (BY_NAME["NeuronCore-v2"], 2), "trn2": (BY_NAME["NeuronCore-v3 x2"], 4)}
# What drivers, Slurm and people put around a name, and what is no other product. Any other word
# makes it one: a Laptop GPU, a Ti
AROUND = re.compile(
    r"nvidia|tesla|geforce|gpu|generation|ada|dgxs|sxm[0-9]?|hbm[0-9]e?|blackwell|server|workstation|edition|ac|nvl72|tensor|core"
)
GRACE = {"480gb", "144g"}  # of the processor of a Grace Hopper, which its GPU's name tells

UNSUPPORTED = (  # what people own and no stack here computes on: how the name begins, and why
    (
        r"amd|radeon|instinct|rx\b|mi[0-9]{2,3}[a-z]?\b",
        "AMD's: no stack here has ROCm, so no rank can compute on it",
    ),
    (r"(intel )?(habana )?gaudi|hpu|intel|arc", "Intel's: no stack here has its software"),
    (r"(google )?tpu|v[2-6][ep]|ironwood|trillium", "Google's: no stack here has its software"),
    (
        r"(apple )?m[1-9]( (pro|max|ultra))?$|mps|apple",
        "Apple's: training there runs on the CPU cores",
    ),
    (
        r"(tesla )?(k[1-9]0m?|m[1-9]0|p4|p6|p40|p100)\b|gtx|titan",
        "older than Volta: the stacks' torch has no code for it",
    ),
    (
        r"trainium|trn[0-9]|inf[0-9]|inferentia|neuron",
        "AWS's: fleet.instance_type says which, as trn1.32xlarge",
    ),
)


def find_accelerator(name: str, memory_bytes: float | None = None) -> Accelerator | None:
    """The row of a device as its driver, Slurm or a person calls it: `NVIDIA H200`, `a100_80gb`,
    `rtx4090`; None for another.

    Among several the nearest in memory; where that is unknown, as the name has it
    (`A100-SXM4-80GB`), else the smallest.
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
    """The words of a name in lower case: `rtx6000ada` has three."""
    text = re.sub(r"[^a-z0-9]+", " ", name[:200].lower())
    text = re.sub(r"\b(rtx|geforce|tesla|gtx)(?=[a-z0-9])", r"\1 ", text)
    return dict.fromkeys(re.sub(r"(?<=[0-9])(ada|pcie|sxm[0-9]?|nvl)\b", r" \1", text).split())


def _is_only(rest: set[str], row: Accelerator) -> bool:
    """Whether the other words of a name leave it the row's."""
    sizes = {each.size for each in NVIDIA if each.words == row.words}
    return all(
        AROUND.fullmatch(word) or _size(word) in sizes or (row.label == "gh200" and word in GRACE)
        for word in rest
    )


def _size(word: str) -> int:
    """GB that a word says: 80gb, 80g, 80."""
    match = re.fullmatch(r"([0-9]{2,3})(gb|g|gib)?", word)
    return int(match[1]) if match else 0


def unsupported(name: str) -> str:
    """Why no rank can compute on a device of that name, where that is known; else ""."""
    words = " ".join(re.sub(r"[^a-z0-9]+", " ", name[:200].lower()).split())
    return next((why for begins, why in UNSUPPORTED if re.match(begins, words)), "")
