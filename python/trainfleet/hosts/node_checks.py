"""Detects node problems from facts.

Each check is one function. Its decorator specifies the next step and when the check runs. Checks
run in the order of this file. They are pure, so tests pass facts as plain data.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import TypeVar

from ..config.host_list import Host
from ..config.memory_fit import Room, checkpoint_bytes, lack
from ..config.owned_machines import gpus_of
from ..hardware.node_types import RDMA
from ..process.rdma_adapters import fastest
from . import probe
from .facts import Facts
from .host_results import ALLOCATED, CHECKS, LAUNCH, SETUP, Finding, Problems, check, each_host
from .install_steps import ON_NODES, Wanted, steps

T = TypeVar("T")
FleetFacts = Mapping[Host, Facts]

LEAST_DISK_GB = 5.0  # enough space for logs, caches and a core dump, or for a driver build
# Maximum clock offset in seconds. Larger offsets break TLS certificates, make and the log order.
CLOCK_TOLERANCE = 2.0
# a host counts as slow if it takes more than 5 times the median and more than 2 s
SLOW_FACTOR, SLOW_SECONDS = 5.0, 2.0
MEMORY_SHARE = 0.9  # minimum share of an instance type's memory; the kernel reserves a few percent
SUPPORTED = ("ubuntu 22.04", "ubuntu 24.04", "amzn 2023", "debian 12")
# programs that are allowed to use NeuronCores during the checks
OURS = re.compile(r"trainfleet|neuron-(ls|monitor|top)")
# scripts that only write files and therefore work on any Linux with sshd and PAM
PORTABLE = ("limits.sh", "sshd.sh", "access.sh")
RESTART = "sudo systemctl restart chrony (Amazon Linux: chronyd)"


def judge(when: int, facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Yields the findings of all checks for one occasion."""
    for occasions, find in CHECKS:
        if occasions & when:
            yield from find(facts, wanted)


def _others(values: Mapping[Host, T]) -> Iterator[tuple[Host, T, T]]:
    """Yields the hosts whose value differs from the most frequent one, with both values."""
    usual = statistics.mode(values.values()) if values else None
    for host, value in values.items():
        if usual is not None and value != usual:
            yield host, value, usual


def exposed(facts: FleetFacts) -> Iterator[str]:
    """Yields a warning if the rendezvous address is public, because torch's store has no
    authentication.
    """
    head = next(iter(facts), None)
    with suppress(ValueError):  # ignore hostnames, which are not IP addresses
        if head and len(facts) > 1 and ip_address(address := facts[head].address(head)).is_global:
            yield (
                f"warning: the rendezvous address {address} is public: anyone who can reach "
                "it can end the run; use a firewall that admits only the nodes, or private "
                "addresses in fleet.hosts"
            )


@check(when=SETUP | LAUNCH)
def name(facts: FleetFacts, wanted: Wanted) -> Problems:
    """Checks that hostnames are unique.

    A duplicate means that a machine is listed twice, or that two clones would mix up their logs.
    """
    for host, fact in facts.items():
        twins = {
            other.name: theirs.boot_id
            for other, theirs in facts.items()
            if theirs.hostname == fact.hostname and other != host
        }
        names = ", ".join(twins)
        if fact.boot_id in twins.values():
            yield host, f"is the same machine as {names}", "remove one of them from fleet.hosts"
        elif twins:
            message = f"its host name {fact.hostname} is also that of {names}"
            yield host, message, "on that host, run: sudo hostnamectl set-hostname ANOTHER"


@check(when=SETUP | LAUNCH)
def address(facts: FleetFacts, wanted: Wanted) -> Problems:
    """Checks that addresses are unique.

    With a shared address, the head would confuse the two nodes and accept either host key for both.
    """
    addresses = {host: fact.address(host) for host, fact in facts.items()}
    for host, own in addresses.items():
        twins = [
            other.name for other, theirs in addresses.items() if theirs == own and other != host
        ]
        if twins:
            message = f"its address {own} is also that of {', '.join(twins)}"
            yield host, message, f"on that host, run: ip -o addr; find the interface with {own}"


