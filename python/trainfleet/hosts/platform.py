"""Reads a platform's pinned versions, including drivers and system packages, from
docker/platforms.lock.yaml.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any

from ..process.install_paths import ROOT, page
from ..trust.errors import TrainfleetError

LOCK = ROOT / "docker" / "platforms.lock.yaml"
# Python tag (cp312) → SHA-256 of the package's wheel
Sums = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class System:
    """Operating system of nodes or images.

    `python` is the version that setup installs. `apt` is the release name in apt, or "" for
    RPM-based systems.
    """

    python: str
    apt: str


@dataclass(frozen=True)
class PinnedPlatform:
    """Versions that every node of a fleet must have.

    Empty values mean that the platform does not include the component.
    """

    name: str
    torch: str
    torch_index: str
    ami: str = ""  # SSM parameter or name of a machine image
    ecs: str = ""  # name of the machine image for AWS Batch
    base: str = ""  # base image of the container images, by digest
    read: str = ""  # date when the lock was last updated
    libfabric: str = ""  # libfabric version in the EFA installer
    cuda: str = ""
    nccl: str = ""
    nvidia: str = ""  # driver branch to install on nodes without a driver
    nvidia_least: str = ""  # minimum driver version in a machine image
    nvidia_below: str = "-"  # exclusive upper bound for the driver version, or - for none
    kernel_modules: str = ""  # type of NVIDIA kernel modules: open or proprietary
    efa: str = ""  # EFA installer version
    efa_least: str = ""  # minimum EFA installer version in a machine image
    ofi_nccl: str = ""  # minimum version of the NCCL plugin for EFA
    neuron_sdk: str = ""
    neuron_index: str = ""
    python: str = ""  # minimum Python version of the packages, if it differs from trainfleet's
    neuron_packages: tuple[tuple[str, str], ...] = ()  # names and versions of system packages
    python_packages: tuple[tuple[str, str], ...] = ()  # torch dependencies from neuron_index
    checked_packages: tuple[tuple[str, str, Sums], ...] = ()  # PyPI packages, with hashes
    torch_wheels: Sums = ()  # wheels from torch_index, if they differ from requirements.lock
    torch_cpu_wheels: Sums = ()  # CPU-only torch wheels from PyTorch's index
    keys: tuple[
        tuple[str, str], ...
    ] = ()  # fingerprints of the keys that sign repositories and installers

    def key(self, name: str) -> str:
        """Returns the fingerprint of the signing key `name`."""
        return dict(self.keys)[name]


def load_platform(name: str) -> PinnedPlatform:
    """Returns the platform `name`.

    Raises TrainfleetError if the lock can't be read or does not contain the platform.
    """
    lock = _read()
    platforms = lock["platforms"]
    if name not in platforms:
        what, then = (
            f"unknown platform {name}; the lock has {', '.join(platforms)}",
            f"see fleet.platform in {page('schema/README.md')}",
        )
        raise TrainfleetError(what, where=str(LOCK), next=then)
    keys = tuple((key, str(entry["fingerprint"])) for key, entry in lock["keys"].items())
    return replace(_build(name, platforms[name]), keys=keys, read=str(lock.get("read", "")))


def load_system(name: str) -> System:
    """Returns an operating system by the name that ParallelCluster uses for it."""
    row = _read()["systems"][name]
    return System(row["python"], row["apt"])


@functools.cache
def _read() -> dict[str, Any]:
    import yaml

    try:
        lock: dict[str, Any] = yaml.safe_load(LOCK.read_text(encoding="utf-8"))
        return {key: lock[key] for key in ("read", "keys", "systems", "platforms")}
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        what, then = "can't read the version lock", f"git checkout {LOCK}"
        raise TrainfleetError(what, where=str(LOCK), why=str(error), next=then) from error


def _build(name: str, entry: dict[str, Any]) -> PinnedPlatform:
    versions = {
        key: str(value["version"]) if isinstance(value, dict) else str(value)
        for key, value in entry.items()
    }
    known = {field.name for field in fields(PinnedPlatform)}
    rows = {key: row for key, row in entry.items() if isinstance(row, dict)}
    # flatten nested keys, for example into nvidia_least
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
