"""What a node is and has: read in one round trip by facts.sh, parsed here, and never changed. Tests give them as data."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

from ..config import Config
from .answers import Failure, Host, Result, reason
from .transport import Transport

SCRIPT = Path(__file__).with_name("facts.sh")
TIMEOUT = 30.0  # seconds; a node that can't say in that time what it is can't train either


@dataclass(frozen=True)
class Gpu:
    """One GPU: driver version, memory in MiB, uncorrected memory errors since boot, name."""

    driver: str
    memory_mib: int
    ecc_errors: int
    name: str


@dataclass(frozen=True)
class Space:
    """A file system: KiB free, its kind, its device, where it is mounted."""

    free_kib: int
    kind: str
    device: str
    mounted: str = "/"


@dataclass(frozen=True)
class Facts:
    """One node as it said it is. Empty means: not there. Versions are as their tools print them."""

    hostname: str = ""
    os: str = ""  # `ubuntu 22.04`
    kernel: str = ""
    machine: str = ""
    boot_id: str = ""
    user: str = ""
    root: bool = False  # is root, or may become it by sudo without a password
    cores: int = 0
    memory_kib: int = 0
    huge_pages: int = 0
    memlock: str = ""  # KiB, or `unlimited`
    nofile: int = 0
    disk: Space | None = None
    shared: Space | None = None  # what fleet.shared_folder lies on, or would
    shared_folder: str = ""  # writable, read-only, or not there
    has: tuple[str, ...] = ()  # files that setup leaves behind
    lacks: tuple[str, ...] = ()  # programs that are not there
    authorized: bool = False  # the head's key opens this node
    bus: tuple[str, ...] = ()  # nvidia, efa, neuron: one word a device on the PCI bus
    gpus: tuple[Gpu, ...] = ()
    neuron_driver: str = ""
    neuron: tuple[str, ...] = ()
    neuron_ecc: dict[str, int] = field(default_factory=dict)  # counter (`neuron0/.../total`) → uncorrected memory errors
    infiniband: tuple[str, ...] = ()
    uverbs: bool = False
    efa: str = ""  # installer version
    fi_info: int = -1  # endpoints that `fi_info -p efa` lists; -1 without fi_info
    packages: dict[str, str] = field(default_factory=dict)
    scratch_disks: tuple[str, ...] = ()
    mounts: dict[str, str] = field(default_factory=dict)  # folder → `kind device`
    mtu: dict[str, int] = field(default_factory=dict)  # card → bytes
    addresses: dict[str, str] = field(default_factory=dict)  # address → card
    resolves: dict[str, str] = field(default_factory=dict)  # name → address
    python: str = ""
    torch: str = ""
    kernel_says: tuple[str, ...] = ()  # lines of dmesg about broken hardware
    clock_offset: float = 0.0  # seconds ahead of the machine that asked
    seconds: float = 0.0  # that the answer took

    @property
    def space_gb(self) -> float:
        """Free on the root disk."""
        return self.disk.free_kib * 1024 / 1e9 if self.disk else 0.0

    def card(self, host: Host) -> str:
        """The card that holds the address of `host` in fleet.hosts; for a public address the first that is no loopback."""
        named = self.addresses.get(host.address) or self.addresses.get(self.resolves.get(host.address, ""))
        return named or next((card for card in self.mtu if card != "lo"), "lo")

    def address(self, host: Host) -> str:
        """The address by which other nodes reach this one: its own on that card, not a public one in front of it."""
        card = self.card(host)
        own = [address for address, holder in self.addresses.items() if holder == card and ":" not in address]
        return host.address if host.address in self.addresses else own[0] if own else host.address


def read(transport: Transport, config: Config, hosts: Iterable[Host] | None = None) -> dict[Host, Facts | Failure]:
    """The facts of every host, or why it could not tell them."""
    fleet = config.fleet
    peers = [host.address for host in transport.hosts]
    words = shlex.join([fleet.shared_folder or "", fleet.python or "", *peers])
    script = f"sh -s -- {words}", SCRIPT.read_text(encoding="utf-8")

    def ask(host: Host) -> Facts | Failure:
        answer = transport.ask(host, "true", timeout=TIMEOUT)  # connect first: clocks are compared over a warm link
        if not (failure := reason(host, answer)):
            answer = transport.ask(host, script[0], stdin=script[1], timeout=TIMEOUT)
            failure = reason(host, answer)
        if failure:
            return failure
        assert isinstance(answer, Result)
        return parse(answer.stdout, answer.seconds)

    return transport.each(ask, hosts, leave_behind=True)


def parse(text: str, seconds: float = 0.0, now: float | None = None) -> Facts:
    """Facts from what facts.sh printed. What a login shell said before its first line is left out.

    Raises:
        ValueError: the text has no end: the node stopped in the middle of it.
    """
    _, start, rest = text.partition("== facts\n")
    body, end, _ = rest.partition("== end")
    if not start or not end:
        raise ValueError(f"not what facts.sh prints: {text[-200:]!r}")
    lines: dict[str, list[str]] = {}
    for line in body.splitlines():
        key, equals, value = line.partition("=")
        if equals:
            lines.setdefault(key, []).append(value)
    return _build(lines, seconds, time.time() if now is None else now)


def _build(lines: dict[str, list[str]], seconds: float, now: float) -> Facts:
    def one(key: str) -> str:
        return lines.get(key, [""])[0]

    def pairs(key: str) -> list[tuple[str, str]]:
        return [(first, rest) for line in lines.get(key, []) for first, _, rest in [line.partition(" ")]]

    def space(key: str) -> Space | None:
        words = one(key).split()
        return Space(int(words[0]), *words[1:4]) if words else None

    plain = {f.name: one(f.name) for f in fields(Facts) if f.type == "str" and f.name != "efa"}
    sent = now - seconds  # the clock was read about when the command arrived, half a round trip after it was sent
    return Facts(
        **plain,
        root=one("root") == "yes", uverbs=one("uverbs") == "yes", authorized=one("authorized") == "yes",
        cores=int(one("cores") or 0), memory_kib=int(one("memory_kib") or 0), huge_pages=int(one("huge_pages") or 0),
        nofile=1 << 30 if one("nofile") == "unlimited" else int(one("nofile") or 0), fi_info=int(one("fi_info") or -1),
        disk=space("disk"), shared=space("shared"),
        has=tuple(lines.get("has", ())), lacks=tuple(lines.get("lacks", ())), bus=tuple(lines.get("bus", ())),
        neuron=tuple(lines.get("neuron", ())), infiniband=tuple(lines.get("infiniband", ())),
        scratch_disks=tuple(lines.get("scratch_disk", ())), kernel_says=tuple(lines.get("kernel_says", ())),
        gpus=tuple(_gpu(line) for line in lines.get("gpu", ())),
        efa=one("efa").rpartition(":")[2].strip().lstrip("v"), packages=dict(pairs("package")), mounts=dict(pairs("mount")),
        neuron_ecc={path: int(count) for path, count in pairs("neuron_ecc")},
        mtu={card: int(size) for card, size in pairs("mtu")}, addresses={address: card for card, address in pairs("address")},
        resolves={name: address for address, names in pairs("resolves") for name in names.split()},
        clock_offset=float(one("clock") or now) - sent, seconds=seconds,
    )  # fmt: skip


def _gpu(line: str) -> Gpu:
    driver, memory, errors, name = (part.strip() for part in line.split(",", 3))
    return Gpu(driver, int(float(memory)), int(errors) if errors.isdigit() else 0, name)
