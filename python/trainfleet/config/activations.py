"""The activations that a stage's forward passes keep for backward, and the working memory of one
block at its peak.

Counted as Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1) do, of our modules, and compared
with what lives at the peak of a step (tests/bench/bench_memory.py). Between modules a tensor rank
has a part of the sequence; what enters attention and feed-forward is whole, as it is kept after it
was gathered.
"""

from __future__ import annotations

from dataclasses import dataclass

from .families import FAMILIES
from .precision import by_parts, casts
from .types import Config

FULL = 4  # bytes of an fp32 number


@dataclass(frozen=True)
class Flow:
    """Bytes that a rank's micro-batch takes.

    `kept` of one block for its backward pass; `again`: what its recomputation adds to that; `work`:
    gradients within the block at its fullest, beyond what it frees by then; `hidden`: hidden states
    as they are between modules; `entering`: as they enter the output layer, and what its norm
    keeps; `gradient`: of the hidden states, whole.
    """

    kept: float
    again: float
    work: float
    hidden: float
    entering: float
    gradient: float


def flow_of(config: Config, width: int) -> Flow:
    """The bytes, where a number of the hidden states takes `width`."""
    train, wide, part = config.train, config.model.hidden_size, config.train.parallelism.tensor
    tokens = train.micro_batch_size * train.sequence_length / train.parallelism.context
    # between products, where those alone are in bf16
    apart, gained = (by_parts(config), FULL - width if casts(config) else 0)
    norm = _norm(width) if apart and FAMILIES[config.model.family].rotary else gained
    whole = (
        _most(config, width, norm)
        + _dropped(config, width, apart)
        + (_cast(config, width) if gained else 0)
    )
    kept = (
        whole
        if train.activation_checkpointing == "none"
        else _kept(config, width, whole) + gained * wide
    )
    return Flow(
        kept=tokens * kept,
        again=tokens * max(0.0, whole - kept),
        work=tokens * (width * _work(config) + gained * wide),
        hidden=tokens * width * wide / part,
        entering=tokens * wide * (norm / part + width * (1 if part == 1 else 1 / part + 1)),
        gradient=tokens * (width + gained) * wide,
    )


def _dropped(config: Config, width: int, apart: bool) -> float:
    """Bytes a token that dropout keeps: masks, a byte a number; by parts, wide masks, and
    attention's scores three times.
    """
    model, layout = config.model, config.train.parallelism
    if not FAMILIES[model.family].dropout or not model.dropout:
        return 0
    if not apart:
        return 2 * model.hidden_size
    scores = 3 * FULL * model.heads * config.train.sequence_length + (FULL - width) * (
        _queries(config) + _keys(config)
    )
    return 2 * width * model.hidden_size + scores / layout.tensor


def _cast(config: Config, width: int) -> int:
    """Bytes a token of copies in bf16: for each product that the norms' outputs enter, where else
    there is one copy for all.
    """
    entered = 3 + (2 if FAMILIES[config.model.family].rotary else 1)
    return width * (entered - 2) * config.model.hidden_size


def _kept(config: Config, width: int, most: float) -> float:
    """Bytes a token that a block keeps, with recomputation: its input, what is costly to compute,
    or a part of the rest.
    """
    recompute, least = (
        config.train.recomputation,
        width * config.model.hidden_size / config.train.parallelism.tensor,
    )
    if not isinstance(recompute, str):
        return least + recompute * (most - least)
    return _products(config, width) if recompute == "selective" else least


def _products(config: Config, width: int) -> float:
    """The block's input, what matrix products and attention made, and attention's sums."""
    model, part = config.model, config.train.parallelism.tensor
    inner = (2 if FAMILIES[model.family].rotary else 1) * model.intermediate_size
    numbers = (
        model.hidden_size + 2 * _queries(config) + _keys(config) + inner
    ) / part + 2 * model.hidden_size
    return width * numbers + FULL * model.heads / part


def _most(config: Config, width: int, norm: int) -> float:
    """Returns the bytes that every product, norm and activation keeps. These are the inputs of both
    norms and modules, query, key, value, attention, SwiGLU's four tensors or the two of a plain
    module, and attention's sums. `norm`: further bytes that a norm keeps per number.
    """
    model, layout, family = config.model, config.train.parallelism, FAMILIES[config.model.family]
    queries, keys, part = _queries(config), _keys(config), layout.tensor
    inner = (4 if family.rotary else 2) * model.intermediate_size
    # pieces of a sequence attend apart, and are joined then
    joined = queries if layout.context > 1 else 0
    numbers = (
        2 * model.hidden_size + 2 * queries + joined + keys + inner
    ) / part + 2 * model.hidden_size
    normed = (queries + keys / (2 * layout.context)) / part if family.normed else 0
    return (
        width * (numbers + normed)
        + norm * (2 * model.hidden_size / part + normed)
        + FULL * model.heads / part
    )


def _norm(width: int) -> int:
    """Bytes a number that a norm computed by parts keeps beyond its input and output: what it made
    of both, in fp32.
    """
    return FULL if width == FULL else 2 * FULL - width  # its input is then kept in fp32 alone


def _work(config: Config) -> float:
    """Numbers a token: gradients in the feed-forward, or in attention, when the feed-forward is
    done; and of hidden states.
    """
    model, part, gated = (
        config.model,
        config.train.parallelism.tensor,
        FAMILIES[config.model.family].rotary,
    )
    inner = (2 if gated else 1) * model.intermediate_size
    freed = (4 if gated else 2) * model.intermediate_size + (1 + part) * model.hidden_size
    attention = 2 * _keys(config) + 2 * _queries(config) - freed
    hidden = model.hidden_size / part + (model.hidden_size if part > 1 else 0)
    return max(inner, attention) / part + hidden


def _queries(config: Config) -> int:
    return config.model.heads * config.model.head_features


def _keys(config: Config) -> int:
    """Keys and values, of the whole sequence, as context ranks gather them; more tensor ranks than
    heads have copies.
    """
    layout = config.train.parallelism
    return (
        2 * max(config.model.kv_heads, layout.tensor) * config.model.head_features * layout.context
    )
