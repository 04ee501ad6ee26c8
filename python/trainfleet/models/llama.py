"""Llama as a plain torch module: RMSNorm, rotary positions, SwiGLU, grouped-query attention
(Touvron et al. 2023, arXiv:2302.13971).

Module names and the order of rotary features match the `transformers` library, so an export only
renames parameters.

Shapes: B sequences, T tokens, D hidden size, H heads, K key-value heads, E features per head, V
vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.families import FAMILIES
from ..config.types import Model
from .loss import next_token_loss
from .network import Attend, Network, ParallelPlan

# standard deviation of matrices that do not write to the residual stream (see `Llama.initial`)
INITIAL_STD = 0.02
STRETCHED_FROM = 8192  # context length of Llama 3's first training stage
Rotation = tuple[Tensor, Tensor]  # cos and sin, each [T, E] or [B, 1, T, E]
Cache = list[tuple[Tensor, Tensor]]  # keys and values per block, [B, K, cached tokens, E]


class Decoder(Network):
    """Decoder that maps tokens [B, T] to next-token logits [B, T, V], or to the loss if targets are
    given.
    """

    lm_head: nn.Linear

    @abstractmethod
    def features(
        self, tokens: Tensor, cache: Cache | None = None, documents: Tensor | None = None
    ) -> Tensor: ...

    def forward(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        targets: Tensor | None = None,
        reduction: str = "mean",
        documents: Tensor | None = None,
    ) -> Tensor:
        """Returns the logits of every position, or the loss if `targets` are given. With a cache,
        `tokens` continue the cached tokens, and the cache is extended in place.

        `documents` [B, T] contains each token's document index. If given, tokens attend only within
        their own document.
        """
        x = self.features(tokens, cache, documents)
        return self.lm_head(x) if targets is None else self.loss(x, targets, reduction)

    def loss(self, x: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return next_token_loss(x, self.lm_head, targets, reduction, self.surprise)


class Llama(Decoder):
    """Llama and the families that differ from it only in config data."""

    plan = ParallelPlan(
        blocks="layers",
        first=("embed_tokens",),
        last=("norm", "lm_head"),
        head="lm_head",
        embeddings=("embed_tokens",),
        divided="embed_tokens",
        norms=("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm"),
        head_norms=("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm"),
        gathered=("layers.*.self_attn", "layers.*.mlp", "lm_head"),
        column=(
            *(f"layers.*.self_attn.{name}_proj" for name in "qkv"),
            *(f"layers.*.mlp.{name}_proj" for name in ("gate", "up")),
            "lm_head",
        ),
        row=("layers.*.self_attn.o_proj", "layers.*.mlp.down_proj"),
        copied=("layers.*.self_attn.k_proj", "layers.*.self_attn.v_proj"),
    )

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        block = LateBlock if FAMILIES[shape.family].normed_after else LlamaBlock
        self.layers = nn.ModuleList(block(shape) for _ in range(shape.layers))
        self.norm = norm(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def features(
        self, tokens: Tensor, cache: Cache | None = None, documents: Tensor | None = None
    ) -> Tensor:
        start = cache[0][0].shape[2] if cache else 0
        positions, mask = self.attending(tokens, start, documents)
        rotation = rotary_table(self.shape, positions)
        # An earlier pipeline stage may have applied the embedding.
        x = tokens if tokens.is_floating_point() else self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, cache, index, mask)
        return self.norm(x)  # type: ignore[no-any-return]

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        return x * self.shape.hidden_size**0.5 if FAMILIES[self.shape.family].scaled else x  # type: ignore[no-any-return]

    def initial(self, name: str) -> tuple[float, float]:
        """Returns the mean and standard deviation of a parameter's initial values. The standard
        deviation is 0.02 for matrices, divided by sqrt(2 L) for those that write to the residual
        stream.

        The scaling keeps the residual stream's variance from growing with depth (Radford et al.
        2019, GPT-2, section 2.3).
        """
        if name.endswith("norm.weight"):
            return 0.0 if FAMILIES[self.shape.family].gains_from_one else 1.0, 0.0
        if name.endswith("bias"):
            return 0.0, 0.0
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        return 0.0, INITIAL_STD / math.sqrt(2 * self.shape.layers) if writes else INITIAL_STD


class Norm(nn.RMSNorm):
    """RMSNorm with a gain of 1 + weight, as in Gemma."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


def norm(shape: Model, width: int | None = None) -> nn.RMSNorm:
    """Returns the family's norm layer for the residual stream, or for `width` features."""
    kind = Norm if FAMILIES[shape.family].gains_from_one else nn.RMSNorm
    return kind(width or shape.hidden_size, eps=shape.norm_eps)