@check("on that host, run: sudo visudo; or set another fleet.ssh.user", SETUP)
def sudo(facts: FleetFacts, wanted: Wanted) -> Problems:
    """Checks for passwordless sudo if any missing step requires root."""
    for place, (host, fact) in enumerate(facts.items()):
        left = steps(fact, wanted, head=place == 0)
        needed = ", ".join(step.name for step in left if step.root)
        if needed and not fact.root:
            yield host, f"{fact.user} needs passwordless sudo for: {needed}"


@each_host("on that host, run: sudo du -xh / | sort -h | tail", SETUP | LAUNCH | ALLOCATED)
def disk(fact: Facts, wanted: Wanted) -> Problems:
    """Checks that the root disk has enough free space."""
    if fact.space_gb < LEAST_DISK_GB:
        yield f"its root disk has {fact.space_gb:.1f} GB free; {LEAST_DISK_GB:.0f} GB required"


@each_host(f"use one of: {', '.join(SUPPORTED)}", SETUP)
def system(fact: Facts, wanted: Wanted) -> Problems:
    """Checks that setup supports the operating system, if it must install packages."""
    needed = [step for operation in ON_NODES for step in operation(fact, wanted)]
    needs = ", ".join(step.name for step in needed if step.script not in PORTABLE)
    if needs and fact.os not in SUPPORTED:
        yield f"runs {fact.os or 'an unknown system'}; setup does not support it for: {needs}"


@check("on that host, run: top; ip -s link", SETUP | LAUNCH, blames=True)
def slow(facts: FleetFacts, wanted: Wanted) -> Problems:
    """Checks that nodes respond quickly, because a single slow node delays all others."""
    usual = statistics.median(fact.seconds for fact in facts.values()) if facts else 0.0
    for host, fact in facts.items():
        if len(facts) > 1 and fact.seconds > max(SLOW_SECONDS, SLOW_FACTOR * usual):
            took = f"takes {fact.seconds:.1f} s to respond"
            yield host, f"{took}; the other nodes take {usual:.1f} s"


@check("make setup", LAUNCH)
def setup(facts: FleetFacts, wanted: Wanted) -> Problems:
    """Checks that no setup steps are missing, so that all nodes have the platform's pinned
    versions.
    """
    for place, (host, fact) in enumerate(facts.items()):
        left = steps(fact, wanted, head=place == 0)
        if left:
            yield host, "; ".join(f"{step.name}: {step.why}" for step in left)


@each_host("set another fleet.python, or remove it to let make setup build an environment", LAUNCH)
def interpreter(fact: Facts, wanted: Wanted) -> Problems:
    """Checks that the interpreter in fleet.python exists.

    `setup` checks the environment that setup builds.
    """
    if wanted.fleet.python and not fact.python:
        yield f"{wanted.fleet.python} (fleet.python) is missing or not executable"


@each_host(when=LAUNCH)
def loggers(fact: Facts, wanted: Wanted) -> Problems:
    """Checks that the ranks' Python has the packages for train.loggers.

    `interpreter` and `setup` report a missing Python. Container images include the packages.
    """
    python = wanted.interpreter
    there = fact.python if wanted.fleet.python else f"{wanted.environment}/.complete" in fact.has
    names = wanted.config.train.loggers if there and wanted.fleet.container == "none" else ()
    if missing := [name for name in names if f"{name} {python}" not in fact.loggers]:
        yield (
            f"{', '.join(missing)} (train.loggers) is not installed for {python}",
            f"on that host, run: {python} -m pip install {' '.join(missing)}",
        )


