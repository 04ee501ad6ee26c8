"""NxD Core's own checkpoints, read and written without it: the files of neuronx_distributed.trainer's save_checkpoint.

    <folder>/<tag>/checkpoint, done                             there first and last
    <folder>/<tag>/model/dp_rank_00_tp_rank_XX_pp_rank_XX.pt    what a tensor rank has of a stage
    <folder>/<tag>/model/… .pt.tensors/tensor_N.pt              with use_xser: each tensor in a file of its own

Also there may be `optim`, `scheduler.pt` and `user_content.pt`, of which a beginning takes nothing. NxD reads such files with
weights_only=False, which runs what they say; here they are data (`archive`). fbac349, trainer/checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ... import door
from ...checkpoints.nxd_folder import BEGUN, COPY, DONE, MODEL, name_of, require_all
from ...config.types import Model
from ...errors import RunError
from ...models import huggingface, nxd
from .archive import Archive, Numbers, Piece, numbers_of
from .pickled import Made

TAG = "pretrained_weight"  # under which AWS's Llama trainer looks for weights to begin from
REFERENCE = "torch_xla.utils.serialization.TensorReference"
KINDS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def load(tag: Path, shape: Model, sizes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """The weights of a checkpoint under our names, for those in `sizes`, as `huggingface.load` gives them.

    Raises:
        RunError: a file or a weight is missing, of another size, or left over; each by name.
    """
    if why := nxd.refusal(shape, nxd.Degrees(1, 1)):
        raise RunError("can't be taken from NxD's checkpoint", where=str(tag), why=why, next="begin from a Hugging Face folder")
    files = require_all(tag)
    with ExitStack() as stack:
        ranks: list[dict[str, nxd.Stored]] = [{} for _ in range(1 + max(rank for rank, _ in files))]
        for (rank, _), path in sorted(files.items()):
            ranks[rank] |= tensors_of(path, stack.enter_context(door.open_regular(path)))
        return huggingface.collect([nxd.Whole(ranks, shape, str(tag))], tag, shape, sizes)


def tensors_of(path: Path, stream: BinaryIO) -> dict[str, nxd.Stored]:
    """What one file has, by name; nothing but its pickle is read."""
    try:
        archive = archive_of(path, stream)
        content = archive.content()
        if type(content) is not dict or not all(type(name) is str for name in content):
            raise ValueError("it holds no weights by name")
        return {name: stored(path, archive, made) for name, made in content.items()}
    except ValueError as error:
        raise unreadable(path, error) from error


def stored(path: Path, archive: Archive, made: object) -> nxd.Stored:
    if isinstance(made, Made) and made.of == REFERENCE:
        state = made.state if type(made.state) is dict else {}
        if type(number := state.get("tid")) is not int or not 0 <= number < 10**6:
            raise ValueError("it refers to no tensor")
        return Apart(path.with_name(f"{path.name}.tensors") / f"tensor_{number}.pt")
    return Inside(archive, numbers_of(made))


def archive_of(path: Path, stream: BinaryIO) -> Archive:
    return Archive(stream, Piece(path.name, path.name, 0, path.stat().st_size))


def unreadable(path: Path, error: Exception) -> RunError:
    return RunError("can't be read as torch.save writes it", where=str(path), why=str(error), next=COPY)


@dataclass(frozen=True)
class Inside:
    """A tensor in the file that names it."""

    archive: Archive
    numbers: Numbers

    def get_shape(self) -> tuple[int, ...]:
        return self.numbers.size

    def get_dtype(self) -> str:
        return KINDS.get(self.numbers.dtype, str(self.numbers.dtype))

    def read(self) -> Tensor:
        return self.archive.tensor(self.numbers)


@dataclass(frozen=True)
class Apart:
    """A tensor in a file of its own."""

    path: Path

    def get_shape(self) -> tuple[int, ...]:
        with self._opened() as found:
            return found.get_shape()

    def get_dtype(self) -> str:
        with self._opened() as found:
            return found.get_dtype()

    def read(self) -> Tensor:
        with self._opened() as found:
            return found.read()

    @contextmanager
    def _opened(self) -> Iterator[Inside]:
        try:
            with door.open_regular(self.path) as stream:
                archive = archive_of(self.path, stream)
                yield Inside(archive, numbers_of(archive.content()))
        except FileNotFoundError as error:
            raise RunError("is missing", where=str(self.path), next=COPY) from error
        except ValueError as error:
            raise unreadable(self.path, error) from error


def save(whole: dict[str, Tensor], shape: Model, degrees: nxd.Degrees, folder: Path) -> list[str]:
    """Writes weights under Hugging Face's names as a checkpoint in a new folder; its name. Same weights, same bytes."""
    tag = folder / TAG
    (tag / MODEL).mkdir(parents=True)
    (tag / BEGUN).write_text("1")
    part = nxd.divide(whole, shape, degrees)
    cells = list(product(range(degrees.tensor), range(degrees.pipeline)))
    for rank, stage in cells:
        torch.save(part(rank, stage), tag / MODEL / name_of(rank, stage))
    (tag / DONE).write_text("1")
    return [f"{TAG} ({len(cells)} files)"]
