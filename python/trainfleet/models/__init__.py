"""The networks, as plain modules: they know nothing of ranks or devices.

llama gpt2 bert roberta   a family each; `model(tokens)` gives logits, `model(tokens, targets=...)` the loss
layers   what the last three share         loss   what is minimised
plan     how a model may be divided        huggingface   their folders, in and out
"""

from __future__ import annotations

from collections.abc import Callable

from ..config.types import Model
from .bert import Bert, Encoder
from .gpt2 import GPT2
from .llama import Llama
from .network import Network
from .roberta import Roberta

__all__ = ["FAMILIES", "GPT2", "Bert", "Encoder", "Llama", "Network", "Roberta", "build"]

FAMILIES: dict[str, Callable[[Model], Network]] = {"llama": Llama, "gpt2": GPT2, "bert": Bert, "roberta": Roberta}


def build(shape: Model) -> Network:
    """The module that `model.family` names, with weights that are not drawn yet: call `initialize`."""
    return FAMILIES[shape.family](shape)