@check("install the same version on all nodes")
def version(facts: FleetFacts, wanted: Wanted) -> Problems:
    """Checks that all nodes have the same software versions.

    `setup` compares pinned versions to the lock.
    """
    kinds: dict[str, Callable[[Facts], str]] = {
        "operating system": lambda fact: fact.os,
        "kernel": lambda fact: fact.kernel,
        "NVIDIA driver": lambda fact: ", ".join(sorted({gpu.driver for gpu in fact.gpus})),
        "EFA installer": lambda fact: fact.efa,
    }
    if wanted.fleet.python:
        kinds["torch"] = lambda fact: fact.torch
    for kind, read in kinds.items():
        values = {host: read(fact) for host, fact in facts.items()}
        for host, value, usual in _others(values):
            having = f"{[*values.values()].count(usual)} of {len(facts)} nodes"
            yield host, f"{kind} {value or 'missing'}; {having} have {usual or 'none'}"


@each_host("on that host, run: nvidia-smi; dmesg; then replace it", blames=True)
def gpus(fact: Facts, wanted: Wanted) -> Problems:
    """Checks that all GPUs of a node respond, or as many as Slurm allocates.

    A GPU that has fallen off the bus is the most common hardware failure.
    """
    row, given, found = wanted.type, gpus_of(wanted.fleet.slurm.gres), len(fact.gpus)
    if row is None or row.kind != "cuda":
        return
    expected = min(row.accelerators, given.count) if given else row.accelerators
    message = f"{found} of {expected} GPUs respond; {fact.bus.count('nvidia')} are on the PCI bus"
    if found < expected:
        yield message
    elif found > expected and not given:
        yield message, "fix fleet.accelerator.per_node", False


@each_host("copy the lines from make doctor to config.yaml, or fix that node")
def accelerator(fact: Facts, wanted: Wanted) -> Problems:
    """Checks that the accelerators and network match the config."""
    return probe.differing(fact, wanted.fleet)


@check("on that host, run: neuron-ls; dmesg", blames=True)
def neuron(facts: FleetFacts, wanted: Wanted) -> Problems:
    """Checks that all nodes have the same number of Neuron devices, and that neuron-ls works."""
    if wanted.type is None or wanted.type.kind != "neuron":
        return
    usual = max((len(fact.neuron) for fact in facts.values()), default=0) or 1
    for host, fact in facts.items():
        if len(fact.neuron) != usual:
            yield host, f"has {len(fact.neuron)} Neuron devices, expected {usual}"
        if fact.neuron_trouble:
            yield host, f"neuron-ls reports: {fact.neuron_trouble}"


@each_host("on that host, run: neuron-ls", blames=True)
def neuron_cores(fact: Facts, wanted: Wanted) -> Problems:
    """Checks that neuron-ls lists all cores, and that no other program uses them."""
    row, cores = wanted.type, sum(device.cores for device in fact.neuron_devices)
    if row is None or row.kind != "neuron":
        return
    if cores and cores != row.accelerators:
        yield f"has {cores} logical NeuronCores, but a {row.name} has {row.accelerators}"
    users = {user for device in fact.neuron_devices for user in device.users}
    if others := sorted(user for user in users if not OURS.search(user)):
        message = f"another program uses its NeuronCores: {', '.join(others[:3])}"
        yield message, "on that host, run: neuron-ls; stop that program", False


@each_host("check fleet.instance_type", blames=True)
def memory(fact: Facts, wanted: Wanted) -> Problems:
    """Checks that a node has as much memory as its instance type."""
    row, gib = wanted.type, fact.memory_kib / 2**20
    if row and gib < MEMORY_SHARE * row.memory_gib:
        yield f"has {gib:.0f} GiB of memory, but a {row.name} has {row.memory_gib}"


@each_host(when=LAUNCH)
def room(fact: Facts, wanted: Wanted) -> Problems:
    """Checks that a node's ranks fit in the GPU's memory or, on CPUs, in the node's memory."""
    least = min((gpu.memory_mib for gpu in fact.gpus), default=0)
    rooms = {
        "cpu": Room(fact.memory_kib * 2**10, "node", "the node"),
        "cuda": Room(least * 2**20, "rank", "its GPU"),
    }
    has = rooms.get(wanted.fleet.device)
    if has and has.bytes and (found := lack(wanted.config, has)):
        yield found[1], f"change {found[0]}, or set what fits: make plan SET='…'"


