"""Layers of GPT-2, BERT and RoBERTa: learned positions, attention and feed-forward with biases."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ..config.families import FAMILIES
from ..config.types import Model
from .llama import Cache, extend
from .network import Attend

INITIAL_STD = 0.02  # standard deviation of every matrix
COLUMN = (
    "layers.*.self_attn.q_proj",
    "layers.*.self_attn.k_proj",
    "layers.*.self_attn.v_proj",
    "layers.*.mlp.up_proj",
)
ROW = ("layers.*.self_attn.o_proj", "layers.*.mlp.down_proj")


class Embeddings(nn.Module):
    """Embedding that maps tokens [B, T], or tokens and segments [B, T, 2], at positions [T] or [B,
    T] to [B, T, D].
    """

    def __init__(self, shape: Model, norm: bool) -> None:
        super().__init__()
        family = FAMILIES[shape.family]
        self.positions_from = family.positions_from
        self.tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.positions = nn.Embedding(
            shape.max_position_embeddings + family.positions_from, shape.hidden_size
        )
        self.segments = (
            nn.Embedding(family.segments, shape.hidden_size) if family.segments else None
        )
        self.norm = nn.LayerNorm(shape.hidden_size, eps=shape.norm_eps) if norm else None

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        tokens, segments = (
            tokens.unbind(-1)
            if tokens.ndim == 3
            else (tokens, tokens.new_zeros(()).expand(tokens.shape))
        )
        x = self.tokens(tokens) + self.positions(positions + self.positions_from)
        x = x if self.segments is None else x + self.segments(segments)
        return x if self.norm is None else self.norm(x)  # type: ignore[no-any-return]


class MultiHeadAttention(nn.Module):
    """Multi-head attention, causal or bidirectional (Vaswani et al. 2017, arXiv:1706.03762)."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.head_dim = shape.hidden_size // shape.heads
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.k_proj = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.v_proj = nn.Linear(shape.hidden_size, shape.hidden_size)
        self.attend = Attend(FAMILIES[shape.family].causal, shape.dropout)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size)

    def forward(
        self, x: Tensor, cache: Cache | None = None, index: int = 0, mask: Tensor | None = None
    ) -> Tensor:
        q, k, v = (
            self.split(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cache is not None:
            k, v = extend(cache, index, k, v)
        return self.o_proj(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def split(self, x: Tensor) -> Tensor:
        """Splits [B, T, heads x E] into [B, heads, T, E]. Infers the number of heads from the
        shape, because tensor parallelism divides them.
        """
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """Feed-forward layer: down(gelu(up(x))) (Hendrycks and Gimpel 2016, arXiv:1606.08415). GPT-2
    uses the tanh approximation of GELU.
    """

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.approximate = "tanh" if FAMILIES[shape.family].tanh else "none"
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x), approximate=self.approximate))  # type: ignore[no-any-return]


def initial(name: str) -> tuple[float, float]:
    """Returns the mean and standard deviation of a parameter's initial values: 0 and 0.02 for
    matrices, 0 for biases, 1 for norm gains.
    """
    if name.endswith("bias"):
        return 0.0, 0.0
    return (1.0, 0.0) if name.endswith("norm.weight") else (0.0, INITIAL_STD)
