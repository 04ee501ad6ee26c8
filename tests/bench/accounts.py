"""What published engines hold of a rank's memory: each engine's accounts as data, and one sum over them. Pure.

The sum is that of config/memory.py: states by format and by how far they are divided, what blocks keep for their backward pass
(Korthikanti et al. 2022, arXiv:2205.05198), logits, and what a pipeline has under way. What differs between engines stands in
bench_accounts.py, a class of runs each: formats and divisions as its documentation or source has them, none for one row alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

GIB = 2**30


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False

    @property
    def block(self) -> float:
        """Numbers of a block's matrices."""
        keys = 2 * self.hidden * self.hidden * self.kv_heads / self.heads
        return 2 * self.hidden**2 + keys + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def table(self) -> float:
        return float(self.vocab * self.hidden)


@dataclass(frozen=True)
class Case:
    """A run: its shape, tokens of a sequence, sequences of a micro-batch, degrees, and what is recomputed."""

    shape: Shape
    length: int
    micro: int
    passes: int
    data: int = 1
    shard: int = 1
    zero: int = 0
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    rounds: int = 1
    recompute: str = "none"
    sequence: bool = True  # what lies between tensor-parallel modules is divided too
    compiled: bool = False

    @property
    def tokens(self) -> float:
        return self.length * self.micro / self.context

    @property
    def communicators(self) -> int:
        """NCCL's of a rank: that of all, one for each dimension of several by which ranks are divided, and one for each neighbour
        in a pipeline: a pair that sends and receives has its own (torch, ProcessGroupNCCL.cpp, getKeySendRecv).
        """
        degrees = [
            degree for degree in (self.data, self.tensor, self.pipeline, self.context) if degree > 1
        ]
        return len(degrees) + (len(degrees) > 1) + (self.pipeline > 2)

    @property
    def under_way(self) -> float:
        """Micro-batches, of all the first stage's blocks, that wait for their backward pass (Narayanan et al. 2021, 2.2)."""
        most = (
            self.pipeline if self.rounds == 1 else self.pipeline + (self.pipeline - 1) / self.rounds
        )
        return min(most, self.passes) if self.rounds == 1 else most


@dataclass(frozen=True)
class Engine:
    """An engine's accounts: bytes a number of weights, gradients and optimizer; the ZeRO stage it has by itself."""

    weights: float = 2
    gradients: float = 4
    optimizer: float = 12
    zero: int = 0
    gathered: float = (
        0  # bytes a number of weights that ZeRO 3 gathers: of blocks at work; in a pipeline, of all
    )
    logits: float = 12  # bytes a logit at the peak
    sliced: float = 0  # and how many more where tensor ranks have slices of the vocabulary
    scores: bool = False  # attention keeps its scores
    dropout: bool = False  # and blocks masks
    parts: float = 4  # feed-forward-wide numbers that a gated block keeps
    copies: float = 0  # hidden-wide ones that its attention keeps besides queries, keys and values
    accumulates: bool = (
        False  # gradients are whole while micro-batches are added up, whatever ZeRO divides
    )
    stepping: float = 0  # bytes a number of its part that the optimizer's step works with, when gradients of 16 bits are gone
    joined: bool = False  # tensor ranks gather their slices of the logits for the loss
    regathers: bool = True  # what enters a tensor-parallel module is not kept whole
    halves: bool = False  # selective recomputation keeps every second product
    offloaded: bool = False  # what recomputation keeps is on the host
    buffers: float = 0  # hidden states that a pipeline has besides, a micro-batch under way
    stages: str = "blocks"  # what stages have as many of: blocks; blocks and embeddings; or as much to compute
    analytic: bool = False  # states of blocks and activations alone, as papers draw them
    met: str = "allocated"  # what the figure counts, of SLACK


# Over tensors: fragments that the caching allocator reserves; whether the driver's context and NCCL's buffers are counted.
SLACK = {"allocated": (1.0, False), "reserved": (1.06, False), "device": (1.06, True)}
# GiB of a process: the context, which took 0.3 of CUDA 11.7 on and over 1 before (github.com/pytorch/pytorch/issues/107667); each
# communicator, 544 MB of two ranks and 688 of more on A100 (github.com/NVIDIA/nccl/issues/964)
CONTEXT, COMMUNICATOR = 0.5, 0.6


def bytes_of(case: Case, engine: Engine) -> float:
    """The fullest rank's bytes as the engine's own meter would tell them."""
    factor, outside = SLACK[engine.met]
    fixed = outside * (CONTEXT + COMMUNICATOR * case.communicators)
    stages = [_stage(case, engine, first=True, last=case.pipeline == 1)]
    if case.pipeline > 1 and not engine.analytic:
        stages.append(_stage(case, engine, first=False, last=True))
        stages += [_stage(case, engine, first=False, last=False)] if case.pipeline > 2 else []
    return max(stages) * factor + fixed * GIB