@each_host("relaunch it with all its EFA interfaces", blames=True)
def efa(fact: Facts, wanted: Wanted) -> Problems:
    """Checks that each node has all EFA interfaces of its instance type.

    With one out of four, training runs at a quarter of the speed without any error.
    """
    attached, driven = fact.bus.count("efa"), len(fact.infiniband)
    if wanted.efa and attached != wanted.efa:
        yield f"{attached} of {wanted.efa} EFA interfaces are attached"
    elif wanted.efa and driven < attached:
        message = f"{driven} of {attached} EFA interfaces have a driver"
        yield message, "on that host, run: dmesg | grep efa"


@check("on that host, run: ibstat; ip -s link; then check the cable", blames=True)
def rails(facts: FleetFacts, wanted: Wanted) -> Problems:
    """Checks that each node has as many active fabric ports as most nodes do.

    If one of a node's eight ports is down, all ranks wait for that node without any error.
    """
    if wanted.type is None or not wanted.type.owned or wanted.fabric not in RDMA:
        return
    active = {host: len(fastest(fact.ports, wanted.fabric)) for host, fact in facts.items()}
    for host, count, usual in _others(active):
        if 0 < count < usual:
            down = ", ".join(port.adapter for port in facts[host].ports if not port.active)
            ports = f"{count} {probe.WORDS[wanted.fabric]} ports are active"
            yield host, f"{ports}; most nodes have {usual}{f'; down: {down}' if down else ''}"


@check()
def mtu(facts: FleetFacts, wanted: Wanted) -> Problems:
    """Checks that all nodes have the same MTU.

    With mismatched MTUs, small messages get through but large ones hang.
    """
    sizes = {host: fact.mtu.get(fact.card(host), 0) for host, fact in facts.items()}
    for host, size, usual in _others(sizes):
        message = f"its network card has an MTU of {size} bytes; most nodes have {usual}"
        link = f"sudo ip link set {facts[host].card(host)} mtu {usual}"
        yield host, message, f"on that host, run: {link}"


@check("add them to /etc/hosts on that host", LAUNCH)
def names(facts: FleetFacts, wanted: Wanted) -> Problems:
    """Checks that each node can resolve its own hostname and the addresses in fleet.hosts.

    gloo and NCCL look up both.
    """
    by_name = [host.address for host in facts if any(letter.isalpha() for letter in host.address)]
    for host, fact in facts.items():
        lost = [name for name in (*by_name, fact.hostname) if name not in fact.resolves]
        if lost:
            more = " ..." if len(lost) > 4 else ""
            yield host, f"does not resolve {', '.join(lost[:4])}{more}"


@check(f"on that host, run: {RESTART}", LAUNCH)
def clock(facts: FleetFacts, wanted: Wanted) -> Problems:
    """Checks that each node's clock agrees with most others.

    The tolerance is CLOCK_TOLERANCE plus the node's response time. This machine's clock also votes,
    so that if two hosts disagree, only the wrong one is blamed.
    """
    if len(facts) < 2:
        return
    offsets = [fact.clock_offset for fact in facts.values()]
    slowest = max(fact.seconds for fact in facts.values())
    usual = usual_clock([*offsets, 0.0], CLOCK_TOLERANCE + slowest)
    if usual is None:
        apart = max(offsets) - min(offsets)
        message = f"the clocks differ by {apart:.0f} s, and no majority agrees"
        yield None, message, f"on each host, run: {RESTART}"
        return
    for host, fact in facts.items():
        apart = fact.clock_offset - usual
        if abs(apart) > CLOCK_TOLERANCE + fact.seconds:
            yield host, f"its clock is {abs(apart):.0f} s {'ahead' if apart > 0 else 'behind'}"


def usual_clock(offsets: Sequence[float], tolerance: float) -> float | None:
    """Returns the median of the largest group of clocks that agree within `tolerance` seconds.

    Returns None if there is a tie with another group.
    """
    groups = [[other for other in offsets if abs(other - one) <= tolerance] for one in offsets]
    largest = max(groups, key=len)
    usual = statistics.median(largest)
    rivals = [
        group
        for group in groups
        if len(group) == len(largest) and abs(statistics.median(group) - usual) > tolerance
    ]
    return None if rivals else usual


