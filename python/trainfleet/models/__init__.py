"""The networks, as plain modules: they know nothing of ranks or devices.

llama gpt2 bert roberta   a family each, the first also mistral, qwen2, qwen3, olmo2 and gemma, which differ from it in data;
         `model(tokens)` gives logits, `model(tokens, targets=...)` the loss
layers   what the last three share         loss   what is minimised
plan     how a model may be divided        huggingface   their folders, in and out
"""

from __future__ import annotations

from collections.abc import Callable

from ..config.types import Model
from . import own
from .bert import Bert, Encoder
from .gpt2 import GPT2
from .llama import Llama, Olmo2
from .network import Network
from .roberta import Roberta

__all__ = ["FAMILIES", "GPT2", "Bert", "Encoder", "Llama", "Network", "Roberta", "build"]

FAMILIES: dict[str, Callable[[Model], Network]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), Llama),
    "olmo2": Olmo2, "gpt2": GPT2, "bert": Bert, "roberta": Roberta,
}  # fmt: skip


def build(shape: Model) -> Network:
    """The module that `model.family` or `model.module` names, with uninitialized weights: call `initialize`."""
    if shape.module is None:
        return FAMILIES[shape.family](shape)
    model = own.load(shape)(shape)
    own.check(model, shape.module)
    return model
