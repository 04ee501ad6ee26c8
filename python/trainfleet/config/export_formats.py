"""The formats of `make export` (FORMAT): a Hugging Face folder, or weights in NxD Core's layout."""

from __future__ import annotations

import re
from pathlib import Path

from ..run.run_folder import no_place
from ..trust.errors import RunError

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


def opening(form: str, out: Path) -> str:
    """Returns how to load an export, for the text after `next:`."""
    if degrees(form) is None:
        return f"transformers' from_pretrained({str(out)!r}) loads it"
    return (
        f"nxd.load_checkpoint({str(out)!r}, model=model) loads it, and so does "
        f"train.init_from: {out}"
    )