@check(
    "mount the file system on that host, or set fleet.fsx to let make setup mount it",
    SETUP | LAUNCH,
)
def mount(facts: FleetFacts, wanted: Wanted) -> Problems:
    """Checks that the shared folder is on the same file system on all nodes.

    Skipped if setup mounts it.
    """
    folder = wanted.fleet.shared_folder
    if wanted.fleet.fsx.dns_name is not None or folder is None:
        return
    mounts = {
        host: (fact.shared.kind, fact.shared.mounted) for host, fact in facts.items() if fact.shared
    }
    usual = statistics.mode(mounts.values()) if mounts else None
    for host in facts:
        kind, where = mounts.get(host, ("no file system", "/"))
        if usual and (kind, where) != usual:
            most = f"most nodes have it on {usual[0]} at {usual[1]}"
            yield host, f"{folder} is on {kind} at {where}; {most}"


def others_folder(facts: FleetFacts, wanted: Wanted) -> Finding | None:
    """Returns a fleet-wide finding if the shared folder belongs to another user, otherwise None."""
    folder = wanted.fleet.shared_folder
    shut = [fact for fact in facts.values() if folder and fact.shared_folder == "read-only"]
    theirs = next((fact for fact in shut if fact.owner not in ("", "root", fact.user)), None)
    if theirs is None:
        return None
    message = f"{folder} belongs to {theirs.owner}, but each user needs a separate folder"
    return Finding(None, "shared", message, f"set fleet.shared_folder: {folder}-{theirs.user}")


@check()
def shared(facts: FleetFacts, wanted: Wanted) -> Problems:
    """Checks that the shared folder is writable."""
    folder = wanted.fleet.shared_folder
    if another := others_folder(facts, wanted):
        yield another.host, another.message, another.next
        return
    for host, fact in facts.items():
        if folder and fact.shared_folder != "writable":
            on, state = fact.shared, fact.shared_folder or "missing"
            where = f"; {on.mounted} is {on.kind} on {on.device}" if on else ""
            then = f"on that host, run: findmnt -T {folder}; touch {folder}/x"
            yield host, f"{folder} is {state}{where}", then


@each_host("free some space, or set checkpoint.path to s3://bucket/prefix", LAUNCH)
def space(fact: Facts, wanted: Wanted) -> Problems:
    """Checks that the shared folder has space for at least one checkpoint.

    Ignores checkpoints already stored there, because their number is unknown.
    """
    folder, checkpoint = wanted.fleet.shared_folder, wanted.config.checkpoint
    if checkpoint.is_off or checkpoint.path or not folder or not fact.shared:
        return
    free, one = fact.shared.free_kib * 1024, checkpoint_bytes(wanted.config)
    if free < one:
        has = f"{folder} has {free / 1e9:,.1f} GB free"
        yield f"{has}, but a checkpoint takes {one / 1e9:,.1f} GB"


@each_host("see https://docs.nvidia.com/deploy/xid-errors", blames=True)
def hardware(fact: Facts, wanted: Wanted) -> Problems:
    """Checks for hardware errors reported by GPUs, Neuron devices and the kernel."""
    if fact.gpu_trouble and "nvidia" in fact.bus:
        message = f"nvidia-smi reports: {'; '.join(fact.gpu_trouble)}"
        yield message, "on that host, run: nvidia-smi; dmesg; then reboot or replace it"
    for index, gpu in enumerate(fact.gpus):
        if gpu.ecc_errors:
            message = f"GPU {index} reports {gpu.ecc_errors} uncorrected memory errors since boot"
            yield message, "on that host, run: sudo nvidia-smi -r; or replace it"
    for counter, count in fact.neuron_ecc.items():
        if count:
            message = f"{counter.partition('/')[0]} reports {count} uncorrected memory errors"
            yield message, "on that host, run: neuron-monitor; then replace it"
    for line in fact.kernel_says:
        if "Xid" in line or "neuron" in line:
            yield f"its kernel log has: {line.strip()[:160]}"
