"""What every family of models is."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config.types import Model
from .plan import Plan


class Network(nn.Module, ABC):
    """tokens [B, T] -> logits [B, T, V], or with targets the loss; and what the engine must know to divide it.

    Its modules are registered in the order of use: gradients then become ready in the reverse of that order, as DDP assumes.
    """

    plan: ClassVar[Plan]
    shape: Model
    # Where this rank's tokens stand in their sequence, [T]; None: at 0, 1, 2 ... The engine says so when it divides sequences.
    positions: Tensor | None = None

    @abstractmethod
    def features(self, tokens: Tensor) -> Tensor:
        """What the head is given: [B, T, D].

        A stage of a pipeline is a model without the modules that other stages have: then this takes the hidden state of the
        stage before instead of tokens, and what comes back is the next one's.
        """

    @abstractmethod
    def loss(self, x: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """The loss of features."""

    def places(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Where tokens [B, T], or a hidden state [B, T, D], stand in their sequence: [T]."""
        if self.positions is not None:
            return self.positions
        return torch.arange(start, start + tokens.shape[1], device=tokens.device)

    @abstractmethod
    def initial(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of the normal distribution that a parameter's first values are drawn from."""

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Draws every weight anew."""
        for name, parameter in self.named_parameters():
            parameter.copy_(self.draw(name, parameter.shape, seed, parameter.device))

    def draw(self, name: str, size: Sequence[int], seed: int, device: torch.device) -> Tensor:
        """First values of a parameter. They follow from seed and name alone, so that ranks which hold different ones agree."""
        mean, std = self.initial(name)
        values = torch.full(tuple(size), mean, device=device)
        if std:
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            values.normal_(mean, std, generator=generator)
        return values


class Attend(nn.Module):
    """softmax(q k^T / sqrt(E)) v, a sum over the values of the positions that each query may see.

    A module of its own, so that the engine can put in its place one that also sees keys of other ranks.
    """

    def __init__(self, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal, self.dropout = causal, dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, T, E], k and v [B, K, S, E] -> [B, H, T, E]; H / K queries share a key and its value.

        One new query sees all keys. Several see themselves causally, which SDPA takes from the top left corner: right only while
        nothing is cached, which is how `generate` calls it.
        """
        causal, dropout = self.causal and q.shape[2] > 1, self.dropout if self.training else 0.0
        shared = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout, enable_gqa=shared)
