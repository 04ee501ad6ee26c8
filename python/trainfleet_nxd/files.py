"""Reads and writes NxD Core's own checkpoints without it: the files of
neuronx_distributed.trainer's save_checkpoint.

    <folder>/<tag>/checkpoint, done                             written first and last
    <folder>/<tag>/model/dp_rank_00_tp_rank_XX_pp_rank_XX.pt    a tensor rank's part of a stage
    <folder>/<tag>/model/… .pt.tensors/tensor_N.pt              with use_xser: each tensor in a
    separate file

There may also be `optim`, `scheduler.pt` and `user_content.pt`, which a new run does not use. NxD
reads such files with weights_only=False, which runs code in them; here they are read with
weights_only=True. fbac349, trainer/checkpoint.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainfleet.config.types import Model
from trainfleet.engine.checkpoint.files import NAMES
from trainfleet.models import huggingface_weights
from trainfleet.trust.errors import RunError

from . import weights as nxd
from .folder import BEGUN, DONE, MODEL, name_of, require_all, require_plain, unreadable

TAG = "pretrained_weight"  # tag of the weights from which AWS's Llama trainer begins


def load(tag: Path, shape: Model, sizes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Loads the weights of a checkpoint under our names, for those in `sizes`, like
    `huggingface_weights.load`.

    Raises:
        RunError: a file or a weight is missing, of another size, or left over; each by name.
    """
    if why := nxd.refusal(shape, nxd.Degrees(1, 1)):
        raise RunError(
            "can't be loaded from NxD's checkpoint",
            where=str(tag),
            why=why,
            next="begin from a Hugging Face folder",
        )
    files = require_all(tag)
    ranks: list[dict[str, nxd.Stored]] = [{} for _ in range(1 + max(rank for rank, _ in files))]
    for (rank, _), path in sorted(files.items()):
        content = content_of(path)
        if not isinstance(content, dict) or not all(map(_is_weight, content, content.values())):
            raise unreadable(path, "it has no named weights")
        ranks[rank] |= {name: StoredTensor(path, name, value) for name, value in content.items()}
    return huggingface_weights.collect([nxd.Whole(ranks, shape, str(tag))], tag, shape, sizes)


class TensorReference:
    """A file's reference to a tensor in a separate file. It is torch_xla's class, which need not be
    installed.
    """

    tid: object = None


def _is_weight(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor | TensorReference)


def content_of(path: Path) -> Any:
    """Reads a file; its tensors are read when they are used. Raises RunError if it can't be read,
    or has more than tensors.
    """
    require_plain(path)
    try:
        with torch.serialization.safe_globals(
            [(TensorReference, "torch_xla.utils.serialization.TensorReference")]
        ):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises a dozen kinds of errors for a damaged file
        raise unreadable(
            path, f"it is damaged, or more than tensors ({type(error).__name__})"
        ) from error


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, which is read on request."""

    path: Path
    name: str
    value: object

    def get_shape(self) -> tuple[int, ...]:
        return tuple(self.read().shape)

    def get_dtype(self) -> str:
        return NAMES[self.read().dtype]

    def read(self) -> Tensor:
        """Reads the tensor. Raises RunError if it is not one, or has more numbers than are
        stored.
        """
        path, value = self.path, self.value
        if isinstance(value, TensorReference) and type(value.tid) is int:
            path = path.with_name(f"{path.name}.tensors") / f"tensor_{value.tid}.pt"
            value = content_of(path)
        if (
            not isinstance(value, Tensor)
            or value.layout != torch.strided
            or value.dtype not in NAMES
        ):
            raise unreadable(path, f"{self.name} is not a tensor of weights")
        if value.nbytes > value.untyped_storage().nbytes():
            raise unreadable(path, f"{self.name} has more numbers than are stored")
        return value


def save(whole: dict[str, Tensor], shape: Model, degrees: nxd.Degrees, folder: Path) -> list[str]:
    """Writes weights under Hugging Face's names as a checkpoint in a new folder. Returns its name.
    Same weights, same bytes.
    """
    tag = folder / TAG
    (tag / MODEL).mkdir(parents=True)
    (tag / BEGUN).write_text("1")
    part = nxd.divide(whole, shape, degrees)
    cells = list(product(range(degrees.tensor), range(degrees.pipeline)))
    for rank, stage in cells:
        torch.save(part(rank, stage), tag / MODEL / name_of(rank, stage))
    (tag / DONE).write_text("1")
    return [f"{TAG} ({len(cells)} files)"]
