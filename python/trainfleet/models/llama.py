"""Llama as a plain module: RMSNorm, rotary positions, SwiGLU, grouped-query attention (Touvron et al. 2023, arXiv:2302.13971).

Modules have the names, and rotary features the order, of the `transformers` library, so that an export only renames.
They are registered in the order of use: gradients then become ready in the reverse of that order, as DDP assumes.

Shapes: B sequences, T tokens, D hidden size, H heads, K key-value heads, E features of a head, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.types import Model

INITIAL_STD = 0.02  # of every matrix; those that write to the residual stream get less, see `initialize`
Rotation = tuple[Tensor, Tensor]  # cos and sin, [T, E] each
Cache = list[tuple[Tensor, Tensor]]  # keys and values of each block, [B, K, tokens so far, E]


class Llama(nn.Module):
    """tokens [B, T] -> logits [B, T, V]."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocabulary_size, bias=False)
        if shape.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits of every position. With a cache, `tokens` come after those it holds, and it is extended in place."""
        start = cache[0][0].shape[2] if cache else 0
        rotation = rotary_table(self.shape, torch.arange(start, start + tokens.shape[1], device=tokens.device))
        x = self.embed_tokens(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, cache, index)
        return self.lm_head(self.norm(x))  # type: ignore[no-any-return]

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Draws every weight anew: normal(0, 0.02), and 1/sqrt(2 L) of that where a block writes to the residual stream.

        The scaling keeps the stream's variance from growing with depth (Radford et al. 2019, GPT-2, section 2.3).
        """
        residual = INITIAL_STD / math.sqrt(2 * self.shape.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                std = residual if name.endswith(("o_proj.weight", "down_proj.weight")) else INITIAL_STD
                parameter.normal_(0.0, std, generator=generator)


class Block(nn.Module):
    """Attention and feed-forward, each normed before and added to the residual stream."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, rotation: Rotation, cache: Cache | None = None, index: int = 0) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, cache, index)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal attention in which H / K query heads share a key-value head (Ainslie et al. 2023, arXiv:2305.13245)."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.head_size = shape.hidden_size // shape.heads
        self.shared = shape.kv_heads < shape.heads
        self.q_proj = nn.Linear(shape.hidden_size, shape.heads * self.head_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.kv_heads * self.head_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.kv_heads * self.head_size, bias=False)
        self.o_proj = nn.Linear(shape.heads * self.head_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, cache: Cache | None, index: int) -> Tensor:
        q, k, v = (self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is not None:
            k, v = extend(cache, index, k, v)
        # One new token sees all that are cached. Several see themselves causally, which SDPA takes from the top left
        # corner: right only while nothing is cached, which is how `generate` calls it.
        out = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=self.shared)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def split(self, x: Tensor) -> Tensor:
        """[B, T, heads x E] -> [B, heads, T, E]; the number of heads is read off, since tensor parallelism divides it."""
        return x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


def rotary_table(shape: Model, positions: Tensor) -> Rotation:
    """cos and sin [T, E] of position x frequency, the E / 2 frequencies twice (Su et al. 2021, arXiv:2104.09864).

    Computed in every forward, which is cheap, so that the model has no buffers for ranks to keep equal.
    """
    size = shape.hidden_size // shape.heads
    frequencies = shape.rope_theta ** (-torch.arange(0, size, 2, device=positions.device).float() / size)
    angles = torch.outer(positions.float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turns feature i together with feature i + E / 2 of x [B, heads, T, E] by its position's angle."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def extend(cache: Cache, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Appends new keys and values to block `index` of the cache; all of them come back."""
    if index == len(cache):
        cache.append((k, v))
    else:
        cache[index] = torch.cat((cache[index][0], k), 2), torch.cat((cache[index][1], v), 2)
    return cache[index]
