"""BERT as a plain torch module: masked language modeling and next-sentence prediction
(arXiv:1810.04805).

Shapes: B sequences, T tokens, D hidden size, V vocabulary. The input is tokens [B, T], or tokens
and segments [B, T, 2]. The first token's target is the pair label (0 means that B follows A),
because the first token is never masked.

RoBERTa is BERT without next-sentence prediction, and draws new masks each time a sequence is used
(Liu et al. 2019, arXiv:1907.11692).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.families import FAMILIES
from ..config.types import Model
from .layers import COLUMN, ROW, Embeddings, FeedForward, MultiHeadAttention, initial
from .loss import IGNORED, hidden_token_loss
from .network import Network, ParallelPlan, Total


class Encoder(Network):
    """Encoder that maps tokens to logits [B, T, V], or to the loss if targets are given. Implements
    RoBERTa; BERT adds a `Pooler`.
    """

    plan = ParallelPlan(
        blocks="layers",
        first=("embed",),
        last=("head",),
        head="head.lm_head",
        embeddings=("embed.tokens",),
        divided="embed",
        norms=("layers.*.attention_norm", "layers.*.mlp_norm"),
        gathered=("layers.*.self_attn", "layers.*.mlp"),
        column=(*COLUMN, "head.lm_head"),
        row=ROW,
        alike=("head",),
    )

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.shape, self.family = shape, FAMILIES[shape.family]
        self.embed = Embeddings(shape, norm=True)
        self.dropout = nn.Dropout(shape.dropout)
        self.layers = nn.ModuleList(BertBlock(shape) for _ in range(shape.layers))
        self.head = MaskedTokenHead(shape)
        if shape.tie_word_embeddings:
            self.head.lm_head.weight = self.embed.tokens.weight

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, reduction: str = "mean"
    ) -> Tensor:
        x = self.features(tokens)
        return self.head(x) if targets is None else self.loss(x, targets, reduction)

    def features(self, tokens: Tensor) -> Tensor:
        x = (
            tokens
            if tokens.is_floating_point()
            else self.dropout(self.embed(tokens, self.positions_of(tokens)))
        )
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, x: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return hidden_token_loss(
            x, self.head, targets, self.guesses(targets), self.parts, reduction, self.surprise
        )

    def guesses(self, targets: Tensor) -> int:
        """Returns the number of masked tokens per sequence, counted over the entire sequence even
        if this rank holds only a part of it.
        """
        return self.family.guesses(self.parts * targets.shape[1])

    def initial(self, name: str) -> tuple[float, float]:
        return initial(name)


class Bert(Encoder):
    """Encoder with next-sentence prediction. Its loss is the sum of both mean losses."""

    plan = replace(Encoder.plan, last=("head", "pooler"), alike=("head", "pooler"))

    def __init__(self, shape: Model) -> None:
        super().__init__(shape)
        self.pooler = Pooler(shape)
        self.total = Total()

    def loss(self, x: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Returns the loss for the output of `features`. With reduction "sum", the pair loss is
        weighted by the number of masked tokens per sequence. Dividing the sum by all masked tokens
        then gives the mean.
        """
        # true if this rank holds the first token; its target is the pair label
        first = self.positions_of(targets)[:1] == 0
        words = torch.cat((torch.where(first, IGNORED, targets[:, :1]), targets[:, 1:]), 1)
        hidden: Tensor = self.total(super().loss(x, words, reduction))
        labels = targets[:, 0]
        # cross-entropy of the two scores
        surprise = F.softplus(self.pooler(x).float().diff() * (1 - 2 * labels)[:, None])[:, 0]
        follows = torch.where(first & (labels != IGNORED), surprise, 0).sum()
        return hidden + follows * (
            self.guesses(targets) if reduction == "sum" else self.parts / len(targets)
        )


class BertBlock(nn.Module):
    """Transformer block with post-norm: each sublayer's output is added to the residual stream,
    which is then normalized.
    """

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.self_attn = MultiHeadAttention(shape)
        self.attention_norm = nn.LayerNorm(shape.hidden_size, eps=shape.norm_eps)
        self.mlp = FeedForward(shape)
        self.mlp_norm = nn.LayerNorm(shape.hidden_size, eps=shape.norm_eps)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.self_attn(x)))
        return self.mlp_norm(x + self.dropout(self.mlp(x)))  # type: ignore[no-any-return]


class MaskedTokenHead(nn.Module):
    """Output layer that maps x [B, T, D] to logits [B, T, V], or to [N, V] for the N positions in
    `chosen`.
    """

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.norm = nn.LayerNorm(shape.hidden_size, eps=shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size)

    def forward(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        x = x if chosen is None else x.flatten(0, 1)[chosen]
        return self.lm_head(self.norm(F.gelu(self.dense(x))))  # type: ignore[no-any-return]


class Pooler(nn.Module):
    """Output layer that maps the first token of x [B, T, D] to two scores [B, 2]: B follows A, or B
    is unrelated.
    """

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.follows = nn.Linear(shape.hidden_size, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.follows(torch.tanh(self.dense(x[:, 0])))  # type: ignore[no-any-return]
