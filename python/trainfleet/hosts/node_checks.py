"""Detects node problems from facts.

The functions are pure, so tests pass facts as plain data. `unfit` finds the hosts that `make setup`
must not change, and `flaws` finds the problems that block a launch.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address

from ..config.memory_fit import Room, checkpoint_bytes, lack
from ..config.owned_machines import gpus_of
from ..hardware.node_types import RDMA
from ..process.rdma_adapters import fastest
from . import probe
from .facts import Facts
from .host_results import Finding, Host, HostFailure
from .install_steps import ON_NODES, Wanted, steps

FleetFacts = Mapping[Host, Facts]
Check = Callable[[FleetFacts, Wanted], Iterator[Finding]]

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


def heard(answers: Mapping[Host, Facts | HostFailure]) -> tuple[dict[Host, Facts], list[Finding]]:
    """Splits responses into the facts of the hosts that responded, and findings about the
    others.
    """
    failed = {host: answer for host, answer in answers.items() if isinstance(answer, HostFailure)}
    found = [
        Finding(host, failure.kind, failure.message, failure.next)
        for host, failure in failed.items()
    ]
    return {host: answer for host, answer in answers.items() if isinstance(answer, Facts)}, found


def sound(facts: FleetFacts, findings: Iterable[Finding]) -> dict[Host, Facts]:
    """Returns the facts of the hosts without findings."""
    bad = {finding.host for finding in findings}
    return {host: fact for host, fact in facts.items() if host not in bad}


def unfit(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Yields findings about hosts that setup must not change."""
    for check in (one_name_each, one_address_each, root, disk, system, mounted, quick):
        yield from check(facts, wanted)


