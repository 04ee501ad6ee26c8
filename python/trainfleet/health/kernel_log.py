"""Kernel messages about failures that a program can't report, such as an out-of-memory kill.

Messages are read on the node right after a failure, because the node may be gone a minute later.
Some systems, such as Amazon Linux 2023 and Ubuntu, restrict the kernel log to privileged users.
This module therefore tries /dev/kmsg, then dmesg with passwordless sudo, then the journal. If all
of these fail, it reads the node's counters and states, which are world-readable. Standard library
only.

Sources of the counters and states:
- Files in sysfs: Documentation/ABI/testing (sysfs-bus-pci-devices-aer_stats, sysfs-devices-edac,
  sysfs-fs-ext4, sysfs-class-nvme), EFA's hw_counters (drivers/infiniband/hw/efa/efa_verbs.c), and
  Neuron's sysfs guide.
- /proc/self/mounts and the mounted folders. XFS can't open files after it has shut down
  (xfs_file_open in fs/xfs/xfs_file.c).
- nvidia-smi, which reports GPUs that are lost or need a reset (nvmlDeviceGpuRecoveryAction_t).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from ..trust.untrusted_input import whole

KMSG = Path("/dev/kmsg")
VMSTAT = Path("/proc/vmstat")
COMMANDS = (
    ("sudo", "-n", "dmesg"),
    ("journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-n", "2000"),
)
TIMEOUT = 5.0  # timeout per command in seconds
TELLING = re.compile(
    r"NVRM:|Out of memory|oom-kill|Killed process|Lustre(Error)?:|infiniband|\befa[_ "
    r"]\d?|EXT4-fs error|Remounting filesystem"
    r"|XFS .*(Corruption|shut|I/O)|nfs: server|neuron|nvme.*(timeout|I/O|down|not ready)|I/O "
    r"error|segfault at|traps: "
    r"|mce: .*Hardware Error|Machine Check|EDAC .*UE|PCIe Bus Error|Memory failure|blocked for "
    r"more than"
)
LINES = 40
_STAMPED = re.compile(r"(?:<\d+>)?\[ *(\d+\.\d+)\] (?:\S+ kernel: )?(.*)")

COUNTS = (  # files that contain one count, or several counts followed by their sum
    ("edac", "sys/devices/system/edac/mc/mc*/ue_count"),
    ("pci", "sys/bus/pci/devices/*/aer_dev_fatal"),
    ("ext4", "sys/fs/ext4/*/errors_count"),
    ("efa", "sys/class/infiniband/efa_*/hw_counters/cmds_err"),
    ("efa", "sys/class/infiniband/efa_*/hw_counters/no_completion_cmds"),
    ("neuron", "sys/devices/virtual/neuron_device/neuron*/stats/hardware/*ecc_uncorrected*"),
)
NVME = "sys/class/nvme/nvme*/state"
MOUNTS = "proc/self/mounts"
DEVICES, NVIDIA = "sys/bus/pci/devices/*", "sys/module/nvidia"
SMI = ("nvidia-smi", "--query-gpu=pci.bus_id,gpu_recovery_action", "--format=csv,noheader")
COUNTERS_TIMEOUT = 10.0  # seconds; nvidia-smi is slow with many GPUs and no persistence mode
MOST = 16  # maximum number of lines to report
_LOST = re.compile(r"Unable to determine|is lost|requires reset|ERR!")
_ACTION = re.compile(
    r"([\dA-Fa-f:.]{7,20}), *((?:GPU )?Reset|Drain P2P|Drain and Reset|(?:Node |System "
    r")?Reboot|Bus Reset)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Message:
    """Kernel message and its Unix time."""

    time: float
    text: str


class Kernel:
    """Kernel messages logged since construction."""

    def __init__(self) -> None:
        # kernel timestamps use the same clock
        self.began = time.clock_gettime(time.CLOCK_MONOTONIC)
        self.kills = oom_kills()
        self.kills_of_all = all_oom_kills()
        self.counters = Counters()

    def words(self) -> list[Message]:
        """Returns relevant messages logged since construction, oldest first, plus out-of-memory
        kill counts.
        """
        apart = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
        messages = _messages()
        found = [
            Message(when + apart, line)
            for when, line in messages or ()
            if when >= self.began and TELLING.search(line)
        ][-LINES:]
        now = time.time()
        killed = oom_kills() - self.kills
        of_all = all_oom_kills() - self.kills_of_all
        if killed > 0:
            found.append(Message(now, f"memory.events: oom_kill {killed} in this control group"))
        if messages is None:
            found.append(
                Message(
                    now,
                    "this user can't read the kernel's log; next: sysctl kernel.dmesg_restrict=0",
                )
            )
            if of_all > 0:
                found.append(Message(now, f"vmstat: oom_kill {of_all} on this node"))
            found += [Message(now, text) for text in self.counters.words()]
        return found


def oom_kills() -> int:
    """Returns the number of processes in this control group that were killed at its memory
    limit.
    """
    with contextlib.suppress(OSError, StopIteration, ValueError):
        group = next(
            line
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        )[3:]
        return _count(Path(f"/sys/fs/cgroup{group}/memory.events"))
    return 0


def all_oom_kills() -> int:
    """Returns the number of out-of-memory kills on this node since boot.

    Every user may read this counter.
    """
    return _count(VMSTAT)


def _count(counters: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in counters.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _messages() -> list[tuple[float, str]] | None:
    """Returns the seconds since boot and the text of each record in the kernel log.

    Returns None if this user can't read the log.
    """
    with contextlib.suppress(OSError):
        return _kmsg()
    for command in COMMANDS:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=TIMEOUT,
                check=False,
            )
            found = _parse(done.stdout.decode(errors="replace"))
            if done.returncode == 0 and found:
                return found
    return None


def _parse(text: str) -> list[tuple[float, str]]:
    """Parses dmesg or journalctl output, with records such as `[ 1234.567890] text`."""
    return [
        (float(match[1]), match[2])
        for line in text.splitlines()
        if (match := _STAMPED.fullmatch(line))
    ]


def _kmsg() -> list[tuple[float, str]]:
    """Reads the records of /dev/kmsg (Documentation/ABI/testing/dev-kmsg).

    Raises:
        OSError: this user may not read it.
    """
    descriptor = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK)
    found = []
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while True:
            try:
                record = file.read(8192)
            # The kernel has overwritten this record; the next read returns the one after it.
            except BrokenPipeError:
                continue
            except PermissionError:
                raise
            except OSError:
                break
            if not record:
                break
            head, _, text = record.decode(errors="replace").partition(";")
            parts = head.split(",")
            if len(parts) > 2 and (stamp := whole(parts[2])) is not None:
                found.append((stamp / 1e6, text.splitlines()[0] if text else ""))
    return found


class Counters:
    """Changes in counters and states since construction.

    `root` is / except in tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.counts = _counts(root)
        self.states = _states(root)

    def words(self) -> list[str]:
        """Returns counters that rose, states that worsened, and failed GPUs.

        A GPU counts as failed if it did not start, is lost or needs a reset.
        """
        risen = [
            f"counters: {name}: {count - self.counts.get(name, count)} more"
            for name, count in _counts(self.root).items()
            if count > self.counts.get(name, count)
        ]
        changed = [f"counters: {state}" for state in sorted(_states(self.root) - self.states)]
        return [*risen, *changed, *_without_driver(self.root), *_gpus()][:MOST]


