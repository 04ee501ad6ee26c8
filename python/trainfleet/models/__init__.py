"""The networks, as plain modules: they know nothing of ranks or devices.

llama gpt2 bert roberta   a family each, the first also mistral, qwen2, qwen3, olmo2 and gemma,
                          which differ from it in data;
         `model(tokens)` gives logits, `model(tokens, targets=...)` the loss
layers   what the last three share         loss   what is minimised
plan     how a model may be divided        huggingface   their folders, in and out
"""

from __future__ import annotations

from ..config.families import FAMILIES
from ..config.named import named
from ..config.types import Model
from . import custom_model
from .bert import Bert, Encoder
from .gpt2 import GPT2
from .llama import Llama
from .network import Network
from .roberta import Roberta

__all__ = ["GPT2", "Bert", "Encoder", "Llama", "Network", "Roberta", "build"]


def build(shape: Model) -> Network:
    """The module that `model.family` or `model.module` names, with uninitialized weights: call
    `initialize`.
    """
    if shape.module is None:
        return named(FAMILIES[shape.family].module)(shape)  # type: ignore[no-any-return]
    model = custom_model.load(shape)(shape)
    custom_model.check(model, shape.module)
    return model
