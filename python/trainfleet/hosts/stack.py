"""The pinned versions under Python: one stack of docker/stack.lock.yaml."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any

from ..process.install_paths import ROOT, page
from ..trust.errors import TrainfleetError

LOCK = ROOT / "docker" / "stack.lock.yaml"
# SHA-256 of a package's wheels, each by the Python that it is for: cp312
Sums = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class System:
    """What nodes or an image run: the Python that setup leaves there, and apt's name for the
    release ("" where it has RPMs).
    """

    python: str
    apt: str


@dataclass(frozen=True)
class PinnedStack:
    """The versions that every node of a fleet must have; empty means that the stack has no such
    part.
    """

    name: str
    torch: str
    torch_index: str
    ami: str = ""  # the SSM parameter of a machine image, or its name
    ecs: str = ""  # the name of the one that AWS Batch starts instances from
    base: str = ""  # the image that its images begin from, by digest
    read: str = ""  # when the lock was read last
    libfabric: str = ""  # that the EFA installer brings
    cuda: str = ""
    nccl: str = ""
    nvidia: str = ""  # the branch of the driver that setup installs where there is none
    nvidia_least: str = ""  # the oldest driver that a machine image may bring
    nvidia_below: str = "-"  # the first that is too new; - where none is
    kernel_modules: str = ""  # open or proprietary
    efa: str = ""  # the EFA installer
    efa_least: str = ""  # the oldest that a machine image may bring
    ofi_nccl: str = ""  # at least
    neuron_sdk: str = ""
    neuron_index: str = ""
    python: str = ""  # the first that its packages are for, where that is not the program's own
    neuron_packages: tuple[tuple[str, str], ...] = ()  # system packages, name and version
    python_packages: tuple[
        tuple[str, str], ...
    ] = ()  # what torch needs beside itself, of neuron_index
    checked_packages: tuple[tuple[str, str, Sums], ...] = ()  # of the usual index
    torch_wheels: Sums = ()  # those of torch_index, where requirements.lock has others
    torch_cpu_wheels: Sums = ()  # torch's builds for CPUs only, of PyTorch's own index
    keys: tuple[
        tuple[str, str], ...
    ] = ()  # fingerprints of the keys that sign repositories and installers

    def key(self, name: str) -> str:
        """The fingerprint of one key."""
        return dict(self.keys)[name]


def load_stack(name: str) -> PinnedStack:
    """The stack called `name`; TrainfleetError where the lock file is not there, or has no such
    stack.
    """
    lock = _read()
    stacks = lock["stacks"]
    if name not in stacks:
        what, then = (
            f"no stack {name}; there are: {', '.join(stacks)}",
            f"see fleet.stack in {page('schema/README.md')}",
        )
        raise TrainfleetError(what, where=str(LOCK), next=then)
    keys = tuple((key, str(entry["fingerprint"])) for key, entry in lock["keys"].items())
    return replace(_build(name, stacks[name]), keys=keys, read=str(lock.get("read", "")))


def load_system(name: str) -> System:
    """The system called `name`, as ParallelCluster calls it."""
    row = _read()["systems"][name]
    return System(row["python"], row["apt"])


@functools.cache
def _read() -> dict[str, Any]:
    import yaml

    try:
        lock: dict[str, Any] = yaml.safe_load(LOCK.read_text(encoding="utf-8"))
        return {key: lock[key] for key in ("read", "keys", "systems", "stacks")}
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        what, then = "the lock of versions can't be read", f"git checkout {LOCK}"
        raise TrainfleetError(what, where=str(LOCK), why=str(error), next=then) from error


def _build(name: str, entry: dict[str, Any]) -> PinnedStack:
    versions = {
        key: str(value["version"]) if isinstance(value, dict) else str(value)
        for key, value in entry.items()
    }
    known = {field.name for field in fields(PinnedStack)}
    rows = {key: row for key, row in entry.items() if isinstance(row, dict)}
    # such as nvidia_least
    parts = {f"{part}_{key}": value for part, row in rows.items() for key, value in row.items()}
    sums = {key: tuple(value.items()) for key, value in parts.items() if isinstance(value, dict)}
    given: dict[str, Any] = versions | {key: str(value) for key, value in parts.items()} | sums
    others = [
        (key, versions[key], sums.get(f"{key}_wheels", ())) for key in rows if key not in known
    ]
    system = [row[:2] for row in others if row[0].startswith("aws-neuronx-")]
    return PinnedStack(
        name,
        **{key: value for key, value in given.items() if key in known},
        neuron_packages=tuple(system),
        python_packages=tuple(row[:2] for row in others if not row[2] and row[:2] not in system),
        checked_packages=tuple(row for row in others if row[2]),
    )