def _counts(root: Path) -> dict[str, int]:
    """Returns the count in each file, keyed by a name such as `pci 0000:17:00.0 aer_dev_fatal`."""
    found = {}
    for kind, pattern in COUNTS:
        holder = pattern.split("/").index(next(part for part in pattern.split("/") if "*" in part))
        for path in root.glob(pattern):
            file = path / "total" if path.is_dir() else path
            with contextlib.suppress(OSError, IndexError):
                owner = path.relative_to(root).parts[holder]
                found[f"{kind} {owner} {path.name}"] = int(re.findall(r"\d+", file.read_text())[-1])
    return found


def _states(root: Path) -> set[str]:
    """Returns descriptions of unresponsive disks, and of read-only or failed file systems."""
    found = set()
    for path in root.glob(NVME):
        with contextlib.suppress(OSError):
            if (state := path.read_text().strip()) != "live":
                found.add(f"nvme {path.parent.name} is {state}")
    with contextlib.suppress(OSError):
        for line in (root / MOUNTS).read_text().splitlines():
            device, folder, _, options, *_ = [*line.split(), "", "", "", ""]
            if device.startswith("/dev/") and options.split(",")[0] == "ro":
                found.add(f"{folder} is read-only now")
            elif device.startswith("/dev/") and _is_broken(root / folder.lstrip("/")):
                found.add(f"{folder} answers with an input/output error")
    return found


def _is_broken(folder: Path) -> bool:
    """Returns whether a mounted folder can't be opened because its file system has failed."""
    try:
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    except OSError as error:
        return error.errno == errno.EIO
    return False


def _without_driver(root: Path) -> list[str]:
    """Returns a line for each NVIDIA GPU (class 0x03, vendor 0x10de) that has no driver bound.

    Checks only if NVIDIA's driver is loaded, because then it must have failed on these GPUs.
    """
    found = []
    for path in root.glob(DEVICES) if (root / NVIDIA).exists() else ():
        with contextlib.suppress(OSError):
            kind = (path / "vendor").read_text().strip(), (path / "class").read_text()[:4]
            if kind == ("0x10de", "0x03") and not (path / "driver").is_symlink():
                found.append(f"counters: pci {path.name} has no driver")
    return found


def _gpus() -> list[str]:
    """Returns nvidia-smi's lines about GPUs that are lost or need a reset.

    Returns [] if nvidia-smi is not installed.
    """
    try:
        done = subprocess.run(
            SMI,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COUNTERS_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = []
    for line in done.stdout.decode(errors="replace").splitlines():
        if match := _ACTION.match(line.strip()):
            found.append(f"nvidia-smi: GPU {match[1]}: recovery action {match[2]}")
        elif _LOST.search(line):
            found.append(f"nvidia-smi: {line.strip()[:200]}")
    return found
