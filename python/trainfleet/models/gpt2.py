"""GPT-2 as a plain torch module: learned positions, pre-norm blocks with LayerNorm, and GELU
(Radford et al. 2019).

Shapes: B sequences, T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor, nn

from ..config.types import Model
from .layers import COLUMN, Embeddings, FeedForward, MultiHeadAttention, initial
from .llama import Cache, Decoder, Llama


class GPT2(Decoder):
    """Decoder that maps tokens [B, T] to logits [B, T, V], or to the loss if targets are given."""

    plan = replace(
        Llama.plan,
        first=("embed",),
        embeddings=("embed.tokens",),
        divided="embed",
        column=(*COLUMN, "lm_head"),
    )

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.shape = shape
        self.embed = Embeddings(shape, norm=False)
        self.dropout = nn.Dropout(shape.dropout)
        self.layers = nn.ModuleList(Gpt2Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden_size, eps=shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tie_word_embeddings:
            self.lm_head.weight = self.embed.tokens.weight

    def features(
        self, tokens: Tensor, cache: Cache | None = None, documents: Tensor | None = None
    ) -> Tensor:
        start = cache[0][0].shape[2] if cache else 0
        positions, mask = self.attending(tokens, start, documents)
        x = tokens if tokens.is_floating_point() else self.dropout(self.embed(tokens, positions))
        for index, layer in enumerate(self.layers):
            x = layer(x, cache, index, mask)
        return self.norm(x)  # type: ignore[no-any-return]

    def initial(self, name: str) -> tuple[float, float]:
        """Returns the mean and standard deviation of a parameter's initial values. Layers that
        write to the residual stream use the standard deviation divided by sqrt(2 L), so that the
        stream's variance does not grow with depth.
        """
        mean, std = initial(name)
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        return mean, std / math.sqrt(2 * self.shape.layers) if writes else std


class Gpt2Block(nn.Module):
    """Transformer block with pre-norm: each sublayer's input is normalized, and its output is added
    to the residual stream.
    """

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(shape.hidden_size, eps=shape.norm_eps)
        self.self_attn = MultiHeadAttention(shape)
        self.post_attention_layernorm = nn.LayerNorm(shape.hidden_size, eps=shape.norm_eps)
        self.mlp = FeedForward(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(
        self, x: Tensor, cache: Cache | None = None, index: int = 0, mask: Tensor | None = None
    ) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cache, index, mask))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))  # type: ignore[no-any-return]