class LlamaBlock(nn.Module):
    """Transformer block with pre-norm: each sublayer's input is normalized, and its output is added
    to the residual stream.
    """

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.input_layernorm = norm(shape)
        self.self_attn = GroupedQueryAttention(shape)
        self.post_attention_layernorm = norm(shape)
        self.mlp = GatedFeedForward(shape)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        cache: Cache | None = None,
        index: int = 0,
        mask: Tensor | None = None,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, cache, index, mask)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class LateBlock(nn.Module):
    """Transformer block whose sublayer outputs are normalized and then added to the residual stream
    (OLMo 2).
    """

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.self_attn = GroupedQueryAttention(shape)
        self.post_attention_layernorm = norm(shape)
        self.mlp = GatedFeedForward(shape)
        self.post_feedforward_layernorm = norm(shape)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        cache: Cache | None = None,
        index: int = 0,
        mask: Tensor | None = None,
    ) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, rotation, cache, index, mask))
        return x + self.post_feedforward_layernorm(self.mlp(x))  # type: ignore[no-any-return]


class GroupedQueryAttention(nn.Module):
    """Causal attention in which H / K query heads share each key-value head (Ainslie et al. 2023,
    arXiv:2305.13245).
    """

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.head_dim, family = shape.head_features, FAMILIES[shape.family]
        width, keys = shape.heads * self.head_dim, shape.kv_heads * self.head_dim
        self.together = family.normed == "all"
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=family.biases)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=family.biases)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=family.biases)
        if family.normed:
            self.q_norm = norm(shape, width if self.together else self.head_dim)
            self.k_norm = norm(shape, keys if self.together else self.head_dim)
        self.normed = bool(family.normed)
        self.attend = Attend(causal=True)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(
        self, x: Tensor, rotation: Rotation, cache: Cache | None, index: int, mask: Tensor | None
    ) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.together:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = self.heads(q), self.heads(k), self.heads(v)
        if self.normed and not self.together:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (
            rotate(q.transpose(1, 2), rotation),
            rotate(k.transpose(1, 2), rotation),
            v.transpose(1, 2),
        )
        if cache is not None:
            k, v = extend(cache, index, k, v)
        out = self.attend(q, k, v, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def heads(self, x: Tensor) -> Tensor:
        """Splits [B, T, heads x E] into [B, T, heads, E]. Infers the number of heads from the
        shape, because tensor parallelism divides them.
        """
        return x.view(*x.shape[:2], -1, self.head_dim)


class GatedFeedForward(nn.Module):
    """SwiGLU feed-forward layer: down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202).
    Gemma uses GELU instead of SiLU.
    """

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.gelu = FAMILIES[shape.family].gelu
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(  # type: ignore[no-any-return]
            (F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)) * self.up_proj(x)
        )


class Olmo2(Llama):
    """OLMo 2: blocks normalize their sublayers' outputs, and queries and keys are normalized over
    all heads.
    """

    plan = replace(
        Llama.plan,
        norms=("layers.*.post_attention_layernorm", "layers.*.post_feedforward_layernorm", "norm"),
        head_norms=(),
    )


def rotary_table(shape: Model, positions: Tensor) -> Rotation:
    """Returns cos and sin of position x frequency, with the E / 2 frequencies repeated (Su et al.
    2021, arXiv:2104.09864). Both are [T, E] for positions [T], and [B, 1, T, E] for [B, T].

    They are computed in every forward pass, which is cheap and means that ranks have no buffers to
    synchronize.
    """
    size = shape.head_features
    waves = shape.rope_theta ** (torch.arange(0, size, 2, device=positions.device).float() / size)
    # Round as transformers does, because one bit changes the angles at late positions.
    frequencies = stretched(1 / waves, shape)
    half = positions.float()[..., None] * frequencies
    angles = (
        torch.cat((half, half), -1) if positions.ndim == 1 else torch.cat((half, half), -1)[:, None]
    )
    return angles.cos(), angles.sin()


def stretched(frequencies: Tensor, shape: Model) -> Tensor:
    """Applies Llama 3.1's scaling for long contexts: divides low frequencies by `rope_scaling`.

    Waves longer than the original context are scaled in full, and waves shorter than a quarter of
    it are unchanged. In between, the scaling is interpolated linearly (Grattafiori et al. 2024,
    arXiv:2407.21783, section 3.4.2; constants from the published config.json).
    """
    # number of wave periods within the original context
    turns = frequencies * (STRETCHED_FROM / (2 * math.pi))
    kept = ((turns - 1) / 3).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / shape.rope_scaling)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Applies rotary positions to x [B, heads, T, E]: rotates features i and i + E / 2 together by
    the position's angle.
    """
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def extend(cache: Cache, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Appends keys and values to block `index` of the cache. Returns all of that block's keys and
    values.
    """
    if index == len(cache):
        cache.append((k, v))
    else:
        cache[index] = torch.cat((cache[index][0], k), 2), torch.cat((cache[index][1], v), 2)
    return cache[index]
