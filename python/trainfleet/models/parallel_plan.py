"""How a model may be divided among ranks, as names of its modules: data, which any library of
parallel layers can apply.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelPlan:
    """Names from the model's root; `*` is any block.

    Tensor parallelism splits `column` layers by their outputs (whole heads at a time), `row` layers
    by their inputs, whose outputs are then summed, and `embeddings` by the vocabulary. With it, the
    sequence is divided from what `divided` gives on: `norms` each see a part of it, and `gathered`
    modules need it whole. A pipeline may cut between the `blocks`; `first` lives with the first of
    them only, `last` with the last; `head` gives the logits. `alike` modules are the same on every
    rank, and are given the whole sequence too. `head_norms` see whole heads [B, T, heads, E], of
    which each rank has some. `copied` are those of `column` that may have fewer heads than there
    are ranks: then some ranks have the same ones.
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
