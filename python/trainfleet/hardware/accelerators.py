"""Lists the accelerators that the planner knows: one row of accelerators.json each, with its
source, and people's names for them.

Peaks are dense (no sparsity), with sums in fp32, like in training. Memory is torch's figure
(`total_memory`), which is less than the name's: error correction and the driver use a part.
Machines that have them: hardware/node_types.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Accelerator:
    """One device as one rank sees it: memory in GiB, dense peaks in FLOP/s, and its links to others
    in its node.

    `bf16` and `fp8`: `None` if it has no such instructions, or if trainfleet does not use them.
    `fp32` is the peak of fp32 products as the engine computes them: by TensorFloat-32 if the device
    has it (devices/cuda.py). `links` is empty if neighbours communicate over PCIe. In bytes/s,
    `neighbours` is the rate at which a rank sends to them, and `bandwidth` that of its memory.

    `efficiency` is the fraction of the peak that large products reach in training, and `attention`
    the fraction of that for attention. With `fitted`, both are fitted to published rows
    (tests/bench/fit_planner.py); otherwise they are taken from a similar device. B200's are from
    Megatron's rows alone, and torch's own disagree (tests/bench/LOG.md). B300 has B200's
    plus 6 % for 1,100 W instead of 1,000, the gain of H100 from 500 to 700 W. Its attention has 13
    % more for 10.7e12 exponentials per second instead of 5e12 (NVIDIA's figures): a score takes two
    next to 1,800 FLOPs, forward and backward. V100's are from six runs of 52B in fp16
    (tests/bench/LOG.md). Cards of 300 to 400 W are reduced like H100 of 500 W against those of 700
    (0.56, fitted), T4 of 70 W more so (Jia et al. 2019, arXiv:1903.07486, 5: clocks fall under
    load). GB200 has B200's plus 12 % for 1,200 W instead of 1,000, by the same runs of H100. A
    logical NeuronCore-v3 is two physical ones.

    `side`: ranks along one side of the torus of chips, 4 x 4 (AWS Neuron, Trn1 and Trn2
    Architecture); 0 without a torus. `domain`: number of devices that the links join, if it is more
    than a node's; 0: a node's.

    For machines that are not EC2's, `per_node` is the usual number of devices per node. `rail` is
    the usual rate of the network card per device in Gbit/s, 0 without a usual rate. `platform`: the
    only one that supports it, if not its kind's newest. `arm`: its host's processors are ARM's. The
    last word of the name is the memory, as makers and people write it.
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
    fp16: float | None = None  # if it differs from bf16's
    side: int = 0
    domain: int = 0
    per_node: int = 1
    rail: int = 0
    platform: str = ""
    arm: bool = False
    source: str = ""

    @property
    def half(self) -> str:
        """The two-byte format that is best for its products; fp32 without such a format."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @property
    def words(self) -> tuple[str, ...]:
        """The words of its name without the memory: rtx, 6000, ada."""
        return tuple(self.name.lower().split("-")[:-1])

    @property
    def label(self) -> str:
        """Its name in fleet.accelerator.name: rtx-6000-ada."""
        return "-".join(self.words)

    @property
    def size(self) -> int:
        """Its memory in GB from its name; 0 if the name has none."""
        match = re.fullmatch(r"([0-9]+)GB", self.name.rpartition("-")[2])
        return int(match[1]) if match else 0

    def peak(self, format_: str) -> float:
        """Returns FLOP/s of products in fp8, bf16, fp16 or fp32; the last if there are no
        instructions for the format.
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
# Units of a row's numbers: peaks in TFLOP/s, memory bandwidth in TB/s, and traffic to neighbours in
# GB/s
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
# By the driver's name of a device: its cores, as ranks see them
CHIPS = {"trn1": (BY_NAME["NeuronCore-v2"], 2), "trn2": (BY_NAME["NeuronCore-v3 x2"], 4)}
# Words that drivers, Slurm and people put around a name, and that do not make it another product.
# Any other word does: a Laptop GPU, a Ti
AROUND = re.compile(
    r"nvidia|tesla|geforce|gpu|generation|ada|dgxs|sxm[0-9]?|hbm[0-9]e?|blackwell|server|workstation|edition|ac|nvl72|tensor|core"
)
GRACE = {"480gb", "144g"}  # memory of the processor of a Grace Hopper, which is in its GPU's name

# devices that people own and no platform here supports: the beginning of the name, and the reason
UNSUPPORTED = (
    (
        r"amd|radeon|instinct|rx\b|mi[0-9]{2,3}[a-z]?\b",
        "AMD's: no platform here has ROCm, so no rank can compute on it",
    ),
    (r"(intel )?(habana )?gaudi|hpu|intel|arc", "Intel's: no platform here has its software"),
    (r"(google )?tpu|v[2-6][ep]|ironwood|trillium", "Google's: no platform here has its software"),
    (
        r"(apple )?m[1-9]( (pro|max|ultra))?$|mps|apple",
        "Apple's: training there runs on the CPU cores",
    ),
    (
        r"(tesla )?(k[1-9]0m?|m[1-9]0|p4|p6|p40|p100)\b|gtx|titan",
        "older than Volta: the platforms' torch has no code for it",
    ),
    (
        r"trainium|trn[0-9]|inf[0-9]|inferentia|neuron",
        "AWS's: set fleet.instance_type, for example trn1.32xlarge",
    ),
)


def find_accelerator(name: str, memory_bytes: float | None = None) -> Accelerator | None:
    """Finds the row of a device by the name that its driver, Slurm or a person uses: `NVIDIA H200`,
    `a100_80gb`, `rtx4090`; None for another.

    Among several it returns the nearest in memory. If that is unknown, it returns the one in the
    name (`A100-SXM4-80GB`), or else the smallest.
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
    """Returns the words of a name in lower case: `rtx6000ada` has three."""
    text = re.sub(r"[^a-z0-9]+", " ", name[:200].lower())
    text = re.sub(r"\b(rtx|geforce|tesla|gtx)(?=[a-z0-9])", r"\1 ", text)
    return dict.fromkeys(re.sub(r"(?<=[0-9])(ada|pcie|sxm[0-9]?|nvl)\b", r" \1", text).split())


def _is_only(rest: set[str], row: Accelerator) -> bool:
    """Tells whether a name with these other words is still the row's."""
    sizes = {each.size for each in NVIDIA if each.words == row.words}
    return all(
        AROUND.fullmatch(word) or _size(word) in sizes or (row.label == "gh200" and word in GRACE)
        for word in rest
    )


def _size(word: str) -> int:
    """Returns the GB in a word: 80gb, 80g, 80."""
    match = re.fullmatch(r"([0-9]{2,3})(gb|g|gib)?", word)
    return int(match[1]) if match else 0


def unsupported(name: str) -> str:
    """Returns why no rank can compute on a device of that name, if known; otherwise ""."""
    words = " ".join(re.sub(r"[^a-z0-9]+", " ", name[:200].lower()).split())
    return next((why for begins, why in UNSUPPORTED if re.match(begins, words)), "")
