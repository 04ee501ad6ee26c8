"""Determines which setup steps a node is missing, from its facts, the config and the platform.
This module does not run them.

Each operation reads the facts and yields the missing steps. A step runs scripts/<name>.sh, which
checks again before it changes anything (check, apply, verify).

Each phase completes on all its hosts before the next phase begins:
    node    on every node, as root
    head    on the first host only, in the shared folder
    access  on every node, for steps that require the shared folder
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..config import Config
from ..config.types import Fleet
from ..hardware import node_types
from ..process.install_paths import ROOT
from ..trust import untrusted_input
from .facts import Facts
from .platform import PinnedPlatform

PHASES = ("node", "head", "access")
BUILD_TOOLS = ("gcc", "make", "curl", "tar", "git")
PYTHON = "python 3.11 or newer"  # name of this requirement in facts.sh
HARDENING = "/etc/ssh/sshd_config.d/10-trainfleet.conf"
LIMITS = "/etc/security/limits.d/90-trainfleet.conf"
SCRATCH = "/scratch"
NOFILE = 65536


@dataclass(frozen=True)
class InstallStep:
    """Setup step on a node: script, arguments, reason, phase, and whether it requires root."""

    script: str
    words: tuple[str, ...]
    why: str
    phase: str = "node"
    root: bool = True

    @property
    def name(self) -> str:
        return self.script.removesuffix(".sh").replace("_", " ")

    def command(self, scripts: str, is_root: bool = False) -> str:
        """Returns the shell command that applies and verifies the step. `scripts` is the scripts'
        folder on the node.
        """
        sudo = "sudo -n " if self.root and not is_root else ""
        words = shlex.join(self.words)
        path = f"{sudo}{scripts}/{self.script}"
        return f"{path} apply {words}".rstrip() + " && " + f"{path} verify {words}".rstrip()


Steps = Iterator[InstallStep]


@dataclass(frozen=True)
class Wanted:
    """Desired state of a fleet, as defined by its config and platform.

    `whole` includes everything that training nodes require. It is false for a machine that only
    provides access to the nodes. `temporary` marks a machine that only builds the Python
    environment, so it gets no SSH key for the nodes.
    """

    config: Config
    platform: PinnedPlatform
    whole: bool = True
    temporary: bool = False

    @property
    def fleet(self) -> Fleet:
        return self.config.fleet

    @property
    def type(self) -> node_types.NodeType | None:
        return self.fleet.node_type

    @property
    def efa(self) -> int:
        """Returns the number of EFA interfaces per node, or 0 for a single node without Lustre over
        EFA.
        """
        return self.type.efa if self.type and (self.fleet.nodes > 1 or self.lustre_efa) else 0

    @property
    def lustre_efa(self) -> int:
        """Number of EFA interfaces that each node uses for Lustre, or 0 if it does not use Lustre
        over EFA.
        """
        if self.type and self.fleet.fsx.efa:
            return node_types.lustre_efa(self.type, self.fleet.nodes)
        return 0

    @property
    def fabric(self) -> str:
        """Returns the fabric between the nodes, one of FABRICS, or "" if the instance type is
        unknown, or for a single node without Lustre over EFA.
        """
        return self.type.fabric if self.type and (self.fleet.nodes > 1 or self.lustre_efa) else ""

    @property
    def interpreter(self) -> str:
        """Returns the path of the nodes' Python interpreter, which has torch installed."""
        return self.fleet.python or f"{self.fleet.shared_folder}/{self.environment}/bin/python"

    @property
    def environment(self) -> str:
        """Returns the path of the Python environment in the shared folder, or "" if the config sets
        fleet.python.
        """
        return "" if self.fleet.python else f"env/{self.platform.name}-{lock_hash(self.platform)}"


def lock_hash(platform: PinnedPlatform) -> str:
    """Returns a hash of the lock files and the platform's versions, excluding the lock's date and
    the images.
    """
    from .tar import LOCKS, content_hash

    versions = repr(replace(platform, base="", ami="", ecs="", read=""))
    return content_hash(
        {name: (ROOT / name).read_bytes() for name in LOCKS} | {"platform": versions.encode()}
    )[:12]


