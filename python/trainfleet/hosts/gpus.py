"""Parses nvidia-smi's report on a node's GPUs and their links.

The input is untrusted, because it comes from another machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    at = next(
        (at for at, row in enumerate(rows) if row[:1] == ["GPU0"] and row[1:2] != ["X"]), None
    )
    if at is None:
        return None
    columns = _names(rows[at])
    matrix = {
        row[0]: row[1 : len(columns) + 1]
        for row in rows[at + 1 : at + 1 + MOST]
        if row and PLACE.fullmatch(row[0])
    }
    gpus = [name for name in columns if name.startswith("GPU")]
    if not gpus or any(len(matrix.get(name, ())) < len(columns) for name in gpus):
        return None
    links = {
        (one, other): link
        for one in gpus
        for other, link in zip(columns, matrix[one], strict=False)
    }
    if not all(LINK.fullmatch(link) for link in links.values()):
        return None
    between = [_count(links[one, other]) for one in gpus for other in gpus if one != other]
    near = tuple(
        name
        for name in columns
        if name not in gpus and any(links[gpu, name] in NEAR for gpu in gpus)
    )
    legend = _legend(rows)
    return Topology(
        min(between, default=0),
        max(between, default=0),
        tuple(legend.get(name, name) for name in near),
    )


def _names(row: Sequence[str]) -> list[str]:
    """Returns the GPU and NIC names at the start of the header."""
    found: list[str] = []
    for word in row[:MOST]:
        if not PLACE.fullmatch(word):
            break
        found.append(word)
    return found


def _legend(rows: Iterable[Sequence[str]]) -> dict[str, str]:
    """Parses the legend below the matrix into a mapping such as NIC0 → mlx5_0."""
    pairs = [
        (row[0][:-1], row[1])
        for row in rows
        if len(row) == 2 and re.fullmatch(r"NIC[0-9]{1,3}:", row[0])
    ]
    return {place: name for place, name in pairs if re.fullmatch(NAME, name)}


def _count(link: str) -> int:
    return int(link[2:]) if link.startswith("NV") else 0
