"""Model architectures as plain torch modules, independent of ranks and devices.

llama gpt2 bert      one module per architecture: `model(tokens)` returns logits, and
                     `model(tokens, targets=...)` returns the loss. Variants are config data: llama
                     also covers mistral, qwen2, qwen3, olmo2, gemma and phi3; bert covers roberta
layers               layers shared by gpt2 and bert
loss                 training losses
network              base class, and the plan for splitting a model over ranks
huggingface_weights  reading and writing weights in Hugging Face folders
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
    """Builds the model that `model.family` or `model.module` names. Its weights are uninitialized
    until `initialize` is called.
    """
    if shape.module is None:
        return named(FAMILIES[shape.family].module)(shape)  # type: ignore[no-any-return]
    model = custom_model.load(shape)(shape)
    custom_model.check(model, shape.module)
    return model
