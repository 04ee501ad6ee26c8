"""Platforms in addition to the engine's: packages that bring a device, divide models and have
checkpoints; and the formats of `make export` (FORMAT), a Hugging Face folder or NxD Core's layout.

A package outside this program names its platform as an entry point of the group
`trainfleet.platforms`. Those of this program are in a table here: a checkout, and the code that
hosts are sent, have no metadata of an installed package.
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
Degrees = tuple[int | None, int | None]  # tensor and pipeline; None: as the run has it
FORMAT = re.compile(
    rf"{HUGGINGFACE}|nxd(?:-tp([1-9][0-9]{{0,2}}))?(?:-pp([1-9][0-9]{{0,2}}))?", re.ASCII
)


def degrees(form: str) -> Degrees | None:
    """Returns the tensor and pipeline degrees in a FORMAT, `None` for an open one; `None` for a
    Hugging Face folder.

    Raises:
        ValueError: there is no such format.
    """
    found = FORMAT.fullmatch(form)
    if not found:
        raise ValueError(f"must be {HUGGINGFACE}, nxd, or nxd with its degrees as nxd-tp8-pp2")
    tensor, pipeline = (int(said) if said else None for said in found.groups())
    return None if form == HUGGINGFACE else (tensor, pipeline)


def require_new(out: Path) -> None:
    """RunError where `out` is there already, and no empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(
            "is there already",
            where=str(out),
            why="an export begins a new folder",
            next="make export OUT=another",
        )
    if why := no_place(out):
        raise RunError("can't be made", where=str(out), why=why, next="make export OUT=another")


def loading(form: str, out: Path) -> str:
    """Returns how to load an export, for the text after `next:`."""
    if degrees(form) is None:
        return f"transformers' from_pretrained({str(out)!r}) loads it"
    return (
        f"nxd.load_checkpoint({str(out)!r}, model=model) loads it, and so does "
        f"train.init_from: {out}"
    )


GROUP = "trainfleet.platforms"
OURS = {"nxd": "trainfleet_nxd:Platform"}  # name → class; in pyproject.toml too, as entry points


class Platform(Protocol):
    """The parts of a platform. Its module imports no torch: Any is a type of torch or engine/."""

    device: str  # the kind of its device (`fleet.platform`, hardware.device_of)

    def open(self, index: int) -> Any:
        """Its device (devices.Device), number `index` of this node, not started.

        RunError where the node has none.
        """
        ...

    def arrange(self, config: Config, world: Any) -> Any:
        """The model and its optimizer as this rank has them (engine.parallel.Parts).

        All ranks call it together.
        """
        ...

    def checkpoint_at(self, address: str) -> Path | None:
        """Finds its checkpoint at an address; `None` if there is no such checkpoint.

        RunError where it was not saved to its end.
        """
        ...

    def require_readable(self, checkpoint: Path) -> None:
        """RunError where the checkpoint's files can't be what they say; no weight is read."""
        ...

    def described(self, checkpoint: Path) -> list[Path]:
        """The folders whose config.json says of which model the checkpoint is."""
        ...

    def load(self, checkpoint: Path, shape: Model, sizes: Any) -> Any:
        """The weights of a checkpoint under our names, for those in `sizes`.

        RunError naming what is missing.
        """
        ...

    def saving(
        self, config: Config, degrees: Degrees, where: str
    ) -> Callable[[Any, Path], list[str]]:
        """Returns a function that writes a whole model's weights into a new folder and returns the
        files' names.

        RunError where the model can't be divided so.
        """
        ...


@cache
def named(name: str) -> Platform:
    """A platform by its name.

    Raises:
        RunError: it is not installed, or can't be imported.
    """
    path = _known().get(name, "")
    module, _, found = path.partition(":")
    try:
        platform: Platform = getattr(import_module(module), found)()
    except Exception as error:  # another's module may raise anything
        why = str(error) if path else f"no package here names it as an entry point of {GROUP}"
        raise RunError(
            f"the platform {name} can't be loaded", where=path, why=why, next="pip check; pip list"
        ) from error
    return platform


def names() -> list[str]:
    return sorted(_known())


def devices() -> dict[str, Platform]:
    """The platforms by the kinds of device that they bring."""
    return {named(name).device: named(name) for name in names()}


def opening(kind: str) -> Callable[[int], Any] | None:
    """Returns the function that opens a device of a kind; `None` if no platform has it."""
    platform = devices().get(kind)
    return platform.open if platform else None


def arrange(kind: str, config: Config, world: Any) -> Any:
    """The model as the platform of this kind of device divides it."""
    return devices()[kind].arrange(config, world)


def checkpoint_at(address: str) -> tuple[str, Path] | None:
    """The platform whose own checkpoint an address means, and its folder; None: it is not a
    platform's.
    """
    looks = ((name, named(name).checkpoint_at(address)) for name in names())
    return next(((name, found) for name, found in looks if found), None)


def _known() -> dict[str, str]:
    """Returns the classes of all platforms, installed ones and ours, by their names."""
    from importlib.metadata import entry_points  # takes 14 ms

    return {entry.name: entry.value for entry in entry_points(group=GROUP)} | OURS
