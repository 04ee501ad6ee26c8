"""Starts a run from weights that another program wrote (train.init_from): a Hugging Face folder, or NxD Core's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.init_from import require_shape
from ..config import huggingface_config as shapes
from ..config.hub_addresses import HUB, folder_of
from ..config.types import Model
from ..models import huggingface_weights
from .parallel.rank_model import Parts


def is_folder(address: str) -> bool:
    """Whether an address is a Hugging Face folder of this machine, and not a checkpoint."""
    return address.startswith(HUB) or (Path(address) / shapes.CONFIG).is_file()


Load = Callable[[dict[str, torch.Size]], dict[str, torch.Tensor]]


def load_folder(address: str, parts: Parts, shape: Model) -> None:
    """Loads the weights of a Hugging Face folder; every rank reads the tensors that it has parameters for.

    Raises:
        RunError: the folder's model has another shape, or lacks a file or a weight; each by name.
    """
    folder = folder_of(address, weights=True)
    require_shape(folder, shape)
    fill(parts, shape, lambda sizes: huggingface_weights.load(folder, shape, sizes))


def fill(parts: Parts, shape: Model, load: Load) -> None:
    """Loads this rank's parameters, a tied one once."""
    tied = {"lm_head.weight", "head.lm_head.weight"} if shape.tie_embeddings else set()
    named: dict[str, Any] = {name: tensor for name, tensor in parts.weights().items() if name not in tied}
    tensors: dict[str, Any] = dict(load(huggingface_weights.sizes_of(named.items())))
    parts.set_weights(tensors, whole=True)
