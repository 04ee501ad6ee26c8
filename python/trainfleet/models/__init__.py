"""The networks, as plain modules: they know nothing of ranks, files or devices."""

from __future__ import annotations

from ..config.types import Model
from .llama import Llama

FAMILIES = {"llama": Llama}


def build(shape: Model) -> Llama:
    """The module that `model.family` names, with weights that are not drawn yet: call `initialize`."""
    return FAMILIES[shape.family](shape)
