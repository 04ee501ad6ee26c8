"""The files of NxD Core's own checkpoints: which there are, whether a save has ended, and what they say of their weights.

    <folder>/<tag>/checkpoint, done                             there first and last
    <folder>/<tag>/model/dp_rank_00_tp_rank_XX_pp_rank_XX.pt    what a tensor rank has of a stage
    <folder>/<tag>/model/… .pt.tensors/tensor_N.pt              with use_xser: each tensor in a file of its own

They are read as data (trainfleet.checkpoints.torch_saved); weights themselves only ranks read (`files`). fbac349,
trainer/checkpoint.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import BinaryIO

from trainfleet.checkpoints.index import LOOKED_AT
from trainfleet.checkpoints.torch_saved.archive import Archive, Stored, TensorNumbers, numbers_of
from trainfleet.checkpoints.torch_saved.pickled import Made
from trainfleet.config.huggingface_config import CONFIG
from trainfleet.trust import untrusted_input
from trainfleet.trust.errors import RunError

BEGUN, DONE, MODEL = "checkpoint", "done", "model"
FILE = re.compile(r"dp_rank_00_tp_rank_([0-9]{2,4})_pp_rank_([0-9]{2,4})\.pt")
REFERENCE = "torch_xla.utils.serialization.TensorReference"
COPY = "copy the checkpoint again; NxD writes `done` last"


def tag_of(address: str) -> Path | None:
    """The checkpoint of NxD's that an address means: itself, or the newest whole one below it; None: it is of another kind.

    Raises:
        RunError: there are some, and none was saved to its end.
    """
    folder = Path(address)
    if not folder.is_dir():
        return None
    if files_of(folder):
        if (folder / BEGUN).exists() and not (folder / DONE).exists():
            raise RunError("was not saved to its end", where=address, why=f"there is no {DONE}", next=COPY)
        return folder
    tags = [tag for tag in folder.iterdir() if files_of(tag)]
    if whole := [tag for tag in tags if (tag / DONE).is_file()]:
        return max(whole, key=lambda tag: (tag / DONE).stat().st_mtime)
    if tags:
        raise RunError("was not saved to its end", where=str(tags[0]), why=f"there is no {DONE}", next=COPY)
    return None


def files_of(tag: Path) -> dict[tuple[int, int], Path]:
    """The model's files by (tensor rank, stage)."""
    if not (tag / MODEL).is_dir():
        return {}
    return {(int(found[1]), int(found[2])): path for path in (tag / MODEL).iterdir() if (found := FILE.fullmatch(path.name))}


def require_all(tag: Path) -> dict[tuple[int, int], Path]:
    """The model's files; RunError where the highest tensor rank and stage say that there were more."""
    files = files_of(tag)
    tensor, stages = (1 + max(at[way] for at in files) for way in (0, 1))
    if missing := next((at for at in product(range(tensor), range(stages)) if at not in files), None):
        raise RunError(f"lacks {name_of(*missing)}", where=str(tag / MODEL), next=COPY)
    return files


def described(tag: Path) -> list[Path]:
    """The folders whose config.json says of which model a checkpoint is: its own, and the one above it."""
    return [folder for folder in (tag, tag.parent) if (folder / CONFIG).is_file()]


def name_of(rank: int, stage: int) -> str:
    return f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"


def tensors_of(path: Path, stream: BinaryIO) -> dict[str, Inside | Apart]:
    """What one file has, by name; nothing but its pickle is read. RunError where that can't be so."""
    try:
        archive = _archive_of(path, stream)
        content = archive.content()
        if type(content) is not dict or not all(type(name) is str for name in content):
            raise ValueError("it holds no weights by name")
        return {name: _stored(path, archive, made) for name, made in content.items()}
    except ValueError as error:
        raise _unreadable(path, error) from error


def require_readable(tag: Path) -> None:
    """Raises RunError where the files of a checkpoint can't be what they say. Of weights that lie apart, LOOKED_AT are seen."""
    left = LOOKED_AT
    for path in require_all(tag).values():
        with untrusted_input.open_regular(path) as stream:
            for at in tensors_of(path, stream).values():
                left -= isinstance(at, Apart)
                if left >= 0 or isinstance(at, Inside):
                    at.require(path)


@dataclass(frozen=True)
class Inside:
    """A tensor in the file that names it."""

    archive: Archive
    numbers: TensorNumbers

    def get_shape(self) -> tuple[int, ...]:
        return self.numbers.size

    def get_dtype(self) -> str:
        return self.numbers.dtype

    def require(self, path: Path) -> None:
        try:
            self.archive.place(self.numbers)
        except ValueError as error:
            raise _unreadable(path, error) from error

    @contextmanager
    def opened(self) -> Iterator[Inside]:
        yield self


@dataclass(frozen=True)
class Apart:
    """A tensor in a file of its own."""

    path: Path

    def get_shape(self) -> tuple[int, ...]:
        with self.opened() as found:
            return found.get_shape()

    def get_dtype(self) -> str:
        with self.opened() as found:
            return found.get_dtype()

    def require(self, path: Path) -> None:
        with self.opened() as found:
            found.require(self.path)

    @contextmanager
    def opened(self) -> Iterator[Inside]:
        try:
            with untrusted_input.open_regular(self.path) as stream:
                archive = _archive_of(self.path, stream)
                yield Inside(archive, numbers_of(archive.content()))
        except FileNotFoundError as error:
            raise RunError("is missing", where=str(self.path), next=COPY) from error
        except ValueError as error:
            raise _unreadable(self.path, error) from error


def _stored(path: Path, archive: Archive, made: object) -> Inside | Apart:
    if isinstance(made, Made) and made.of == REFERENCE:
        state = made.state if type(made.state) is dict else {}
        if type(number := state.get("tid")) is not int or not 0 <= number < 10**6:
            raise ValueError("it refers to no tensor")
        return Apart(path.with_name(f"{path.name}.tensors") / f"tensor_{number}.pt")
    return Inside(archive, numbers_of(made))


def _archive_of(path: Path, stream: BinaryIO) -> Archive:
    return Archive(stream, Stored(path.name, path.name, length=path.stat().st_size))


def _unreadable(path: Path, error: Exception) -> RunError:
    return RunError("can't be read as torch.save writes it", where=str(path), why=str(error), next=COPY)