def lock_name(platform: PinnedPlatform) -> str:
    """Returns a name for the platform's pinned versions: platform, lock date and hash."""
    return f"{platform.name} {platform.read} {lock_hash(platform)}"


Operation = Callable[[Facts, Wanted], Steps]


def build_tools(facts: Facts, wanted: Wanted) -> Steps:
    """Yields the step that installs compilers and kernel headers for drivers, and Python."""
    builds = wanted.whole and bool(wanted.platform.nvidia or wanted.platform.neuron_packages)
    headers = f"/lib/modules/{facts.kernel}/build"
    needs = (*(BUILD_TOOLS if builds else ()), *((PYTHON,) if wanted.environment else ()))
    missing = [name for name in needs if name in facts.lacks]
    if builds and headers not in facts.has:
        missing.append("kernel headers")
    if missing:
        yield InstallStep(
            "build_tools.sh", ("headers",) if builds else (), f"missing {', '.join(missing)}"
        )


def limits(facts: Facts, wanted: Wanted) -> Steps:
    """Yields the step that raises the limits on open files and, for RDMA, on locked memory."""
    registers = wanted.fabric in node_types.RDMA
    short = [f"{facts.nofile} open files"] if facts.nofile < NOFILE else []
    short += (
        [f"{facts.memlock} KiB of locked memory"]
        if registers and facts.memlock != "unlimited"
        else []
    )
    if short and LIMITS not in facts.has:
        yield InstallStep("limits.sh", (str(NOFILE),), f"only {' and '.join(short)}")


def sshd(facts: Facts, wanted: Wanted) -> Steps:
    """Yields the step that disables password logins in sshd."""
    if HARDENING not in facts.has:
        yield InstallStep("sshd.sh", (), "sshd may accept passwords")


def nvidia(facts: Facts, wanted: Wanted) -> Steps:
    """Yields the step that installs a suitable NVIDIA driver, and the fabric manager for NVSwitch
    GPUs.
    """
    platform = wanted.platform
    found = sorted({gpu.driver for gpu in facts.gpus})
    if not platform.nvidia or (
        len(found) == 1 and is_within(found[0], platform.nvidia_least, platform.nvidia_below)
    ):
        return
    words = (
        platform.nvidia_least,
        platform.nvidia_below,
        platform.nvidia,
        platform.kernel_modules,
        "fabric" if wanted.type and wanted.type.is_switched else "",
    )
    before = f", but older than {platform.nvidia_below}" if platform.nvidia_below != "-" else ""
    yield InstallStep(
        "nvidia.sh",
        tuple(filter(None, words)),
        f"driver {', '.join(found) or 'missing'}; the platform needs {platform.nvidia_least} or "
        f"newer{before}",
    )


def neuron(facts: Facts, wanted: Wanted) -> Steps:
    """Yields the step that installs the Neuron SDK's driver, runtime, collectives and tools."""
    wrong = [
        f"{name} {facts.packages.get(name, 'missing')}"
        for name, version in wanted.platform.neuron_packages
        if not same_version(facts.packages.get(name, ""), version)
    ]
    if wrong:
        yield neuron_step(
            wanted.platform, f"{', '.join(wrong)}; the platform is SDK {wanted.platform.neuron_sdk}"
        )


def neuron_step(platform: PinnedPlatform, why: str) -> InstallStep:
    """Returns the step that installs all of the Neuron SDK's system packages."""
    words = (f"{name}={version}" for name, version in platform.neuron_packages)
    return InstallStep("neuron.sh", (platform.key("neuron"), *words), why)


def efa(facts: Facts, wanted: Wanted) -> Steps:
    """Yields the step that installs the EFA kernel module and libfabric, and loads ib_uverbs if it
    is missing.
    """
    if wanted.fabric != "efa" or not wanted.platform.efa:
        return
    reasons = []
    if not at_least(facts.efa, wanted.platform.efa_least):
        reasons.append(
            f"installer {facts.efa or 'missing'}; the platform needs {wanted.platform.efa_least} "
            "or newer"
        )
    if not facts.uverbs:
        reasons.append("ib_uverbs is not loaded")
    if facts.efa and facts.fi_info < 1:
        reasons.append("fi_info -p efa lists no endpoints")
    if reasons:
        words = (wanted.platform.efa, wanted.platform.key("efa"), wanted.platform.efa_least)
        yield InstallStep("efa.sh", words, "; ".join(reasons))