def _stage(case: Case, engine: Engine, first: bool, last: bool) -> float:
    """Bytes of a rank of the first stage, the last one, one between, or of all there is."""
    shape, blocks = case.shape, _blocks(case, engine, first, last)
    if engine.analytic:
        numbers = blocks * shape.block / case.tensor
        return (
            _states(case, engine, numbers, 0)
            + case.tokens * _kept(case, engine, case.recompute) * blocks * case.under_way
        )
    around = shape.table * (first + (last and not (shape.tied and first)))
    under_way = case.under_way if first else 1 if last else max(1, case.under_way - 1)
    kept, hidden = (
        _kept(case, engine, case.recompute),
        2 * shape.hidden / (case.tensor if case.sequence else 1),
    )
    flow = blocks * kept * under_way + (
        engine.buffers * hidden * under_way if case.pipeline > 1 else 0
    )
    logits = (
        shape.vocab
        / case.tensor
        * (engine.logits + (engine.sliced if case.tensor > 1 else 0))
        * last
    )
    if engine.joined:  # slices of 16 bits, and all of them joined
        logits = (
            shape.vocab * (engine.logits + (2 / case.tensor + 2 if case.tensor > 1 else 0)) * last
        )
    gradients = 2 * (2 * shape.ffn + shape.hidden) / case.tensor
    busy = max(0.0, _kept(case, engine, "none") - kept) + gradients
    numbers = (blocks * shape.block + around) / case.tensor
    states = _states(case, engine, numbers, around)
    return max(states + case.tokens * (flow + max(logits, busy)), _updating(case, engine, numbers))


def _updating(case: Case, engine: Engine, numbers: float) -> float:
    """Bytes of an optimizer's step by parts: activations are gone, and temporary copies of its part have come."""
    ways, zero = max(1, case.shard), max(case.zero, engine.zero)
    weights = engine.weights / (ways if zero == 3 else 1)
    return (
        numbers * (weights + (engine.optimizer + engine.stepping) / (ways if zero >= 1 else 1))
        if engine.stepping
        else 0.0
    )


def _blocks(case: Case, engine: Engine, first: bool, last: bool) -> float:
    shape = case.shape
    if case.pipeline == 1 or engine.stages == "blocks":
        return shape.layers / case.pipeline
    if engine.stages == "blocks and embeddings":
        return (shape.layers + 2) / case.pipeline - (first or last)
    return (
        ceil((shape.layers + shape.table / shape.block) / case.pipeline)
        if first
        else shape.layers / case.pipeline
    )


def _states(case: Case, engine: Engine, numbers: float, around: float) -> float:
    """Weights, gradients and the optimizer's, each over the ranks that its stage of ZeRO divides it by."""
    zero, ways = max(case.zero, engine.zero), max(1, case.shard)
    weights = engine.weights / (ways if zero == 3 else 1)
    whole = engine.accumulates and case.passes > 1
    gradients = engine.gradients / (ways if zero >= 2 and not whole else 1)
    held = numbers * (weights + gradients + engine.optimizer / (ways if zero >= 1 else 1))
    if not engine.gathered or zero < 3:
        return held
    if case.pipeline > 1:  # gathered, and gradients whole, for a whole step
        return held + numbers * (engine.gathered + engine.gradients)
    return (
        held
        + engine.gathered * (around + 2 * case.shape.block) / case.tensor
        + 4 * case.shape.block / case.tensor
    )


def _kept(case: Case, engine: Engine, recompute: str) -> float:
    """Bytes a token that a block keeps."""
    shape, part = case.shape, case.tensor
    between = part if case.sequence else 1  # of what lies between modules
    wide, keys = shape.hidden, 2 * shape.hidden * shape.kv_heads / shape.heads
    if recompute == "full":
        return 0 if engine.offloaded else 2 * wide / between
    scores = (
        (5 if engine.dropout else 4) * shape.heads * case.length / part
        if engine.scores and recompute == "none"
        else 0
    )
    if not shape.gated:  # Korthikanti et al., 4.1: 10 bytes between modules, 24 within; two of those are masks of dropout
        outside, within = 10 if engine.dropout else 8, 8 + 16 * shape.ffn / (4 * wide)
        return wide * (outside / between + within / part) + scores
    if recompute == "selective" and engine.halves:
        after = (
            0 if case.compiled else wide
        )  # what the block gives, which only running module by module keeps
        return 2 * (3 * wide + keys / 2 + shape.ffn + after) / between
    inside = (2 + engine.copies) * wide + keys + engine.parts * shape.ffn
    return (
        2 * (inside / part + 2 * wide / between + 2 * wide / (between if engine.regathers else 1))
        + scores
    )
