"""Parses nvidia-smi's report on a node's GPUs and their links.

The input is untrusted, because it comes from another machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations, product, takewhile

from ..process.rdma_adapters import NAME

# nvidia-smi's values for unsupported counters
ABSENT = ("[N/A]", "N/A", "[Not Supported]", "[Not Available]", "")
SHOWN = 160  # maximum characters to keep of a line that does not describe a GPU
MOST = 256  # maximum rows and columns of a topology matrix
# link types in the legend of `nvidia-smi topo -m`
LINK = re.compile(r"X|NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS|C2C")
# GPUs and NICs; older drivers print names such as mlx5_0 instead of NIC0
PLACE = re.compile(r"(GPU|NIC)[0-9]{1,3}|mlx[0-9]_[A-Za-z0-9_]{1,32}")
NEAR = ("PIX", "PXB")  # link types with only PCIe switches between a GPU and a NIC
# Escape sequences that underline the header. Facts contain \ufffd instead of the escape character.
CODES = re.compile("[\x1b\ufffd]?\\[[0-9;]{0,8}m")


@dataclass(frozen=True)
class Gpu:
    """GPU: driver version, memory in MiB, uncorrected memory errors since boot, and name."""

    driver: str
    memory_mib: int
    ecc_errors: int
    name: str


@dataclass(frozen=True)
class Topology:
    """Links between a node's GPUs.

    `fewest` and `most` are the minimum and maximum number of NVLinks per GPU pair. `near` lists the
    NICs that are connected to a GPU through PCIe switches only.
    """

    fewest: int
    most: int
    near: tuple[str, ...]


def read_gpus(lines: Iterable[str]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Returns the GPUs that respond, and the nvidia-smi lines about GPUs with errors or missing
    values.
    """
    found, trouble = [], []
    for line in lines:
        words = [word.strip() for word in line.split(",", 3)]
        numbers = [
            0
            if word in ABSENT
            else int(float(word))
            if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", word)
            else None
            for word in words[1:3]
        ]
        if len(words) == 4 and numbers[0] is not None and numbers[1] is not None:
            found.append(Gpu(words[0], numbers[0], numbers[1], words[3]))
        else:
            trouble.append(line.strip()[:SHOWN])
    return tuple(found), tuple(trouble)


def read_topology(lines: Iterable[str]) -> Topology | None:
    """Parses the output of `nvidia-smi topo -m`. Returns None if it contains no valid matrix."""
    rows = [CODES.sub("", line).replace("\ufffd", " ").split() for line in lines]
    columns, matrix = _header(rows)
    links = {
        (row[0], name): link for row in matrix for name, link in zip(columns, row[1:], strict=False)
    }
    gpus = [name for name in columns if name.startswith("GPU")]
    of_gpus = [links.get(pair, "") for pair in product(gpus, columns)]
    if not gpus or not all(map(LINK.fullmatch, of_gpus)):
        return None
    between = [_count(links[pair]) for pair in permutations(gpus, 2)]
    legend = _legend(rows)
    near = tuple(
        legend.get(name, name)
        for name in columns
        if name not in gpus and any(links[gpu, name] in NEAR for gpu in gpus)
    )
    return Topology(min(between, default=0), max(between, default=0), near)


def _header(rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Returns the GPU and NIC names in the matrix's header, and the rows below it. Both are empty
    if there is no header.
    """
    for at, row in enumerate(rows, 1):
        if row[:1] == ["GPU0"] and row[1:2] != ["X"]:
            return [*takewhile(PLACE.fullmatch, row[:MOST])], rows[at : at + MOST]
    return [], []


def _legend(rows: list[list[str]]) -> dict[str, str]:
    """Parses the legend below the matrix into a mapping such as NIC0 → mlx5_0."""
    return {
        row[0][:-1]: row[1]
        for row in rows
        if len(row) == 2 and re.fullmatch("NIC[0-9]{1,3}:", row[0]) and re.fullmatch(NAME, row[1])
    }


def _count(link: str) -> int:
    return int(link[2:]) if link.startswith("NV") else 0
