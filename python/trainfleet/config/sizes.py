"""Counts a model's parameters and FLOPs per token. Tests check the formulas against the modules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from .families import FAMILIES
from .types import Model


@dataclass(frozen=True)
class ParameterCount:
    """Parameter counts of a model part: in matrices, which tensor parallelism splits, and in
    vectors.
    """

    matrices: int
    vectors: int

    def on_rank(self, ranks: int, whole: int = 0) -> int:
        """Returns the count per tensor rank. `whole`: parameters that every rank has."""
        return (self.matrices - whole) // ranks + whole + self.vectors


@dataclass(frozen=True)
class ModelParts:
    """Parts into which a pipeline can split a model: before the blocks, one block, and after the
    blocks.
    """

    first: ParameterCount
    block: ParameterCount
    last: ParameterCount


@cache
def parts_of(model: Model) -> ModelParts:
    """Returns the parts of a model. A tied output layer is counted only in the first part."""
    family, width = FAMILIES[model.family], model.hidden_size
    embedding = model.vocab_size * width
    head = _transform(model) + _pooler(model) + (0 if model.tie_word_embeddings else embedding)
    # Per block: gains of two norms, gains for query and key, biases of query, key and value.
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
    # Biases of attention and feed-forward, and two norms with gain and bias.
    block = 4 * width + model.intermediate_size + width + 4 * width
    # An encoder has a norm after its embedding.
    first = ParameterCount(embedding + look_ups(model), 0 if family.causal else 2 * width)
    return ModelParts(
        first, ParameterCount(_block(model), block), ParameterCount(head, _head_vectors(model))
    )


def count_parameters(model: Model) -> int:
    """Returns the number of trained parameters. Tied parameters are counted once."""
    parts = parts_of(model)
    return sum(
        part.matrices + part.vectors
        for part in (parts.first, parts.last, *[parts.block] * model.layers)
    )


def flops_per_token(model: Model, sequence_length: int) -> float:
    """Returns the training FLOPs per token: 6 per matrix parameter in use, plus attention.

    The 6 FLOPs are one multiply-add in the forward pass and two in the backward pass. Embedding
    lookups count as none. In a masked model, the output layer processes only masked tokens.
    Attention takes 12 x layers x length x width (Chowdhery et al. 2022, PaLM,
    arXiv:2204.02311, appendix B), or half of that in a causal model. Recomputation is not counted.
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
    """Describes the FLOP formula in one line.

    MFUs are comparable only if their formulas are known, which other programs seldom state.
    """
    causal = FAMILIES[model.family].causal
    attention = (
        f"{6 if causal else 12} x layers x length x width for "
        f"attention{', halved by the causal mask' if causal else ''}"
    )
    return (
        f"FLOPs per token: 6 x parameters of matrix products, without the embedding; {attention}; "
        "without recomputation"
    )


def _block(model: Model) -> int:
    """Returns the number of parameters in a block's matrices.

    Attention has four matrices. SwiGLU has three, and a plain feed-forward has two.
    """
    attention = model.hidden_size * model.head_features * (2 * model.heads + 2 * model.kv_heads)
    return (
        attention
        + (3 if FAMILIES[model.family].rotary else 2) * model.hidden_size * model.intermediate_size
    )


def _normed(model: Model) -> int:
    """Returns the number of parameters in the query and key norms."""
    heads = {"": 0, "head": 2, "all": model.heads + model.kv_heads}[FAMILIES[model.family].normed]
    return heads * model.head_features


def _transform(model: Model) -> int:
    """Returns the number of parameters in a masked model's transform before the output layer."""
    return 0 if FAMILIES[model.family].causal else model.hidden_size**2


def _pooler(model: Model) -> int:
    """Returns the number of parameters in the matrices of the pooler, which predicts whether text B
    follows text A.
    """
    return (
        model.hidden_size**2 + 2 * model.hidden_size
        if FAMILIES[model.family].objective == "pairs"
        else 0
    )


def look_ups(model: Model) -> int:
    """Returns the number of parameters in learned position and segment embeddings.

    Every tensor rank has a full copy.
    """
    family = FAMILIES[model.family]
    positions = 0 if family.rotary else model.max_position_embeddings + family.positions_from
    return (positions + family.segments) * model.hidden_size


def _head_vectors(model: Model) -> int:
    """Returns the number of vector parameters in the last part: the final norm and, in an encoder,
    the biases of the transform, output layer and pooler.
    """
    family, width = FAMILIES[model.family], model.hidden_size
    pooler = width + 2 if family.objective == "pairs" else 0
    return 2 * width + (0 if family.causal else width + model.vocab_size + pooler)
