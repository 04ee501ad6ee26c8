"""Ranks as `ranks.py` forks them, each of which leaves what it holds at the end: `python copies.py N PORT RUN_FOLDER ...`.

copies-<rank>.json in the run's folder: for every part of a weight or a moment, by its name and where it lies, the digest of its bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import ranks
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import trainfleet.engine.__main__  # noqa: F401  imported once, before the forks
from trainfleet.engine.trainer import Trainer


def witness_copies() -> None:
    fit = Trainer.fit

    def witnessed(trainer: Trainer, *arguments: Any) -> str:
        status = fit(trainer, *arguments)
        found = {}
        for name, parameter in trainer.parts.model.named_parameters():
            for kind, tensor in {
                "weight": parameter,
                **trainer.parts.optimizer.state[parameter],
            }.items():
                place, digest = part_of(tensor)
                found[f"{name} {kind} {place}"] = digest
        Path(trainer.checkpoints.run.folder, f"copies-{os.environ['RANK']}.json").write_text(
            json.dumps(found)
        )
        return status

    Trainer.fit = witnessed  # type: ignore[method-assign]


def part_of(tensor: Tensor) -> tuple[str, str]:
    """Where in the whole tensor a rank's part begins and how large it is; the digest of its numbers and their format."""
    place: object = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        place = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        tensor = tensor.to_local()
    numbers = tensor.detach().float().contiguous().numpy().tobytes()
    return str(place), f"{tensor.dtype} {hashlib.sha1(numbers).hexdigest()}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    witness_copies()
    ranks.run_all(sys.argv[1:])