def ofi_nccl(facts: Facts, wanted: Wanted) -> Steps:
    """Yields the step that installs the NCCL plugin for EFA."""
    least = wanted.platform.ofi_nccl
    if wanted.fabric != "efa" or not least:
        return
    found = next(
        (version for name, version in facts.packages.items() if name.startswith("libnccl-ofi")), ""
    )
    if not at_least(found, least):
        words = (least, wanted.platform.efa, wanted.platform.key("efa"))
        yield InstallStep(
            "ofi_nccl.sh",
            words,
            f"libnccl-ofi {found or 'missing'}; the platform needs {least} or newer",
        )


def docker(facts: Facts, wanted: Wanted) -> Steps:
    """Yields the step that installs Docker if the config requires it."""
    if (
        wanted.fleet.install_docker or wanted.fleet.container != "none"
    ) and "docker" in facts.lacks:
        words = (
            ("nvidia", wanted.platform.key("nvidia_container_toolkit"))
            if wanted.platform.nvidia
            else ()
        )
        yield InstallStep(
            "docker.sh",
            words,
            f"{'fleet.install_docker' if wanted.fleet.install_docker else 'fleet.container'} needs "
            "Docker",
        )


def lustre(facts: Facts, wanted: Wanted) -> Steps:
    """Yields the step that installs the Lustre client for FSx.

    It may install a different kernel, so it precedes the steps that build drivers for the running
    kernel.
    """
    if why := _unmounted(facts, wanted):
        yield InstallStep("lustre.sh", (wanted.platform.key("fsx"),), why)


def lnet(facts: Facts, wanted: Wanted) -> Steps:
    """Yields the step that configures Lustre networking over EFA, which must happen before
    mounting.
    """
    count = wanted.lustre_efa
    if wanted.fleet.fsx.dns_name and facts.lnet < count:
        yield InstallStep(
            "lnet.sh", (str(count),), f"{facts.lnet} of {count} EFA interfaces serve Lustre"
        )


def fsx(facts: Facts, wanted: Wanted) -> Steps:
    """Yields the step that mounts the file system for the shared folder."""
    fsx = wanted.fleet.fsx
    if why := _unmounted(facts, wanted):
        source = f"{fsx.dns_name}@tcp:/{fsx.mount_name}"
        efa = ["efa"] if wanted.lustre_efa else []
        yield InstallStep("fsx.sh", (source, fsx.mount_point, *efa), why)


def _unmounted(facts: Facts, wanted: Wanted) -> str:
    """Returns why the configured file system must be mounted, or "" if it already is.

    The reason names the current mount.
    """
    fsx = wanted.fleet.fsx
    mounted = facts.mounts.get(fsx.mount_point, "nothing")
    if fsx.dns_name is None or (
        mounted.split()[0] == "lustre" and mounted.endswith(f":/{fsx.mount_name}")
    ):
        return ""
    return f"{mounted} is mounted at {fsx.mount_point}"


def scratch(facts: Facts, wanted: Wanted) -> Steps:
    """Yields the step that combines the instance's NVMe disks into one fast local folder."""
    if facts.scratch_disks and SCRATCH not in facts.mounts:
        disks = tuple(f"/dev/{disk}" for disk in facts.scratch_disks)
        yield InstallStep(
            "scratch.sh", (SCRATCH, *disks), f"{len(disks)} instance disks are unused"
        )


def shared_folder(facts: Facts, wanted: Wanted) -> Steps:
    """Yields the step that creates the shared folder, owned by the user who trains."""
    folder = wanted.fleet.shared_folder
    if folder and facts.shared_folder != "writable":
        yield InstallStep(
            "shared_folder.sh",
            (folder, facts.user),
            f"{folder} is {facts.shared_folder or 'missing'}",
            phase="head",
        )


