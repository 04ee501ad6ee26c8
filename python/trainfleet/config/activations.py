"""Estimates activation memory: the activations that a stage saves for the backward pass, and a
block's peak working memory.

The formulas follow Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1), adapted to our modules.
tests/bench/bench_memory.py compares them with the tensors that are alive at a step's peak. Between
modules, activations are sharded along the sequence across tensor ranks. Attention and feed-forward
gather the whole sequence and save it for the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from .families import FAMILIES
from .limits import by_parts, casts
from .types import Config

FULL = 4  # bytes per fp32 element


@dataclass(frozen=True)
class Flow:
    """Activation bytes of one micro-batch on a rank.

    Attributes:
        kept: Activations that one block saves for its backward pass.
        again: Activations that recomputation restores in addition.
        work: Peak gradient memory inside a block, minus the memory freed by then.
        hidden: Hidden states between modules.
        entering: Input of the output layer, plus the activations that its norm keeps.
        gradient: Gradient of the hidden states over the whole sequence.
    """

    kept: float
    again: float
    work: float
    hidden: float
    entering: float
    gradient: float


def flow_of(config: Config, width: int) -> Flow:
    """Returns the activation bytes for hidden states of `width` bytes per element."""
    train, wide, part = config.train, config.model.hidden_size, config.train.parallelism.tensor
    tokens = train.micro_batch_size * train.sequence_length / train.parallelism.context
    # Extra bytes per element if only matmuls run in bf16 and everything else stays in fp32.
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
    """Returns the bytes per token that dropout saves for the backward pass.

    Fused dropout saves a one-byte mask per element. Unfused dropout saves masks as wide as the
    activations, and three fp32 copies of the attention scores.
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
    """Returns the bytes per token of the extra bf16 copies of norm outputs.

    If matmuls cast their inputs, every matmul that reads a norm's output saves its own copy.
    Otherwise, they share one.
    """
    entered = 3 + (2 if FAMILIES[config.model.family].rotary else 1)
    return width * (entered - 2) * config.model.hidden_size


def _kept(config: Config, width: int, most: float) -> float:
    """Returns the bytes per token that a block saves with recomputation.

    Full recomputation saves only the block's input. Selective recomputation also saves the outputs
    of expensive operations. A memory budget saves the input and a fraction of the rest.
    """
    recompute, least = (
        config.train.recomputation,
        width * config.model.hidden_size / config.train.parallelism.tensor,
    )
    if not isinstance(recompute, str):
        return least + recompute * (most - least)
    return _products(config, width) if recompute == "selective" else least


def _products(config: Config, width: int) -> float:
    """Returns the bytes per token of a block's input, matmul outputs, attention output and
    softmax sums.
    """
    model, part = config.model, config.train.parallelism.tensor
    inner = (2 if FAMILIES[model.family].rotary else 1) * model.intermediate_size
    numbers = (
        model.hidden_size + 2 * _queries(config) + _keys(config) + inner
    ) / part + 2 * model.hidden_size
    return width * numbers + FULL * model.heads / part


def _most(config: Config, width: int, norm: int) -> float:
    """Returns the bytes per token that a block saves without recomputation.

    Counts the inputs of both norms and both modules, query, key, value, the attention output and
    its softmax sums. The feed-forward adds four tensors with SwiGLU, or two otherwise. `norm` is
    the number of extra bytes per element that a norm saves.
    """
    model, layout, family = config.model, config.train.parallelism, FAMILIES[config.model.family]
    queries, keys, part = _queries(config), _keys(config), layout.tensor
    inner = (4 if family.rotary else 2) * model.intermediate_size
    # Context parallelism computes attention chunk by chunk and merges the outputs.
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
    """Returns the bytes per element of the fp32 intermediates that an unfused norm saves."""
    return FULL if width == FULL else 2 * FULL - width  # a bf16 input is saved only as fp32


def _work(config: Config) -> float:
    """Returns the gradient elements per token at a block's memory peak, including hidden states.

    The peak occurs in the feed-forward, or in attention once the feed-forward's activations are
    freed.
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
    """Returns the number of key and value elements per token.

    Context ranks gather the whole sequence's keys and values. Heads are replicated if there are
    more tensor ranks than key/value heads.
    """
    layout = config.train.parallelism
    return (
        2 * max(config.model.kv_heads, layout.tensor) * config.model.head_features * layout.context
    )
