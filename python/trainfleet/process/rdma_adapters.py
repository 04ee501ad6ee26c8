"""Reads a node's RDMA ports (InfiniBand, RoCE, EFA) from sysfs, and selects the ports of a fabric.

The files are /sys/class/infiniband/<name>/ports/<n>/{link_layer,rate,state} (docs.kernel.org,
Documentation/ABI/stable/sysfs-class-infiniband). A plan specifies only the fabric, and each node
finds its own ports, because port names differ between nodes. Uses only the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("/sys/class/infiniband")
MOST = 64  # maximum number of ports to read on a node
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"


@dataclass(frozen=True)
class Port:
    """Port of an RDMA adapter, such as port 1 of mlx5_0 with an active 400 Gbit/s InfiniBand
    link.
    """

    adapter: str
    number: int
    link: str
    gbps: float
    active: bool
    driver: str

    def __str__(self) -> str:
        """Formats the port for NCCL_IB_HCA."""
        return f"{self.adapter}:{self.number}"

    @property
    def fabric(self) -> str:
        """Returns the fabric of the port's link, or "" if NCCL and libfabric do not support the
        link type.
        """
        if self.driver == "efa":
            return "efa"
        return {"InfiniBand": "infiniband", "Ethernet": "roce"}.get(self.link, "")


def read_port(
    adapter: str, number: str, link: str, rate: str, state: str, driver: str
) -> Port | None:
    """Parses a port from kernel files such as `400 Gb/sec (4X NDR)` and `4: ACTIVE`. Returns None
    for any other text.
    """
    gbps = re.match(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec", rate)
    if not (re.fullmatch(NAME, adapter) and re.fullmatch("[0-9]{1,3}", number) and gbps):
        return None
    return Port(
        adapter, int(number), link[:32], float(gbps[1]), state.startswith("4:"), driver[:32]
    )


def ports_here(folder: Path = FOLDER) -> tuple[Port, ...]:
    """Returns all RDMA ports of this machine."""
    found = []
    for path in sorted(folder.glob("*/ports/*"))[:MOST]:
        try:
            link, rate, state = (
                (path / name).read_text()[:100].strip() for name in ("link_layer", "rate", "state")
            )
        except (OSError, ValueError):
            continue
        driver = (path.parents[1] / "device/driver").resolve().name
        found.append(read_port(path.parents[1].name, path.name, link, rate, state, driver))
    return tuple(port for port in found if port)


def fastest(ports: Iterable[Port], fabric: str) -> tuple[Port, ...]:
    """Returns a fabric's active ports with the highest rate. Slower ports are assumed to be for
    storage and logins.
    """
    speaking = [port for port in ports if port.active and port.fabric == fabric]
    most = max((port.gbps for port in speaking), default=0.0)
    return tuple(port for port in speaking if port.gbps == most)


def listed(ports: Iterable[Port]) -> str:
    """Formats ports for NCCL_IB_HCA, as in mlx5_0:1,mlx5_1:1."""
    return ",".join(map(str, ports))