def python(facts: Facts, wanted: Wanted) -> Steps:
    """Yields the step that builds the nodes' Python environment in the shared folder."""
    folder, platform = wanted.environment, wanted.platform
    if not folder or f"{folder}/.complete" in facts.has:
        return
    words = environment_words(platform, f"{wanted.fleet.shared_folder}/{folder}")
    yield InstallStep(
        "python.sh",
        words,
        "the Python environment for these lock files is missing",
        phase="head",
        root=False,
    )


def environment_words(platform: PinnedPlatform, folder: str) -> tuple[str, ...]:
    """Returns python.sh's arguments for hosts and images: folder, torch and Neuron index, and
    pinned versions.
    """
    checked = (("torch", platform.torch, platform.torch_wheels), *platform.checked_packages)
    words = [
        word
        for name, version, sums in checked
        for word in (f"{name}=={version}", *(f"--hash=sha256:{each}" for _, each in sums))
    ]
    pins = [f"{name}=={version}" for name, version in platform.python_packages]
    return (folder, platform.torch_index, platform.neuron_index or "-", *words, *pins)


def key(facts: Facts, wanted: Wanted) -> Steps:
    """Yields the step that creates the SSH key that the head uses for the nodes.

    The private key never leaves the user's account on the head.
    """
    if wanted.fleet.shared_folder and public_key(facts) not in facts.has:
        yield InstallStep(
            "head_key.sh",
            (f"{wanted.fleet.shared_folder}/ssh",),
            "the head has no SSH key for the nodes",
            phase="head",
            root=False,
        )


def access(facts: Facts, wanted: Wanted) -> Steps:
    """Yields the step that authorizes the head's key on every node."""
    if wanted.fleet.shared_folder and not facts.authorized:
        words = (f"{wanted.fleet.shared_folder}/{public_key(facts)}",)
        yield InstallStep(
            "access.sh", words, "the head's key is not authorized", phase="access", root=False
        )


ON_NODES: tuple[Operation, ...] = (
    lustre,
    build_tools,
    limits,
    sshd,
    nvidia,
    neuron,
    efa,
    ofi_nccl,
    docker,
    lnet,
    fsx,
    scratch,
    access,
)
ON_HEAD: tuple[Operation, ...] = (shared_folder, python, key)
ON_BUILDER: tuple[Operation, ...] = (lustre, build_tools, fsx, shared_folder, python)


def public_key(facts: Facts) -> str:
    """Returns the path of the head's public key in the shared folder. Each user has a separate
    key.
    """
    return f"ssh/{facts.user}.pub"


def steps(facts: Facts, wanted: Wanted, *, head: bool) -> tuple[InstallStep, ...]:
    """Returns all of the node's missing steps in execution order."""
    operations = (ON_NODES if wanted.whole else (build_tools,)) + (ON_HEAD if head else ())
    operations = ON_BUILDER if wanted.temporary else operations
    found = [step for operation in operations for step in operation(facts, wanted)]
    return tuple(sorted(found, key=lambda step: PHASES.index(step.phase)))


def same_version(found: str, wanted: str) -> bool:
    """Returns whether a package has the desired version, ignoring a suffix such as `~jammy`."""
    return found == wanted or found.startswith((f"{wanted}-", f"{wanted}~", f"{wanted}+"))


def at_least(found: str, least: str) -> bool:
    """Returns whether a dotted version is at least `least`. Returns False if the version is
    missing.
    """
    return bool(found) and _numbers(found) >= _numbers(least)


def is_within(found: str, least: str, below: str) -> bool:
    """Returns whether a dotted version is at least `least` and below `below`. A `below` of `-`
    means no upper bound.
    """
    return at_least(found, least) and (below == "-" or _numbers(found) < _numbers(below))


def _numbers(version: str) -> tuple[int, ...]:
    plain = version.partition("-")[0].partition("~")[0]
    return tuple(
        number for part in plain.split(".") if (number := untrusted_input.whole(part)) is not None
    )