def flaws(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Yields findings about all problems that would make a job fail, run slowly or produce wrong
    results.
    """
    checks: tuple[Check, ...] = (
        one_name_each,
        one_address_each,
        disk,
        quick,
        set_up,
        interpreter,
        loggers,
        versions,
        gpus,
        alike,
        neuron_devices,
        memory,
        room,
        cards,
        rails,
        mtu,
        names,
        clock,
        mounted,
        shared,
        disk_for_checkpoints,
        broken,
    )
    for check in checks:
        yield from check(facts, wanted)


def judge_allocated(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Yields findings about nodes that a scheduler allocated.

    Runs only those checks from `flaws` that make sense for nodes administered by others.
    """
    for check in (
        disk,
        versions,
        gpus,
        alike,
        neuron_devices,
        memory,
        cards,
        rails,
        mtu,
        shared,
        broken,
    ):
        yield from check(facts, wanted)


def one_name_each(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that hostnames are unique.

    A duplicate means that a machine is listed twice, or that two clones would mix up their logs.
    """
    for host, fact in facts.items():
        twins = {
            other: theirs
            for other, theirs in facts.items()
            if theirs.hostname == fact.hostname and other != host
        }
        if not twins:
            continue
        names = ", ".join(twin.name for twin in twins)
        if fact.boot_id in [theirs.boot_id for theirs in twins.values()]:
            yield Finding(
                host,
                "name",
                f"is the same machine as {names}",
                "remove one of them from fleet.hosts",
            )
        else:
            yield Finding(
                host,
                "name",
                f"its host name {fact.hostname} is also that of {names}",
                "on that host, run: sudo hostnamectl set-hostname ANOTHER",
            )


def one_address_each(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that addresses are unique.

    With a shared address, the head would confuse the two nodes and accept either host key for both.
    """
    addresses = {host: fact.address(host) for host, fact in facts.items()}
    for host, address in addresses.items():
        if twins := [
            other.name for other, theirs in addresses.items() if theirs == address and other != host
        ]:
            yield Finding(
                host,
                "address",
                f"its address {address} is also that of {', '.join(twins)}",
                f"on that host, run: ip -o addr; find the interface with {address}",
            )


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


def root(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks for passwordless sudo if any missing step requires root."""
    head = next(iter(facts), None)
    for host, fact in facts.items():
        needed = ", ".join(
            step.name for step in steps(fact, wanted, head=host == head) if step.root
        )
        if needed and not fact.root:
            yield Finding(
                host,
                "sudo",
                f"{fact.user} needs passwordless sudo for: {needed}",
                "on that host, run: sudo visudo; or set another fleet.ssh.user",
            )


def disk(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that the root disk has enough free space."""
    for host, fact in facts.items():
        if fact.space_gb < LEAST_DISK_GB:
            yield Finding(
                host,
                "disk",
                f"its root disk has {fact.space_gb:.1f} GB free; {LEAST_DISK_GB:.0f} GB required",
                "on that host, run: sudo du -xh / | sort -h | tail",
            )


def system(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that setup supports the operating system, if it must install packages."""
    for host, fact in facts.items():
        needs = [
            step.name
            for operation in ON_NODES
            for step in operation(fact, wanted)
            if step.script not in PORTABLE
        ]
        if needs and fact.os not in SUPPORTED:
            yield Finding(
                host,
                "system",
                f"runs {fact.os or 'an unknown system'}; setup does not support it for: "
                f"{', '.join(needs)}",
                f"use one of: {', '.join(SUPPORTED)}",
            )


def mounted(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that the shared folder is on the same file system on all nodes.

    Skipped if setup mounts it.
    """
    if wanted.fleet.fsx.dns_name is not None or wanted.fleet.shared_folder is None:
        return
    mounts = {
        host: (fact.shared.kind, fact.shared.mounted) for host, fact in facts.items() if fact.shared
    }
    if not mounts:
        return
    usual = statistics.mode(mounts.values())
    for host in facts:
        kind, where = mounts.get(host, ("no file system", "/"))
        if (kind, where) != usual:
            yield Finding(
                host,
                "mount",
                f"{wanted.fleet.shared_folder} is on {kind} at {where}; most nodes have it on "
                f"{usual[0]} at {usual[1]}",
                "mount the file system on that host, or set fleet.fsx to let make setup mount it",
            )


def quick(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that nodes respond quickly, because a single slow node delays all others."""
    usual = statistics.median(fact.seconds for fact in facts.values()) if facts else 0.0
    for host, fact in facts.items():
        if len(facts) > 1 and fact.seconds > max(SLOW_SECONDS, SLOW_FACTOR * usual):
            yield Finding(
                host,
                "slow",
                f"takes {fact.seconds:.1f} s to respond; the other nodes take {usual:.1f} s",
                "on that host, run: top; ip -s link",
                blames_host=True,
            )


def set_up(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that no setup steps are missing, so that all nodes have the platform's pinned
    versions.
    """
    head = next(iter(facts), None)
    for host, fact in facts.items():
        left = "; ".join(
            f"{step.name}: {step.why}" for step in steps(fact, wanted, head=host == head)
        )
        if left:
            yield Finding(host, "setup", left, "make setup")


def interpreter(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that the interpreter in fleet.python exists.

    `set_up` checks the environment that setup builds.
    """
    for host, fact in facts.items():
        if wanted.fleet.python and not fact.python:
            yield Finding(
                host,
                "python",
                f"{wanted.fleet.python} (fleet.python) is missing or not executable",
                "set another fleet.python, or remove it to let make setup build an environment",
            )


def loggers(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that the ranks' Python has the packages for train.loggers.

    `interpreter` and `set_up` report a missing Python. Container images include the packages.
    """
    python = wanted.interpreter
    names = wanted.config.train.loggers if wanted.fleet.container == "none" else ()
    for host, fact in facts.items():
        there = (
            fact.python if wanted.fleet.python else f"{wanted.environment}/.complete" in fact.has
        )
        if there and (
            missing := [name for name in names if f"{name} {python}" not in fact.loggers]
        ):
            yield Finding(
                host,
                "logger",
                f"{', '.join(missing)} (train.loggers) is not installed for {python}",
                f"on that host, run: {python} -m pip install {' '.join(missing)}",
            )


def versions(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that all nodes have the same software versions.

    `set_up` compares pinned versions to the lock.
    """
    kinds: dict[str, Callable[[Facts], str]] = {
        "operating system": lambda fact: fact.os,
        "kernel": lambda fact: fact.kernel,
    }
    kinds["NVIDIA driver"] = lambda fact: ", ".join(sorted({gpu.driver for gpu in fact.gpus}))
    kinds["EFA installer"] = lambda fact: fact.efa
    if wanted.fleet.python:
        kinds["torch"] = lambda fact: fact.torch
    for kind, read in kinds.items():
        found = Counter(read(fact) for fact in facts.values())
        usual = found.most_common(1)[0][0] if found else ""
        for host, fact in facts.items():
            if read(fact) != usual:
                message = (
                    f"{kind} {read(fact) or 'missing'}; {found[usual]} of {len(facts)} nodes "
                    f"have {usual or 'none'}"
                )
                yield Finding(host, "version", message, "install the same version on all nodes")


def gpus(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that all GPUs of a node respond, or as many as Slurm allocates.

    A GPU that has fallen off the bus is the most common hardware failure.
    """
    row = wanted.type
    if row is None or row.kind != "cuda":
        return
    given = gpus_of(wanted.fleet.slurm.gres)
    expected = min(row.accelerators, given.count) if given else row.accelerators
    for host, fact in facts.items():
        if len(fact.gpus) < expected or (len(fact.gpus) != expected and not given):
            message = (
                f"{len(fact.gpus)} of {expected} GPUs respond; {fact.bus.count('nvidia')} "
                "are on the PCI bus"
            )
            # extra GPUs mean that the config is wrong, not the node
            more = len(fact.gpus) > expected
            yield Finding(
                host,
                "gpus",
                message,
                (
                    "correct fleet.accelerator.per_node"
                    if more
                    else "on that host, run: nvidia-smi; dmesg; then replace it"
                ),
                blames_host=not more,
            )


def alike(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that the accelerators and network match the config."""
    for host, fact in facts.items():
        for message in probe.differing(fact, wanted.fleet):
            yield Finding(
                host,
                "accelerator",
                message,
                "copy the lines of make doctor to config.yaml, or fix that node",
            )


def rails(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that each node has as many active fabric ports as most nodes do.

    If one of a node's eight ports is down, all ranks wait for that node without any error.
    """
    if wanted.type is None or not wanted.type.owned or wanted.fabric not in RDMA:
        return
    active = {host: len(fastest(fact.ports, wanted.fabric)) for host, fact in facts.items()}
    usual = statistics.mode(active.values()) if active else 0
    for host, count in active.items():
        if 0 < count < usual:
            down = ", ".join(port.adapter for port in facts[host].ports if not port.active)
            other = f"; down: {down}" if down else ""
            yield Finding(
                host,
                "rails",
                f"{count} {probe.WORDS[wanted.fabric]} ports are active; most nodes have "
                f"{usual}{other}",
                "on that host, run: ibstat; ip -s link; then check the cable",
                blames_host=True,
            )


def neuron_devices(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks a node's Neuron devices: their number, that neuron-ls works, and that the cores are
    free.
    """
    row = wanted.type
    if row is None or row.kind != "neuron":
        return
    usual = max((len(fact.neuron) for fact in facts.values()), default=0) or 1
    for host, fact in facts.items():
        if len(fact.neuron) != usual:
            message = f"has {len(fact.neuron)} Neuron devices, expected {usual}"
            yield Finding(
                host, "neuron", message, "on that host, run: neuron-ls; dmesg", blames_host=True
            )
        if fact.neuron_trouble:
            yield Finding(
                host,
                "neuron",
                f"neuron-ls reports: {fact.neuron_trouble}",
                "on that host, run: neuron-ls; dmesg",
                blames_host=True,
            )
        cores = sum(device.cores for device in fact.neuron_devices)
        if cores and cores != row.accelerators:
            message = f"has {cores} logical NeuronCores, but a {row.name} has {row.accelerators}"
            yield Finding(host, "neuron", message, "on that host, run: neuron-ls", blames_host=True)
        users = sorted(
            {
                user
                for device in fact.neuron_devices
                for user in device.users
                if not OURS.search(user)
            }
        )
        if users:
            message = f"another program uses its NeuronCores: {', '.join(users[:3])}"
            yield Finding(host, "neuron", message, "on that host, run: neuron-ls; end that program")


def memory(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that a node has as much memory as its instance type."""
    row = wanted.type
    for host, fact in facts.items():
        gib = fact.memory_kib / 2**20
        if row and gib < MEMORY_SHARE * row.memory_gib:
            yield Finding(
                host,
                "memory",
                f"has {gib:.0f} GiB of memory, but a {row.name} has {row.memory_gib}",
                "check fleet.instance_type",
                blames_host=True,
            )


def room(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that a node's ranks fit in the GPU's memory or, on CPUs, in the node's memory."""
    for host, fact in facts.items():
        least = min((gpu.memory_mib for gpu in fact.gpus), default=0)
        if wanted.fleet.device == "cpu" and fact.memory_kib:
            has = Room(fact.memory_kib * 2**10, "node", "the node")
        elif wanted.fleet.device == "cuda" and least:
            has = Room(least * 2**20, "rank", "its GPU")
        else:
            continue
        if found := lack(wanted.config, has):
            yield Finding(
                host, "room", found[1], f"change {found[0]}, or set what fits: make plan SET='…'"
            )


def cards(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that each node has all EFA interfaces of its instance type.

    With one out of four, training runs at a quarter of the speed without any error.
    """
    for host, fact in facts.items():
        attached, driven = fact.bus.count("efa"), len(fact.infiniband)
        if wanted.efa and attached != wanted.efa:
            message = f"{attached} of {wanted.efa} EFA interfaces are attached"
            yield Finding(
                host,
                "efa",
                message,
                "relaunch it with all its EFA interfaces",
                blames_host=True,
            )
        elif wanted.efa and driven < attached:
            message = f"{driven} of {attached} EFA interfaces have a driver"
            yield Finding(
                host, "efa", message, "on that host, run: dmesg | grep efa", blames_host=True
            )


def mtu(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that all nodes have the same MTU.

    With mismatched MTUs, small messages get through but large ones hang.
    """
    sizes = {host: fact.mtu.get(fact.card(host), 0) for host, fact in facts.items()}
    usual = statistics.mode(sizes.values()) if sizes else 0
    for host, size in sizes.items():
        if size != usual:
            yield Finding(
                host,
                "mtu",
                f"its network card has an MTU of {size} bytes; most nodes have {usual}",
                f"on that host, run: sudo ip link set {facts[host].card(host)} mtu {usual}",
            )


def names(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that each node can resolve its own hostname and the addresses in fleet.hosts.

    gloo and NCCL look up both.
    """
    by_name = [host.address for host in facts if any(letter.isalpha() for letter in host.address)]
    for host, fact in facts.items():
        lost = [name for name in (*by_name, fact.hostname) if name not in fact.resolves]
        if lost:
            yield Finding(
                host,
                "names",
                f"does not resolve {', '.join(lost[:4])}{' ...' if len(lost) > 4 else ''}",
                "add them to /etc/hosts on that host",
            )


def clock(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that each node's clock agrees with most others.

    The tolerance is CLOCK_TOLERANCE plus the node's response time. This machine's clock also votes,
    so that if two hosts disagree, only the wrong one is blamed.
    """
    if len(facts) < 2:
        return
    remedy = "sudo systemctl restart chrony (Amazon Linux: chronyd)"
    offsets = [fact.clock_offset for fact in facts.values()]
    slowest = max(fact.seconds for fact in facts.values())
    usual = usual_clock([*offsets, 0.0], CLOCK_TOLERANCE + slowest)
    if usual is None:
        message = (
            f"the clocks differ by {max(offsets) - min(offsets):.0f} s, and no majority agrees"
        )
        yield Finding(None, "clock", message, f"on each host, run: {remedy}")
        return
    for host, fact in facts.items():
        apart = fact.clock_offset - usual
        if abs(apart) > CLOCK_TOLERANCE + fact.seconds:
            message = f"its clock is {abs(apart):.0f} s {'ahead' if apart > 0 else 'behind'}"
            yield Finding(host, "clock", message, f"on that host, run: {remedy}")


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


def others_folder(facts: FleetFacts, wanted: Wanted) -> Finding | None:
    """Returns a fleet-wide finding if the shared folder belongs to another user, otherwise None."""
    folder = wanted.fleet.shared_folder
    shut = [fact for fact in facts.values() if folder and fact.shared_folder == "read-only"]
    theirs = next((fact for fact in shut if fact.owner not in ("", "root", fact.user)), None)
    if theirs is None:
        return None
    return Finding(
        None,
        "shared",
        f"{folder} belongs to {theirs.owner}, but each user needs a separate folder",
        f"set fleet.shared_folder: {folder}-{theirs.user}",
    )


def shared(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that the shared folder is writable."""
    folder = wanted.fleet.shared_folder
    if another := others_folder(facts, wanted):
        yield another
        return
    for host, fact in facts.items():
        if folder and fact.shared_folder != "writable":
            on = (
                f"; {fact.shared.mounted} is {fact.shared.kind} on {fact.shared.device}"
                if fact.shared
                else ""
            )
            yield Finding(
                host,
                "shared",
                f"{folder} is {fact.shared_folder or 'missing'}{on}",
                f"on that host, run: findmnt -T {folder}; touch {folder}/x",
            )


def disk_for_checkpoints(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks that the shared folder has space for at least one checkpoint.

    Ignores checkpoints already stored there, because their number is unknown.
    """
    checkpoint, one = wanted.config.checkpoint, checkpoint_bytes(wanted.config)
    if checkpoint.is_off or checkpoint.path or not wanted.fleet.shared_folder:
        return
    for host, fact in facts.items():
        if fact.shared and (free := fact.shared.free_kib * 1024) < one:
            yield Finding(
                host,
                "space",
                f"{wanted.fleet.shared_folder} has {free / 1e9:,.1f} GB free, but a "
                f"checkpoint takes {one / 1e9:,.1f} GB",
                "free some space, or set checkpoint.path to s3://bucket/prefix",
            )


def broken(facts: FleetFacts, wanted: Wanted) -> Iterator[Finding]:
    """Checks for hardware errors reported by GPUs, Neuron devices and the kernel."""
    for host, fact in facts.items():
        if fact.gpu_trouble and "nvidia" in fact.bus:
            message = f"nvidia-smi reports: {'; '.join(fact.gpu_trouble)}"
            yield Finding(
                host,
                "gpu",
                message,
                "on that host, run: nvidia-smi; dmesg; then reboot or replace it",
                blames_host=True,
            )
        for index, gpu in enumerate(fact.gpus):
            if gpu.ecc_errors:
                message = (
                    f"GPU {index} reports {gpu.ecc_errors} uncorrected memory errors since boot"
                )
                yield Finding(
                    host,
                    "ecc",
                    message,
                    "on that host, run: sudo nvidia-smi -r; or replace it",
                    blames_host=True,
                )
        for counter, errors in fact.neuron_ecc.items():
            if errors:
                message = f"{counter.partition('/')[0]} reports {errors} uncorrected memory errors"
                yield Finding(
                    host,
                    "ecc",
                    message,
                    "on that host, run: neuron-monitor; then replace it",
                    blames_host=True,
                )
        for line in fact.kernel_says:
            if "Xid" in line or "neuron" in line:
                message = f"its kernel log has: {line.strip()[:160]}"
                yield Finding(
                    host,
                    "kernel",
                    message,
                    "see https://docs.nvidia.com/deploy/xid-errors",
                    blames_host=True,
                )
