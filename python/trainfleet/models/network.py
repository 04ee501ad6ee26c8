"""Defines the base class of all families of models, and the plan by which one may be divided among
ranks: names of its modules, which any library of parallel layers can apply.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.types import Model
from .loss import Surprise, surprise


class Network(nn.Module, ABC):
    """Maps tokens [B, T] to logits [B, T, V], or with targets to the loss; also tells the engine
    how to divide it.

    Its modules are registered in the order of use: gradients then become ready in the reverse
    order, as DDP assumes.
    """

    plan: ClassVar[ParallelPlan]
    shape: Model
    # Positions of this rank's tokens in their sequence, [T]; None: 0, 1, 2 ... The engine sets them
    # when it divides sequences.
    positions: Tensor | None = None
    parts: int = 1  # ranks over which the engine divides each sequence
    # the engine may replace it by one that takes slices of the vocabulary
    surprise: Surprise = staticmethod(surprise)

    @abstractmethod
    def features(self, tokens: Tensor) -> Tensor:
        """Returns the head's input: [B, T, D].

        A pipeline stage is a model without the modules of other stages. Then this takes the hidden
        state of the stage before instead of tokens, and returns the next one's.
        """

    @abstractmethod
    def loss(self, x: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Returns the loss of features."""

    def positions_of(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Returns the positions [T] of tokens [B, T], or of a hidden state [B, T, D], in their
        sequence.
        """
        if self.positions is not None:
            return self.positions
        return torch.arange(start, start + tokens.shape[1], device=tokens.device)

    @abstractmethod
    def initial(self, name: str) -> tuple[float, float]:
        """Returns mean and standard deviation of the normal distribution of a parameter's first
        values.
        """

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Initializes every weight."""
        for name, parameter in self.named_parameters():
            generator = torch.Generator(parameter.device)
            parameter.copy_(self.draw(name, parameter.shape, seed, generator.manual_seed))

    def draw(
        self, name: str, size: Sequence[int], seed: int, generator: Callable[[int], torch.Generator]
    ) -> Tensor:
        """Draws first values of a parameter on `generator`'s device, seeded only by seed and name,
        so that all ranks agree.
        """
        mean, std = self.initial(name)
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        source = generator(int.from_bytes(digest[:8], "big") >> 1)
        values = torch.full(tuple(size), mean, device=source.device)
        return values.normal_(mean, std, generator=source) if std else values


class Total(nn.Module):
    """Passes a loss through: a module, so that the engine can complete a loss computed from slices
    of the vocabulary.
    """

    def forward(self, loss: Tensor) -> Tensor:
        return loss


class Attend(nn.Module):
    """Computes softmax(q k^T / sqrt(E)) v, a sum over the values of the positions that each query
    may see.

    It is a separate module, so that the engine can replace it by one that also sees keys of other
    ranks.
    """

    def __init__(self, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal, self.dropout = causal, dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Maps q [B, H, T, E], k and v [B, K, S, E] to [B, H, T, E]; H / K queries share a key and
        its value.

        A mask [B, 1, T, S] marks what each query sees. Without one, a single new query sees all
        keys. Several see themselves causally, which SDPA applies from the top left corner: right
        only while nothing is cached, which is how `generate` calls it.
        """
        causal, dropout = (
            mask is None and self.causal and q.shape[2] > 1,
            self.dropout if self.training else 0.0,
        )
        shared = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout, enable_gqa=shared
        )


def positions_within(documents: Tensor) -> Tensor:
    """Returns each token's position in its document, [B, T], given the documents' numbers [B,
    T].
    """
    positions = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    begins = F.pad(documents.diff(dim=1) != 0, (1, 0), value=True)
    return positions - torch.where(begins, positions, 0).cummax(1).values


def causal_within(documents: Tensor) -> Tensor:
    """Returns a mask of the keys that each query sees [B, 1, T, T]: those before it in its
    document, and its own.
    """
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril()


@dataclass(frozen=True)
class ParallelPlan:
    """Names from the model's root; `*` is any block.

    Tensor parallelism splits `column` layers by their outputs (entire heads at a time), `row`
    layers by their inputs (their outputs are then summed), and `embeddings` by the vocabulary. With
    it, the sequence is divided from the output of `divided` on: `norms` each see a part of it, and
    `gathered` modules need all of it. A pipeline may cut between the `blocks`; `first` is only with
    the first of them, `last` with the last; `head` computes the logits. `alike` modules are the
    same on every rank, and also get the entire sequence. `head_norms` see entire heads [B, T,
    heads, E], of which each rank has some. `copied` are those of `column` that may have fewer heads
    than there are ranks: then some ranks have the same ones.
    """

    blocks: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    head: str
    embeddings: tuple[str, ...]
    divided: str
    norms: tuple[str, ...]
    gathered: tuple[str, ...]
    column: tuple[str, ...]
    row: tuple[str, ...]
    alike: tuple[str, ...] = ()
    head_norms: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
