"""The networks, as plain modules: they know nothing about ranks or devices.

llama gpt2 bert   one per family; llama also serves mistral, qwen2, qwen3, olmo2 and gemma, and bert
                  serves roberta, which differ from them in data;
         `model(tokens)` returns logits, `model(tokens, targets=...)` the loss
layers   parts of the last two             loss   the training losses
network  their base class, and how a model may be divided
huggingface_weights   their folders, in and out
"""

from __future__ import annotations

from ..config.families import FAMILIES
from ..config.tables import named
from ..config.types import Model
from . import custom_model
from .bert import Bert, Encoder
from .gpt2 import GPT2
from .llama import Llama
from .network import Network

__all__ = ["GPT2", "Bert", "Encoder", "Llama", "Network", "build"]


def build(shape: Model) -> Network:
    """Builds the module of `model.family` or `model.module`, with uninitialized weights: call
    `initialize`.
    """
    if shape.module is None:
        return named(FAMILIES[shape.family].module)(shape)  # type: ignore[no-any-return]
    model = custom_model.load(shape)(shape)
    custom_model.check(model, shape.module)
    return model
