"""Node facts, collected by facts.sh in one round trip and parsed here.

Facts are immutable plain data. Nodes are trusted, but their output may be incomplete or malformed.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from itertools import permutations, product, takewhile
from pathlib import Path
from typing import Any

from ..config import Config
from ..health.neuron_telemetry import NeuronDevice, read_devices
from ..process.rdma_adapters import MOST, NAME, Port, read_port
from ..trust.errors import InputError
from .host_results import Host, HostFailure, Implausible, Result, implausible, settled
from .transport import Transport

SCRIPT = Path(__file__).with_name("facts.sh")
TIMEOUT = 30.0  # seconds; a node that takes longer to respond is unfit for training


@dataclass(frozen=True)
class Space:
    """A file system's free space in KiB, type, device and mount point."""

    free_kib: int
    kind: str
    device: str
    mounted: str = "/"


@dataclass(frozen=True)
class Facts:
    """Facts about a node.

    Empty values mean that the item is absent. Version strings are unmodified tool output.
    """

    hostname: str = ""
    os: str = ""  # distribution and version, for example `ubuntu 22.04`
    kernel: str = ""
    machine: str = ""
    boot_id: str = ""
    user: str = ""
    root: bool = False  # whether the user is root or has passwordless sudo access
    cores: int = 0
    memory_kib: int = 0
    memlock: str = ""  # limit on locked memory: KiB, or `unlimited`
    nofile: int = 0
    disk: Space | None = None
    shared: Space | None = None  # file system that contains, or will contain, fleet.shared_folder
    shared_folder: str = ""  # "writable", "read-only", or "" if it does not exist
    owner: str = ""  # owner of fleet.shared_folder
    has: tuple[str, ...] = ()  # files that exist, out of those that setup creates or requires
    lacks: tuple[str, ...] = ()  # programs that are not installed
    authorized: bool = False  # whether authorized_keys contains the head's key
    # types of the PCI devices (nvidia, efa, neuron ...), one entry per device
    bus: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    gpu_trouble: tuple[str, ...] = ()  # nvidia-smi lines about GPUs with errors or missing values
    neuron: tuple[str, ...] = ()
    # counter (`neuron0/.../total`) → number of uncorrected memory errors
    neuron_ecc: dict[str, int] = field(default_factory=dict)
    neuron_devices: tuple[NeuronDevice, ...] = ()  # devices listed by neuron-ls
    neuron_trouble: str = ""  # neuron-ls error message, if it failed
    infiniband: tuple[str, ...] = ()  # RDMA adapters of any type
    ports: tuple[Port, ...] = ()  # ports of the RDMA adapters
    speeds: dict[str, int] = field(default_factory=dict)  # network interface → Mbit/s
    topology: Topology | None = None  # GPU topology; read only with --links
    slices: int = 0  # number of MIG slices; read only with --links
    uverbs: bool = False
    efa: str = ""  # EFA installer version
    fi_info: int = -1  # number of endpoints listed by `fi_info -p efa`, or -1 if fi_info is missing
    lnet: int = 0  # number of EFA interfaces used by Lustre
    packages: dict[str, str] = field(default_factory=dict)
    scratch_disks: tuple[str, ...] = ()
    mounts: dict[str, str] = field(default_factory=dict)  # folder → `type device`
    mtu: dict[str, int] = field(default_factory=dict)  # network interface → MTU in bytes
    addresses: dict[str, str] = field(default_factory=dict)  # address → network interface
    resolves: dict[str, str] = field(default_factory=dict)  # hostname → address
    python: str = ""
    torch: str = ""
    # logger and a Python interpreter that can import it, such as `wandb /path/to/python`
    loggers: tuple[str, ...] = ()
    kernel_says: tuple[str, ...] = ()  # dmesg lines about hardware failures
    clock_offset: float = 0.0  # seconds by which the node's clock is ahead of this machine's
    seconds: float = 0.0  # response time in seconds

    @property
    def space_gb(self) -> float:
        """Free space on the root disk, in GB."""
        return self.disk.free_kib * 1024 / 1e9 if self.disk else 0.0

    def card(self, host: Host) -> str:
        """Returns the network interface with the address of `host`.

        A public address is not assigned to any interface, so it maps to the first one other than
        loopback.
        """
        named = self.addresses.get(host.address) or self.addresses.get(
            self.resolves.get(host.address, "")
        )
        return named or next((card for card in self.mtu if card != "lo"), "lo")

    def address(self, host: Host) -> str:
        """Returns the address at which other nodes can reach this one.

        If fleet.hosts contains a public address, returns the private address of the same interface.
        """
        card = self.card(host)
        own = [
            address
            for address, holder in self.addresses.items()
            if holder == card and ":" not in address
        ]
        return host.address if host.address in self.addresses else own[0] if own else host.address


