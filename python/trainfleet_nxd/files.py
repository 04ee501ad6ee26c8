"""NxD Core's own checkpoints, read and written without it: the files of neuronx_distributed.trainer's save_checkpoint.

    <folder>/<tag>/checkpoint, done                             there first and last
    <folder>/<tag>/model/dp_rank_00_tp_rank_XX_pp_rank_XX.pt    what a tensor rank has of a stage
    <folder>/<tag>/model/… .pt.tensors/tensor_N.pt              with use_xser: each tensor in a file of its own

Also there may be `optim`, `scheduler.pt` and `user_content.pt`, of which a beginning takes nothing. NxD reads such files with
weights_only=False, which runs what they say; here they are data (`folder`). fbac349, trainer/checkpoint.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from trainfleet.config.types import Model
from trainfleet.engine.checkpoint.tensors import read_tensor
from trainfleet.models import huggingface_weights
from trainfleet.trust import untrusted_input
from trainfleet.trust.errors import RunError

from . import weights as nxd
from .folder import BEGUN, DONE, MODEL, Apart, Inside, name_of, require_all, tensors_of

TAG = "pretrained_weight"  # under which AWS's Llama trainer looks for weights to begin from


def load(tag: Path, shape: Model, sizes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """The weights of a checkpoint under our names, for those in `sizes`, as `huggingface_weights.load` gives them.

    Raises:
        RunError: a file or a weight is missing, of another size, or left over; each by name.
    """
    if why := nxd.refusal(shape, nxd.Degrees(1, 1)):
        raise RunError("can't be taken from NxD's checkpoint", where=str(tag), why=why, next="begin from a Hugging Face folder")
    files = require_all(tag)
    with ExitStack() as stack:
        ranks: list[dict[str, nxd.Stored]] = [{} for _ in range(1 + max(rank for rank, _ in files))]
        for (rank, _), path in sorted(files.items()):
            found = tensors_of(path, stack.enter_context(untrusted_input.open_regular(path)))
            ranks[rank] |= {name: Tensors(at) for name, at in found.items()}
        return huggingface_weights.collect([nxd.Whole(ranks, shape, str(tag))], tag, shape, sizes)


@dataclass(frozen=True)
class Tensors:
    """A tensor of a checkpoint's, which is read when it is asked for."""

    at: Inside | Apart

    def get_shape(self) -> tuple[int, ...]:
        return self.at.get_shape()

    def get_dtype(self) -> str:
        return self.at.get_dtype()

    def read(self) -> Tensor:
        with self.at.opened() as found:
            return read_tensor(found.archive.window.stream, found.archive.place(found.numbers))


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
