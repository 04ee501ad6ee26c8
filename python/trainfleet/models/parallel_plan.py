"""Describes how a model may be divided among ranks, by names of its modules: data, which any
library of parallel layers can apply.
"""

from __future__ import annotations

from dataclasses import dataclass


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
