"""Finds failures in a node's counters and states: unlike the kernel's log, every user may read
these.

Files of sysfs (Documentation/ABI/testing: sysfs-bus-pci-devices-aer_stats, sysfs-devices-edac,
sysfs-fs-ext4, sysfs-class-nvme; EFA's hw_counters, drivers/infiniband/hw/efa/efa_verbs.c; Neuron's
sysfs guide). /proc/self/mounts and the folders mounted there: XFS that has shut down opens no file
(xfs_file_open in fs/xfs/xfs_file.c). nvidia-smi, which names the GPU that is lost or needs a reset
(nvmlDeviceGpuRecoveryAction_t). Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
from pathlib import Path

COUNTS = (  # files that hold a count, or end with the sum of several
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
TIMEOUT = 10.0  # seconds: nvidia-smi takes a few with many GPUs and no persistence
MOST = 16  # lines reported at most
_LOST = re.compile(r"Unable to determine|is lost|requires reset|ERR!")
_ACTION = re.compile(
    r"([\dA-Fa-f:.]{7,20}), *((?:GPU )?Reset|Drain P2P|Drain and Reset|(?:Node |System "
    r")?Reboot|Bus Reset)",
    re.IGNORECASE,
)


class Counters:
    """The counters since construction. `root` is / except in tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self.counts, self.states = _counts(root), _states(root)

    def words(self) -> list[str]:
        """Returns counters that have risen, states that got worse, and GPUs that did not start, are
        lost or need a reset.
        """
        risen = [
            f"counters: {name}: {count - self.counts.get(name, count)} more"
            for name, count in _counts(self.root).items()
            if count > self.counts.get(name, count)
        ]
        changed = [f"counters: {state}" for state in sorted(_states(self.root) - self.states)]
        return [*risen, *changed, *_without_driver(self.root), *_gpus()][:MOST]


def _counts(root: Path) -> dict[str, int]:
    """Returns each file's count by name (`pci 0000:17:00.0 aer_dev_fatal`)."""
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
    """Describes disks that don't answer, and file systems that are read-only or have failed."""
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
    """Tells whether a mounted folder can't be opened because its file system has failed."""
    try:
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    except OSError as error:
        return error.errno == errno.EIO
    return False


def _without_driver(root: Path) -> list[str]:
    """Finds NVIDIA GPUs (class 0x03 of vendor 0x10de) without a driver although NVIDIA's is loaded:
    it has failed on them.
    """
    found = []
    for path in root.glob(DEVICES) if (root / NVIDIA).exists() else ():
        with contextlib.suppress(OSError):
            kind = (path / "vendor").read_text().strip(), (path / "class").read_text()[:4]
            if kind == ("0x10de", "0x03") and not (path / "driver").is_symlink():
                found.append(f"counters: pci {path.name} has no driver")
    return found


def _gpus() -> list[str]:
    """Returns nvidia-smi's lines about GPUs that are lost or need a reset; [] if it is not
    installed.
    """
    try:
        done = subprocess.run(
            SMI,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT,
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
