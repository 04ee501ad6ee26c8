"""The pinned versions under Python: one stack of docker/stack.lock.yaml."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import TrainfleetError

LOCK = Path(__file__).parents[3] / "docker" / "stack.lock.yaml"


@dataclass(frozen=True)
class Stack:
    """The versions that every node of a fleet must have; empty means that the stack has no such part."""

    name: str
    torch: str
    torch_index: str
    cuda: str = ""
    nccl: str = ""
    nvidia: str = ""  # the driver
    kernel_modules: str = ""  # open or proprietary
    efa: str = ""  # the EFA installer
    ofi_nccl: str = ""  # at least
    neuron_sdk: str = ""
    neuron_index: str = ""
    neuron_packages: tuple[tuple[str, str], ...] = ()  # system packages, name and version
    python_packages: tuple[tuple[str, str], ...] = ()  # what torch needs beside itself


def load_stack(name: str, path: Path = LOCK) -> Stack:
    """The stack called `name`.

    Raises:
        TrainfleetError: the lock file is not there, or has no such stack.
    """
    import yaml

    try:
        stacks: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))["stacks"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise TrainfleetError(
            "the lock of versions can't be read", where=str(path), why=str(error), next=f"git checkout {path}"
        ) from error
    if name not in stacks:
        raise TrainfleetError(
            f"no stack {name}; there are: {', '.join(stacks)}", where=str(path), next="see fleet.stack in schema/README.md"
        )
    return _build(name, stacks[name])


def _build(name: str, entry: dict[str, Any]) -> Stack:
    versions = {key: str(value["version"]) if isinstance(value, dict) else str(value) for key, value in entry.items()}
    known = {field.name for field in fields(Stack)}
    system = {key: version for key, version in versions.items() if key.startswith("aws-neuronx-")}
    extra = {key: version for key, version in versions.items() if key not in known and key not in system}
    plain = {key: version for key, version in versions.items() if key in known}
    return Stack(name, **plain, neuron_packages=tuple(system.items()), python_packages=tuple(extra.items()))
