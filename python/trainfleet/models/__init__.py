"""The model architectures as plain torch modules, independent of ranks and devices.

llama gpt2 bert   one module per architecture: `model(tokens)` returns logits, and
                  `model(tokens, targets=...)` the loss. Variants differ only in config data: llama
                  also implements mistral, qwen2, qwen3, olmo2, gemma and phi3, and bert roberta
layers   layers of gpt2 and bert
loss     training losses
network  base class, and the plan for splitting a model over ranks
huggingface_weights   reading and writing weights in Hugging Face folders
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
    """Builds the model of `model.family` or `model.module`. Call `initialize` on it, because its
    weights are uninitialized.
    """
    if shape.module is None:
        return named(FAMILIES[shape.family].module)(shape)  # type: ignore[no-any-return]
    model = custom_model.load(shape)(shape)
    custom_model.check(model, shape.module)
    return model
