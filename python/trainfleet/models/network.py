"""Base class of all models, and the plan for splitting a model over ranks. The plan lists module
names, so any tensor-parallel library can apply it.
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
    """Model that maps tokens [B, T] to logits [B, T, V], or to the loss if targets are given. Its
    plan defines how the engine can split it.

    Modules must be registered in the order of use. Gradients are then ready in reverse order, as
    DDP expects.
    """

    plan: ClassVar[ParallelPlan]
    shape: Model
    # Sequence positions [T] of this rank's tokens, or None for 0, 1, 2 ... The engine sets them if
    # it splits sequences.
    positions: Tensor | None = None
    parts: int = 1  # ranks over which each sequence is split
    # The engine may replace it with a function for vocabulary-sharded logits.
    surprise: Surprise = staticmethod(surprise)

    @abstractmethod
    def features(self, tokens: Tensor) -> Tensor:
        """Returns the head's input [B, T, D].

        A pipeline stage is a model without the other stages' modules. It takes the previous stage's
        hidden state instead of tokens, and returns the next stage's input.
        """

    @abstractmethod
    def loss(self, x: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Returns the loss for the output of `features`."""

    def positions_of(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Returns the sequence positions [T] of tokens [B, T], or of a hidden state [B, T, D]."""
        if self.positions is not None:
            return self.positions
        return torch.arange(start, start + tokens.shape[1], device=tokens.device)

    def attending(
        self, tokens: Tensor, start: int, documents: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the positions of tokens that follow `start` cached ones, and the attention mask.

        `documents` [B, T] contains the document indices of the full sequences. If it is given,
        positions are relative to each document, the mask separates documents, and both cover this
        rank's tokens.
        """
        if documents is None:
            return self.positions_of(tokens, start), None
        positions, mask = positions_within(documents), causal_within(documents)
        if self.parts > 1:
            return positions[:, self.positions], mask[:, :, self.positions]
        return positions, mask

    @abstractmethod
    def initial(self, name: str) -> tuple[float, float]:
        """Returns the mean and standard deviation of the normal distribution from which a parameter
        is initialized.
        """

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        for name, parameter in self.named_parameters():
            generator = torch.Generator(parameter.device)
            parameter.copy_(self.draw(name, parameter.shape, seed, generator.manual_seed))

    def draw(
        self, name: str, size: Sequence[int], seed: int, generator: Callable[[int], torch.Generator]
    ) -> Tensor:
        """Draws a parameter's initial values on the generator's device. They depend only on the
        seed and the name, so all ranks draw the same values.
        """
        mean, std = self.initial(name)
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        source = generator(int.from_bytes(digest[:8], "big") >> 1)
        values = torch.full(tuple(size), mean, device=source.device)
        return values.normal_(mean, std, generator=source) if std else values


class Total(nn.Module):
    """Identity applied to the loss. The engine hooks it to complete a vocab-parallel loss."""

    def forward(self, loss: Tensor) -> Tensor:
        return loss


class Attend(nn.Module):
    """Attention: softmax(q k^T / sqrt(E)) v over the positions that each query may attend to.

    It is a separate module, so that the engine can replace it with attention to other ranks' keys.
    """

    def __init__(self, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal, self.dropout = causal, dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Maps q [B, H, T, E], k and v [B, K, S, E] to [B, H, T, E]. Each key-value head serves H /
        K query heads.

        A mask [B, 1, T, S] marks the keys that each query attends to. Without a mask, a single
        query attends to all keys, and several queries attend causally. SDPA aligns the causal mask
        to the top left corner, which is correct only for an empty cache, as in `generate`.
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
    """Returns each token's position in its document, [B, T], given document indices [B, T]."""
    positions = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    begins = F.pad(documents.diff(dim=1) != 0, (1, 0), value=True)
    return positions - torch.where(begins, positions, 0).cummax(1).values


def causal_within(documents: Tensor) -> Tensor:
    """Returns a mask [B, 1, T, T] that lets each query attend to its own key and to earlier keys in
    its document.
    """
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril()


@dataclass(frozen=True)
class ParallelPlan:
    """Module names, relative to the model, that define how to split it; `*` matches any block.

    Tensor parallelism splits `column` layers by output features (entire heads), `row` layers by
    input features, and `embeddings` by vocabulary. The outputs of `row` layers are summed. After
    the module `divided`, the sequence is split over the tensor-parallel ranks. `norms` process one
    part of it, and `gathered` modules require all of it.

    A pipeline may cut between `blocks`. `first` modules are only in the first stage, and `last`
    modules only in the last. `head` computes the logits. `alike` modules are replicated on every
    rank and receive the entire sequence. `head_norms` process entire heads [B, T, heads, E], of
    which each rank holds some. `copied` lists `column` layers that may have fewer heads than ranks;
    some ranks then hold the same heads.
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
