"""The pinned versions under Python: one platform of docker/platforms.lock.yaml."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any

from ..process.install_paths import ROOT, page
from ..trust.errors import TrainfleetError

LOCK = ROOT / "docker" / "platforms.lock.yaml"
# SHA-256 of a package's wheels, by their Python: cp312
Sums = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class System:
    """The operating system of nodes or an image: the Python that setup installs, and apt's name for
    the release ("" for one with RPMs).
    """

    python: str
    apt: str


@dataclass(frozen=True)
class PinnedPlatform:
    """The versions that every node of a fleet must have; empty means that the platform has no such
    part.
    """

    name: str
    torch: str
    torch_index: str
    ami: str = ""  # SSM parameter of a machine image, or its name
    ecs: str = ""  # name of the machine image for AWS Batch
    base: str = ""  # base image of its container images, by digest
    read: str = ""  # day of the lock's last update
    libfabric: str = ""  # version that the EFA installer brings
    cuda: str = ""
    nccl: str = ""
    nvidia: str = ""  # branch of the driver that setup installs on a node without a driver
    nvidia_least: str = ""  # oldest driver that a machine image may bring
    nvidia_below: str = "-"  # first driver that is too new; - if every newer one works
    kernel_modules: str = ""  # open or proprietary
    efa: str = ""  # the EFA installer
    efa_least: str = ""  # oldest installer that a machine image may bring
    ofi_nccl: str = ""  # oldest version
    neuron_sdk: str = ""
    neuron_index: str = ""
    python: str = ""  # oldest Python of its packages, if not the program's
    neuron_packages: tuple[tuple[str, str], ...] = ()  # system packages, name and version
    python_packages: tuple[tuple[str, str], ...] = ()  # packages of neuron_index that torch needs
    checked_packages: tuple[tuple[str, str, Sums], ...] = ()  # packages of the usual index
    torch_wheels: Sums = ()  # wheels of torch_index, if requirements.lock has others
    torch_cpu_wheels: Sums = ()  # torch's builds for CPUs only, from PyTorch's own index
    keys: tuple[
        tuple[str, str], ...
    ] = ()  # fingerprints of the keys that sign repositories and installers

    def key(self, name: str) -> str:
        """Returns the fingerprint of one key."""
        return dict(self.keys)[name]


def load_platform(name: str) -> PinnedPlatform:
    """Returns the platform `name`; TrainfleetError if the lock file is missing, or lacks this
    platform.
    """
    lock = _read()
    platforms = lock["platforms"]
    if name not in platforms:
        what, then = (
            f"the lock has no platform {name}, only {', '.join(platforms)}",
            f"see fleet.platform in {page('schema/README.md')}",
        )
        raise TrainfleetError(what, where=str(LOCK), next=then)
    keys = tuple((key, str(entry["fingerprint"])) for key, entry in lock["keys"].items())
    return replace(_build(name, platforms[name]), keys=keys, read=str(lock.get("read", "")))


def load_system(name: str) -> System:
    """Returns the system with ParallelCluster's name `name`."""
    row = _read()["systems"][name]
    return System(row["python"], row["apt"])


@functools.cache
def _read() -> dict[str, Any]:
    import yaml

    try:
        lock: dict[str, Any] = yaml.safe_load(LOCK.read_text(encoding="utf-8"))
        return {key: lock[key] for key in ("read", "keys", "systems", "platforms")}
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        what, then = "the version lock can't be read", f"git checkout {LOCK}"
        raise TrainfleetError(what, where=str(LOCK), why=str(error), next=then) from error


def _build(name: str, entry: dict[str, Any]) -> PinnedPlatform:
    versions = {
        key: str(value["version"]) if isinstance(value, dict) else str(value)
        for key, value in entry.items()
    }
    known = {field.name for field in fields(PinnedPlatform)}
    rows = {key: row for key, row in entry.items() if isinstance(row, dict)}
    # nvidia_least, for example
    parts = {f"{part}_{key}": value for part, row in rows.items() for key, value in row.items()}
    sums = {key: tuple(value.items()) for key, value in parts.items() if isinstance(value, dict)}
    given: dict[str, Any] = versions | {key: str(value) for key, value in parts.items()} | sums
    others = [
        (key, versions[key], sums.get(f"{key}_wheels", ())) for key in rows if key not in known
    ]
    system = [row[:2] for row in others if row[0].startswith("aws-neuronx-")]
    return PinnedPlatform(
        name,
        **{key: value for key, value in given.items() if key in known},
        neuron_packages=tuple(system),
        python_packages=tuple(row[:2] for row in others if not row[2] and row[:2] not in system),
        checked_packages=tuple(row for row in others if row[2]),
    )