def read(
    transport: Transport, config: Config, hosts: Iterable[Host] | None = None, links: bool = False
) -> dict[Host, Facts | HostFailure]:
    """Reads the facts of every host, returning a failure for each host that can't be read.

    With `links`, also reads the GPU topology, which takes an extra second.
    """
    fleet = config.fleet
    peers = [host.address for host in transport.hosts]
    own = [fleet.shared_folder or "", fleet.python or "", " ".join(config.train.loggers)]
    words = shlex.join([*(["--links"] if links else []), *own, *peers])
    script = f"sh -s -- {words}", SCRIPT.read_text(encoding="utf-8")

    def ask(host: Host) -> Facts | HostFailure:
        # connect first, so that connection setup does not skew the clock comparison
        answer = settled(transport.ask(host, "true", timeout=TIMEOUT))
        if isinstance(answer, Result):
            answer = settled(transport.ask(host, script[0], stdin=script[1], timeout=TIMEOUT))
        if isinstance(answer, HostFailure):
            return answer
        try:
            return parse(answer.stdout, answer.seconds)
        except Implausible as error:
            return implausible(error, "the output of facts.sh")

    return transport.each(ask, hosts, leave_behind=True)


def read_here() -> Facts:
    """Reads this machine's facts, including its GPU topology.

    Raises:
        Implausible: facts.sh could not be started, or timed out.
    """
    words = ["sh", "-s", "--", "--links", "", "", "", "localhost"]
    try:
        said = subprocess.run(
            words,
            input=SCRIPT.read_text(encoding="utf-8"),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Implausible(str(error)) from None
    return parse(said.stdout)


def parse(text: str, seconds: float = 0.0, now: float | None = None) -> Facts:
    """Parses the output of facts.sh, ignoring anything that a login shell printed before it.

    Raises:
        Implausible: the output is incomplete, or a value is invalid.
    """
    _, start, rest = text.partition("== facts\n")
    body, end, _ = rest.partition("== end")
    if not start or not end:
        raise Implausible(f"the beginning or end is missing: {text[-200:]!a}")
    lines = defaultdict[str, list[str]](list)
    for line in body.split("\n"):
        key, equals, value = line.partition("=")
        if equals:
            lines[key].append(value)
    return _build(lines, seconds, time.time() if now is None else now)


def _build(lines: dict[str, list[str]], seconds: float, now: float) -> Facts:
    gpus, gpu_trouble = read_gpus(lines["gpu"])
    devices, neuron_trouble = _listed(lines["neuron_ls"])
    clock = "".join(lines["clock"][:1]) or str(now)
    found: dict[str, Any] = {
        "gpus": gpus,
        "gpu_trouble": gpu_trouble,
        "neuron_devices": devices,
        "neuron_trouble": neuron_trouble,
        "topology": read_topology(lines["topology"]),
        # facts.sh reads the clock about half an RTT after the request was sent
        "clock_offset": _seconds(clock) - (now - seconds),
        "seconds": seconds,
        **_network(lines),
        **_limits(lines),
    }
    for field_ in fields(Facts):
        if (name := field_.name) not in found:
            found[name] = READ[str(field_.type)](name, lines[KEYS.get(name, name)])
    return Facts(**found)


def _limits(lines: dict[str, list[str]]) -> dict[str, Any]:
    files, endpoints, efa = ("".join(lines[key][:1]) for key in ("nofile", "fi_info", "efa"))
    return {
        "nofile": 1 << 30 if files == "unlimited" else _count("nofile", [files]),
        "fi_info": _count("fi_info", [endpoints]) if endpoints else -1,
        "efa": efa.rpartition(":")[2].strip().lstrip("v"),
    }


def _network(lines: dict[str, list[str]]) -> dict[str, Any]:
    return {
        "ports": _ports(lines["port"]),
        "mtu": _counts("mtu", lines["mtu"]),
        "speeds": {
            card: int(rate)
            for card, rate in _pairs(lines["speed"])
            if re.fullmatch("[1-9][0-9]{0,8}", rate)
        },
        "addresses": {address: card for card, address in _pairs(lines["address"])},
        "resolves": {
            name: address for address, names in _pairs(lines["resolves"]) for name in names.split()
        },
    }


def _pairs(lines: list[str]) -> list[tuple[str, str]]:
    return [(first, rest) for line in lines for first, _, rest in [line.partition(" ")]]


def _counts(key: str, lines: list[str]) -> dict[str, int]:
    return {name: _count(key, [count]) for name, count in _pairs(lines)}


def _count(key: str, lines: list[str]) -> int:
    """Parses the first line as an integer, or returns 0 if it is missing."""
    text = "".join(lines[:1])
    if not re.fullmatch(r"[0-9]{0,20}", text):
        raise Implausible(f"{key}={text[:60]!a} is not a number")
    return int(text or 0)


def _seconds(text: str) -> float:
    # `date` leaves the N in its output if it does not support %N
    if not re.fullmatch(r"[0-9]{1,11}(\.([0-9]{0,9}|N))?", text):
        raise Implausible(f"clock={text[:60]!a} is not a time")
    return float(text.rstrip("N"))


def _ports(lines: list[str]) -> tuple[Port, ...]:
    """Parses RDMA ports: name, number, link, state, driver and rate. Skips malformed lines."""
    words = [line.split(" ", 5) for line in lines[:MOST]]
    found = [
        read_port(name, number, link, rate, state, driver)
        for name, number, link, state, driver, rate in (row for row in words if len(row) == 6)
    ]
    return tuple(port for port in found if port)


def _space(key: str, lines: list[str]) -> Space | None:
    """Parses one file system's line of df output. Returns None if the line is missing or empty."""
    text = "".join(lines[:1])
    words = text.split(None, 3)
    if not words:
        return None
    if len(words) < 3:
        raise Implausible(f"{key}={text[:60]!a} is not a file system")
    return Space(_count(key, words), *words[1:])


def _listed(lines: list[str]) -> tuple[tuple[NeuronDevice, ...], str]:
    """Returns the devices listed by neuron-ls, or its error message."""
    try:
        return (read_devices("\n".join(lines)) if lines else ()), ""
    except InputError:
        return (), next((line.strip()[:160] for line in reversed(lines) if line.strip()), "")


# Facts fields that have a different key in facts.sh's output
KEYS = {
    "loggers": "logger",
    "mounts": "mount",
    "packages": "package",
    "scratch_disks": "scratch_disk",
    "slices": "mig",
}
# Facts field type → parser for its lines
READ: dict[str, Callable[[str, list[str]], Any]] = {
    "str": lambda key, lines: "".join(lines[:1]),
    "bool": lambda key, lines: lines[:1] == ["yes"],
    "int": _count,
    "Space | None": _space,
    "tuple[str, ...]": lambda key, lines: tuple(lines),
    "dict[str, str]": lambda key, lines: dict(_pairs(lines)),
    "dict[str, int]": _counts,
}


# nvidia-smi's values for unsupported counters
ABSENT = ("[N/A]", "N/A", "[Not Supported]", "[Not Available]", "")
SHOWN = 160  # maximum length of a quoted line that does not describe a GPU, in characters
WIDEST = 256  # maximum rows and columns of a topology matrix
# link types in the legend of `nvidia-smi topo -m`
LINK = re.compile(r"X|NV[0-9]{1,3}|PIX|PXB|PHB|NODE|SYS|C2C")
# GPUs and NICs; older drivers print names such as mlx5_0 instead of NIC0
PLACE = re.compile(r"(GPU|NIC)[0-9]{1,3}|mlx[0-9]_[A-Za-z0-9_]{1,32}")
NEAR = ("PIX", "PXB")  # link types with only PCIe switches between a GPU and a NIC
CODES = re.compile("\x1b?\\[[0-9;]*m")  # escape sequences that underline the header


@dataclass(frozen=True)
class Gpu:
    """A GPU's driver version, memory in MiB, uncorrected memory errors since boot, and name."""

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
    rows = [CODES.sub("", line).split() for line in lines]
    columns, matrix = _header(rows)
    links = {
        (row[0], name): link for row in matrix for name, link in zip(columns, row[1:], strict=False)
    }
    gpus = [name for name in columns if name.startswith("GPU")]
    of_gpus = [links.get(pair, "") for pair in product(gpus, columns)]
    if not gpus or not all(map(LINK.fullmatch, of_gpus)):
        return None
    between = [int("0" + links[pair].partition("NV")[2]) for pair in permutations(gpus, 2)]
    legend = _legend(rows)
    near = tuple(
        legend.get(name, name)
        for name in columns
        if name not in gpus and any(links[gpu, name] in NEAR for gpu in gpus)
    )
    return Topology(min(between, default=0), max(between, default=0), near)


def _header(rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Returns the GPU and NIC names in the matrix's header, if any, and the rows below it."""
    for at, row in enumerate(rows, 1):
        if row[:1] == ["GPU0"] and row[1:2] != ["X"]:
            return [*takewhile(PLACE.fullmatch, row[:WIDEST])], rows[at : at + WIDEST]
    return [], []


def _legend(rows: list[list[str]]) -> dict[str, str]:
    """Parses the legend below the matrix into a mapping such as NIC0 → mlx5_0."""
    return {
        row[0][:-1]: row[1]
        for row in rows
        if len(row) == 2 and re.fullmatch("NIC[0-9]{1,3}:", row[0]) and re.fullmatch(NAME, row[1])
    }
