"""Starts a run from weights that another program wrote (train.init_from): a Hugging Face folder, or NxD Core's checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ..config import huggingface as shapes
from ..config.hub import HUB, folder_of
from ..config.presets import Preset
from ..config.types import Model
from ..errors import RunError
from ..models import huggingface
from .parallel.parts import Parts

FREE = ("dropout", "norm_epsilon", "vocabulary_size")  # not part of the weights' shape, or checked by the weights themselves


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
    fill(parts, shape, lambda sizes: huggingface.load(folder, shape, sizes))


def require_shape(folder: Path, shape: Model) -> None:
    """RunError where a folder's config.json is of another model."""
    try:
        compare(shapes.read(folder), shape, folder)
    except ValueError as error:
        raise RunError("is no folder to begin from", where=str(folder), why=str(error), next="set train.init_from") from error


def fill(parts: Parts, shape: Model, load: Load) -> None:
    """Loads this rank's parameters, a tied one once."""
    tied = {"lm_head.weight", "head.lm_head.weight"} if shape.tie_embeddings else set()
    named: dict[str, Any] = {name: tensor for name, tensor in parts.weights().items() if name not in tied}
    tensors: dict[str, Any] = dict(load(huggingface.sizes_of(named.items())))
    parts.set_weights(tensors, whole=True)


def compare(found: Preset, shape: Model, folder: Path) -> None:
    """Raises RunError where a folder's model has another shape, naming each dimension."""
    names = [field.name for field in fields(Preset) if field.name not in FREE]
    pairs = {name: (getattr(found, name), getattr(shape, name)) for name in names}
    other = [f"model.{name} is {was} there, {now} here" for name, (was, now) in pairs.items() if was != now]
    if other:
        raise RunError("has weights of another model", where=str(folder), why="; ".join(other), next=f"model.preset: {folder}")
