"""Loads platforms: packages that add a device type, model parallelism and a checkpoint format.

Packages register platforms as entry points in the group `trainfleet.platforms`. Built-in platforms
are listed here, because neither a checkout nor the code copied to hosts has package metadata. Also
parses the FORMAT of `make export`: a Hugging Face folder or NxD Core's layout.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from ..run.run_folder import no_place
from ..trust.errors import RunError
from . import Config
from .types import Model

HUGGINGFACE = "huggingface"
Degrees = tuple[int | None, int | None]  # tensor and pipeline degree; None means the run's degree
FORMAT = re.compile(
    rf"{HUGGINGFACE}|nxd(?:-tp([1-9][0-9]{{0,2}}))?(?:-pp([1-9][0-9]{{0,2}}))?", re.ASCII
)


def degrees(form: str) -> Degrees | None:
    """Parses the tensor and pipeline degrees in a FORMAT value, with None for an omitted one.

    Returns None if FORMAT means a Hugging Face folder.

    Raises:
        ValueError: the format is unknown.
    """
    found = FORMAT.fullmatch(form)
    if not found:
        raise ValueError(f"must be {HUGGINGFACE}, nxd, or nxd with degrees, such as nxd-tp8-pp2")
    tensor, pipeline = (int(said) if said else None for said in found.groups())
    return None if form == HUGGINGFACE else (tensor, pipeline)


def require_new(out: Path) -> None:
    """Raises RunError if `out` is a file or a non-empty folder, or can't be created."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(
            "already exists",
            where=str(out),
            why="an export needs a new folder",
            next="make export OUT=another",
        )
    if why := no_place(out):
        raise RunError("can't be created", where=str(out), why=why, next="make export OUT=another")


def loading(form: str, out: Path) -> str:
    """Returns instructions for loading an export, to be printed after `next:`."""
    if degrees(form) is None:
        return f"load it with transformers' from_pretrained({str(out)!r})"
    return f"load it with nxd.load_checkpoint({str(out)!r}, model=model) or train.init_from: {out}"


GROUP = "trainfleet.platforms"
OURS = {"nxd": "trainfleet_nxd:Platform"}  # name → class, as in the entry points in pyproject.toml


class Platform(Protocol):
    """Interface of a platform.

    Neither this module nor a platform's module imports torch, so types from torch and engine/ are
    Any.
    """

    device: str  # device type (`fleet.platform`, hardware.device_of)

    def open(self, index: int) -> Any:
        """Returns this node's device `index` (devices.Device) without starting it.

        Raises:
            RunError: the node does not have this device.
        """
        ...

    def arrange(self, config: Config, world: Any) -> Any:
        """Returns this rank's part of the model and its optimizer (engine.parallel.Parts).

        Collective: every rank must call it.
        """
        ...

    def checkpoint_at(self, address: str) -> Path | None:
        """Returns the platform's checkpoint at an address, or None if there is no such checkpoint.

        Raises:
            RunError: the checkpoint is incomplete.
        """
        ...

    def require_readable(self, checkpoint: Path) -> None:
        """Raises RunError if a checkpoint file's format is invalid. Reads no weights."""
        ...

    def described(self, checkpoint: Path) -> list[Path]:
        """Returns the folders whose config.json describes the checkpoint's model."""
        ...

    def load(self, checkpoint: Path, shape: Model, sizes: Any) -> Any:
        """Returns the checkpoint's weights named in `sizes`, under our names.

        Raises:
            RunError: weights are missing; the message lists them.
        """
        ...

    def saving(
        self, config: Config, degrees: Degrees, where: str
    ) -> Callable[[Any, Path], list[str]]:
        """Returns a function that writes a model's weights to a new folder and returns the file
        names.

        Raises:
            RunError: the model can't be divided by these degrees.
        """
        ...


@cache
def named(name: str) -> Platform:
    """Loads a platform by name.

    Raises:
        RunError: the platform is not installed or can't be imported.
    """
    path = _known().get(name, "")
    module, _, found = path.partition(":")
    try:
        platform: Platform = getattr(import_module(module), found)()
    except Exception as error:  # third-party modules may raise anything
        why = str(error) if path else f"no installed package has this entry point of {GROUP}"
        raise RunError(
            f"the platform {name} can't be loaded",
            where=path,
            why=why,
            next="pip check; pip list",
        ) from error
    return platform


def names() -> list[str]:
    return sorted(_known())


def devices() -> dict[str, Platform]:
    """Returns all platforms by device type."""
    return {named(name).device: named(name) for name in names()}


def opening(kind: str) -> Callable[[int], Any] | None:
    """Returns the function that opens devices of this type, or None if no platform adds it."""
    platform = devices().get(kind)
    return platform.open if platform else None


def arrange(kind: str, config: Config, world: Any) -> Any:
    """Returns this rank's part of the model, built by the device type's platform."""
    return devices()[kind].arrange(config, world)


def checkpoint_at(address: str) -> tuple[str, Path] | None:
    """Returns the platform name and folder of the checkpoint at an address.

    Returns None if no platform has a checkpoint there.
    """
    looks = ((name, named(name).checkpoint_at(address)) for name in names())
    return next(((name, found) for name, found in looks if found), None)


def _known() -> dict[str, str]:
    """Returns the class of each installed and built-in platform, by name."""
    from importlib.metadata import entry_points  # this import takes 14 ms

    return {entry.name: entry.value for entry in entry_points(group=GROUP)} | OURS
