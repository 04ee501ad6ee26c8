"""Counts a model's parameters, and the FLOPs of one token: arithmetic, which tests compare with the
modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from .families import FAMILIES
from .types import Model


@dataclass(frozen=True)
class ParameterCount:
    """Trained numbers of a part of a model: those in matrices, which tensor parallelism divides,
    and those in vectors.
    """

    matrices: int
    vectors: int


@dataclass(frozen=True)
class ModelParts:
    """A model as a pipeline may cut it: what comes before the blocks, one block, what comes after
    them.
    """

    first: ParameterCount
    block: ParameterCount
    last: ParameterCount


@cache
def parts_of(model: Model) -> ModelParts:
    """The parts; a tied output layer counts in the first alone."""
    family, width = FAMILIES[model.family], model.hidden_size
    embedding = model.vocab_size * width
    head = _transform(model) + _pooler(model) + (0 if model.tie_word_embeddings else embedding)
    # gains: two a block and the last, and of query and key; biases of query, key and value
    if family.rotary:
        vectors = (
            2 * width
            + _normed(model)
            + (model.heads + 2 * model.kv_heads) * model.head_features * family.biases
        )
        return ModelParts(
            ParameterCount(embedding, 0),
            ParameterCount(_block(model), vectors),
            ParameterCount(head, width),
        )
    # attention, feed-forward, two norms
    block = 4 * width + model.intermediate_size + width + 4 * width
    # an encoder norms its embedding
    first = ParameterCount(embedding + look_ups(model), 0 if family.causal else 2 * width)
    return ModelParts(
        first, ParameterCount(_block(model), block), ParameterCount(head, _head_vectors(model))
    )


def count_parameters(model: Model) -> int:
    """Trained numbers; a tied one counts once."""
    parts = parts_of(model)
    return sum(
        part.matrices + part.vectors
        for part in (parts.first, parts.last, *[parts.block] * model.layers)
    )


def flops_per_token(model: Model, sequence_length: int) -> float:
    """FLOPs that training on one token costs: 6 a number of every matrix that it goes through, and
    attention.

    A multiply-add forward and two backward make 6; looking up an embedding makes none; the output
    layer, where hidden tokens are guessed, sees only those. Attention's scores and their use cost
    12 x layers x length x width (Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B), halved
    where a token sees only those before it. Recomputation is left out.
    """
    family = FAMILIES[model.family]
    seen = family.guesses(sequence_length) / sequence_length
    output = model.vocab_size * model.hidden_size + _transform(model)
    attention = (
        (6.0 if family.causal else 12.0)
        * model.layers
        * sequence_length
        * model.heads
        * model.head_features
    )
    return (
        6.0 * (model.layers * _block(model) + seen * output)
        + attention
        + 6.0 * _pooler(model) / sequence_length
    )


def flops_in_words(model: Model) -> str:
    """Describes the FLOPs that count for a token, in one line, so that MFUs can be compared: others
    seldom state their formula.
    """
    causal = FAMILIES[model.family].causal
    attention = (
        f"{6 if causal else 12} x layers x length x width for "
        f"attention{', half as it is causal' if causal else ''}"
    )
    return (
        f"FLOPs per token: 6 x numbers in matrix products, embedding table out; {attention}; "
        "recomputation out"
    )


def _block(model: Model) -> int:
    """Numbers in the matrices of a block: attention's four, and SwiGLU's three or a plain
    feed-forward's two.
    """
    attention = model.hidden_size * model.head_features * (2 * model.heads + 2 * model.kv_heads)
    return (
        attention
        + (3 if FAMILIES[model.family].rotary else 2) * model.hidden_size * model.intermediate_size
    )


def _normed(model: Model) -> int:
    """Gains of the norms of query and key."""
    heads = {"": 0, "head": 2, "all": model.heads + model.kv_heads}[FAMILIES[model.family].normed]
    return heads * model.head_features


def _transform(model: Model) -> int:
    """The square matrix between the last block and the output layer of a model that guesses hidden
    tokens.
    """
    return 0 if FAMILIES[model.family].causal else model.hidden_size**2


def _pooler(model: Model) -> int:
    """The matrices that say from a sequence's first token whether B follows A."""
    return (
        model.hidden_size**2 + 2 * model.hidden_size
        if FAMILIES[model.family].objective == "pairs"
        else 0
    )


def look_ups(model: Model) -> int:
    """Numbers of learnt positions and segments, which every tensor rank has whole."""
    family = FAMILIES[model.family]
    positions = 0 if family.rotary else model.max_position_embeddings + family.positions_from
    return (positions + family.segments) * model.hidden_size


def _head_vectors(model: Model) -> int:
    """The last norm; of an encoder the biases of the square matrix and of the output layer, and of
    what judges pairs.
    """
    family, width = FAMILIES[model.family], model.hidden_size
    pooler = width + 2 if family.objective == "pairs" else 0
    return 2 * width + (0 if family.causal else width + model.vocab_size + pooler)
