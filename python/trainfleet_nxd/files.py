"""Reads and writes checkpoints in NxD Core's format, without NxD Core.

The files are those of save_checkpoint in neuronx_distributed.trainer (fbac349,
trainer/checkpoint.py):

    <folder>/<tag>/checkpoint, done                             written first and last
    <folder>/<tag>/model/dp_rank_00_tp_rank_XX_pp_rank_XX.pt    a tensor rank's part of a stage
    <folder>/<tag>/model/… .pt.tensors/tensor_N.pt              with use_xser: each tensor in a
    separate file

A checkpoint may also contain `optim`, `scheduler.pt` and `user_content.pt`, which a new run does
not use.

NxD reads the files with weights_only=False, which executes code in them. This module uses
weights_only=True.
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

TAG = "pretrained_weight"  # tag from which AWS's Llama trainer loads initial weights


def load(tag: Path, shape: Model, sizes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Loads the weights listed in `sizes` from a checkpoint, under trainfleet's names.

    Has the same interface as `huggingface_weights.load`.

    Raises:
        RunError: a file or weight is missing, unused or of a different size. The message names it.
    """
    if why := nxd.refusal(shape, nxd.Degrees(1, 1)):
        raise RunError(
            "can't be loaded as an NxD checkpoint",
            where=str(tag),
            why=why,
            next="set train.init_from to a Hugging Face folder",
        )
    files = require_all(tag)
    ranks: list[dict[str, nxd.Stored]] = [{} for _ in range(1 + max(rank for rank, _ in files))]
    for (rank, _), path in sorted(files.items()):
        content = content_of(path)
        if not isinstance(content, dict) or not all(map(_is_weight, content, content.values())):
            raise unreadable(path, "it does not contain named weights")
        ranks[rank] |= {name: StoredTensor(path, name, value) for name, value in content.items()}
    return huggingface_weights.collect([nxd.Whole(ranks, shape, str(tag))], tag, shape, sizes)


class TensorReference:
    """Reference to a tensor in a separate file.

    Substitutes for torch_xla's class, so that torch_xla need not be installed.
    """

    tid: object = None


def _is_weight(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor | TensorReference)


def content_of(path: Path) -> Any:
    """Returns the content of a file, with its tensors mapped into memory.

    Raises:
        RunError: the file can't be read, or contains anything but tensors.
    """
    require_plain(path)
    try:
        with torch.serialization.safe_globals(
            [(TensorReference, "torch_xla.utils.serialization.TensorReference")]
        ):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch raises many different errors for a damaged file
        raise unreadable(
            path, f"it is damaged or contains more than tensors ({type(error).__name__})"
        ) from error


@dataclass(frozen=True)
class StoredTensor:
    """Checkpoint tensor that is read on demand."""

    path: Path
    name: str
    value: object

    def get_shape(self) -> tuple[int, ...]:
        return tuple(self.read().shape)

    def get_dtype(self) -> str:
        return NAMES[self.read().dtype]

    def read(self) -> Tensor:
        """Reads the tensor.

        Raises:
            RunError: it is not a weight tensor, or has more elements than the file stores.
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
            raise unreadable(path, f"{self.name} is not a weight tensor")
        if value.nbytes > value.untyped_storage().nbytes():
            raise unreadable(path, f"{self.name} has more numbers than the file stores")
        return value


def save(whole: dict[str, Tensor], shape: Model, degrees: nxd.Degrees, folder: Path) -> list[str]:
    """Writes weights with Hugging Face's names as a checkpoint in a new folder.

    Returns a list with the checkpoint's name. The same weights always produce the same bytes.
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
