"""Finds checkpoints in NxD Core's format, checks whether they are complete, and finds their
config.json.

    <folder>/<tag>/checkpoint, done                             written first and last
    <folder>/<tag>/model/dp_rank_00_tp_rank_XX_pp_rank_XX.pt    a tensor rank's part of a stage
    <folder>/<tag>/model/… .pt.tensors/tensor_N.pt              with use_xser: each tensor in a
    separate file

Only ranks read the contents of the files (`weights`), with torch. Source: fbac349,
trainer/checkpoint.py.
"""

from __future__ import annotations

import re
import struct
import zipfile
from itertools import product
from pathlib import Path

from trainfleet.config.huggingface_config import CONFIG
from trainfleet.trust import untrusted_input
from trainfleet.trust.errors import RunError

BEGUN, DONE, MODEL = "checkpoint", "done", "model"
FILE = re.compile(r"dp_rank_00_tp_rank_([0-9]{2,4})_pp_rank_([0-9]{2,4})\.pt")
COPY = "copy the checkpoint again; NxD writes `done` last"


def tag_of(address: str) -> Path | None:
    """Returns the NxD checkpoint at an address, or the newest complete one in that folder.

    Returns None if the folder has no NxD checkpoint.

    Raises:
        RunError: all NxD checkpoints in the folder are incomplete.
    """
    folder = Path(address)
    if not folder.is_dir():
        return None
    if files_of(folder):
        if (folder / BEGUN).exists() and not (folder / DONE).exists():
            raise RunError(
                "was not saved completely", where=address, why=f"it has no file {DONE}", next=COPY
            )
        return folder
    tags = [tag for tag in folder.iterdir() if files_of(tag)]
    if whole := [tag for tag in tags if (tag / DONE).is_file()]:
        return max(whole, key=lambda tag: (tag / DONE).stat().st_mtime)
    if tags:
        raise RunError(
            "was not saved completely", where=str(tags[0]), why=f"it has no file {DONE}", next=COPY
        )
    return None


def files_of(tag: Path) -> dict[tuple[int, int], Path]:
    """Returns the model files, keyed by (tensor rank, stage)."""
    if not (tag / MODEL).is_dir():
        return {}
    return {
        (int(found[1]), int(found[2])): path
        for path in (tag / MODEL).iterdir()
        if (found := FILE.fullmatch(path.name))
    }


def require_all(tag: Path) -> dict[tuple[int, int], Path]:
    """Returns the model files, keyed by (tensor rank, stage).

    Raises:
        RunError: a file is missing for a tensor rank or stage up to the highest ones present.
    """
    files = files_of(tag)
    tensor, stages = (1 + max(at[way] for at in files) for way in (0, 1))
    if missing := next(
        (at for at in product(range(tensor), range(stages)) if at not in files), None
    ):
        raise RunError(f"lacks {name_of(*missing)}", where=str(tag / MODEL), next=COPY)
    return files


def described(tag: Path) -> list[Path]:
    """Returns the folders with a config.json that may describe the checkpoint's model.

    Candidates are the checkpoint's folder and its parent.
    """
    return [folder for folder in (tag, tag.parent) if (folder / CONFIG).is_file()]


def name_of(rank: int, stage: int) -> str:
    return f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"


def require_readable(tag: Path) -> None:
    """Checks that all model files are in torch.save's format.

    Tensors in separate files are checked later, by the ranks.

    Raises:
        RunError: a file is missing or in a different format.
    """
    for path in require_all(tag).values():
        require_plain(path)


def require_plain(path: Path) -> None:
    """Checks that a file is a complete zip of uncompressed entries, as torch.save writes it.

    Raises:
        RunError: the file is missing or in a different format.
    """
    try:
        with untrusted_input.open_regular(path) as stream, zipfile.ZipFile(stream) as archive:
            parts = archive.infolist()
    except FileNotFoundError as error:
        raise RunError("is missing", where=str(path), next=COPY) from error
    except (
        zipfile.BadZipFile,
        ValueError,
        NotImplementedError,
        struct.error,
        OverflowError,
    ) as error:
        raise unreadable(path, str(error)) from error
    if (
        any(part.compress_type for part in parts)
        or sum(part.file_size for part in parts) > path.stat().st_size
    ):
        raise unreadable(path, "its zip entries are compressed or larger than the file")


def unreadable(path: Path, why: str) -> RunError:
    return RunError("is not in torch.save's format", where=str(path), why=why, next=COPY)
