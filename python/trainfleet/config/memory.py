"""Predicts the memory that a rank needs on its device, using only the layout and the shapes. Tests
compare these formulas with torch.

It models what engine/ does (parallel/blocks.py shards, models/ keep for backward), not the best
that a device could do. A compiled block counts as much as its separate modules, even if it keeps
less. An estimate should rather be too high than too low.

No moment of a step needs all of this memory. For example, logits are freed before blocks have
gradients, and activations before the last gradients are summed. The prediction is the largest of
all moments that can be the peak (_moments).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import prod

from .activations import FULL, Flow, flow_of
from .families import FAMILIES
from .neuron_limits import is_xla
from .optimizers import OPTIMIZERS
from .precision import casts
from .sizes import ParameterCount, look_ups, parts_of
from .types import Config, Layout

FORMATS = {"fp32": 4, "bf16": 2}  # bytes per element
REDUCED = 4  # bytes per element while gradients are summed over ranks, in fp32
# with ZeRO 3: the current block and the next one, which is prefetched (Zhao et al. 2023, FSDP,
# 3.3.2)
GATHERED_BLOCKS = 2
# fp32 logits per piece of a loss in pieces: 8,192 tokens with a vocabulary of 32,000
LOGITS_BYTES = 1 << 30
ROUNDING = 10  # fp32 copies of a matrix that an uncompiled update in bf16 needs
# elements of matrices that are rounded, or orthogonalized, at once
ROUNDED, STRAIGHTENED = (1 << 26, 1 << 24)
# fp32 copies of the logits at the peak: log-softmax, its gradient and the logits' gradient
# (models/loss.py); tensor ranks need one more
LOSS = 3


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank at its peak, by purpose."""

    weights: int  # updated by the optimizer
    gradients: int
    moments: int  # the optimizer's state
    copies: int  # weights in the products' format, and weights gathered from other ranks
    activations: int  # kept for backward, and one block's working memory
    # logits and their gradients, or buffers for summing gradients over ranks, or an update's
    # working memory
    loss: int

    @property
    def total(self) -> int:
        return (
            self.weights
            + self.gradients
            + self.moments
            + self.copies
            + self.activations
            + self.loss
        )


@dataclass(frozen=True)
class StageNumbers:
    """A rank's part of a pipeline: parameters in its blocks and outside them, and the micro-batches
    in flight.
    """

    blocks: int
    block: int
    around: int
    under_way: float
    last: bool
    first: bool
    output: int = 0  # parameters in the output layer
    neighbours: int = 0  # stages that send hidden states or gradients to this rank's stages


def memory_of(config: Config, half: bool) -> Memory:
    """Returns the peak memory of the stage that needs the most; `half`: products are computed in
    bf16.
    """
    width = 2 if half else 4
    flow = flow_of(config, width)
    stages = [list(_moments(config, width, stage, flow)) for stage in _stages(config)]
    # XLA's compiler reorders a step, so all parts might peak at once
    if is_xla(config):
        stages = [[tuple(map(max, zip(*moments, strict=True)))] for moments in stages]
    return Memory(*max(chain.from_iterable(stages), key=sum))


def _stages(config: Config) -> list[StageNumbers]:
    model, layout, parts = config.model, config.train.parallelism, parts_of(config.model)

    def here(part: ParameterCount, whole: int = 0) -> int:
        return (part.matrices - whole) // layout.tensor + whole + part.vectors

    first, block, last = here(parts.first, look_ups(model)), here(parts.block), here(parts.last)
    output = model.vocab_size * model.hidden_size // layout.tensor
    if layout.pipeline == 1:
        return [StageNumbers(model.layers, block, first + last, 1, True, True, output)]
    again = first if model.tie_word_embeddings else 0  # the last stage has a copy of tied weights
    passes, end, both = passes_of(config), layout.pipeline - 1, 2 * layout.virtual_stages
    under_way = [min(_under_way(layout, rank), passes) for rank in range(layout.pipeline)]
    blocks = _blocks(model.layers, layout.pipeline, layout.virtual_stages)
    stages = [StageNumbers(blocks[0], block, first, under_way[0], False, True, neighbours=both - 1)]
    # the middle stages with the most micro-batches in flight, and with the most blocks
    for rank in {1, blocks.index(max(blocks[1:-1]), 1)} if end > 1 else ():
        stages.append(
            StageNumbers(blocks[rank], block, 0, under_way[rank], False, False, neighbours=both)
        )
    return [
        *stages,
        StageNumbers(
            blocks[end], block, last + again, under_way[end], True, False, output, both - 1
        ),
    ]


@cache
def _blocks(layers: int, pipeline: int, rounds: int) -> list[int]:
    """Returns the number of blocks in each rank's stages. Stages differ by at most one block
    (engine/parallel/pipeline.py, _bounds).
    """
    stages = pipeline * rounds
    sizes = [layers * (each + 1) // stages - layers * each // stages for each in range(stages)]
    return [sum(sizes[rank::pipeline]) for rank in range(pipeline)]


def _under_way(layout: Layout, rank: int) -> float:
    """Returns the peak number of micro-batches in flight on a rank. Their forward pass has run on
    the rank's blocks, but not their backward pass.

    With 1F1B on p ranks, the first rank has p, and each rank after it one less. With v interleaved
    stages per rank, the first has (p - 1) / v more (Narayanan et al. 2021, arXiv:2104.04473, 2.2).
    Each rank after it has two stages' worth less.
    """
    ranks, stages = layout.pipeline, layout.virtual_stages
    if stages == 1:
        return ranks - rank
    return (2 * (ranks - 1 - rank) + (stages - 1) * ranks + 1) / stages


def passes_of(config: Config) -> int:
    """Returns the number of micro-batches of a rank in a step."""
    return max(
        1,
        config.train.global_batch_size
        // max(1, config.data_parallel * config.train.micro_batch_size),
    )


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of a rank that do not depend on activations: weights, optimizer state, and gradients
    `before` and `after` the last pass.

    `gathered`: copies of all weights that are gathered at once. `block` and `around` are its parts
    for one block and for weights outside blocks. `reduced`: the buffer that sums a block's
    gradients over ranks. `replicated`: the same over replicas, which FSDP frees only at a step's
    end (torch 2.13, _fsdp_param_group.py). These are 0 without copies.
    """

    weights: int
    moments: int
    before: int
    after: int
    around: int
    block: int
    gathered: int
    reduced: int
    replicated: int

    def copies(self, blocks: int) -> int:
        """Returns the bytes of weight copies while this number of blocks is gathered, plus the
        weights outside blocks.
        """
        return min(self.gathered, self.around + blocks * self.block)


def _held(config: Config, width: int, stage: StageNumbers) -> HeldBytes:
    layout, several = config.train.parallelism, passes_of(config) > 1
    numbers, format_ = stage.blocks * stage.block + stage.around, FORMATS[config.train.param_dtype]
    # the state is also sharded over context ranks, which have the same weights
    # (engine/parallel/gradients.py)
    ranks = layout.fsdp * layout.context
    copied = _copied(config, width)
    # torch's pipelining frees weights and reduces gradients only at a step's last micro-batch
    # (torch 2.13, stage.py)
    whole = layout.zero_stage == 1 or layout.pipeline > 1
    after = REDUCED * numbers if whole and several and ranks > 1 else format_ * numbers // ranks
    after += 0 if copied else _looked_up(config, format_, stage)
    # if gradients are whole already, a block's sum reuses their memory
    summed = copied and (is_xla(config) or not (whole and several))
    # replicas add their sums to those of earlier passes
    replicas = layout.fsdp < config.data_parallel and several
    buckets = not copied and config.data_parallel > 1  # DDP's buckets; gradients are views of them
    # copies for products, kept during a whole pass
    cast = width * (stage.blocks * stage.block + stage.output) if casts(config) else 0
    all_ = width * numbers if copied else cast
    return HeldBytes(
        weights=format_ * numbers // ranks,
        moments=format_ * _moments_of(config, stage, numbers) // ranks,
        before=after if several or buckets else 0,
        after=after,
        around=all_ if whole or cast else width * stage.around * copied,
        block=width * stage.block * copied,
        gathered=all_,
        reduced=REDUCED * stage.block * summed,
        replicated=REDUCED * stage.block // ranks * (summed and replicas),
    )


def _copied(config: Config, width: int) -> bool:
    """Returns whether FSDP copies weights for the products, because it gathers or casts them. DDP
    keeps no copies.
    """
    layout, format_ = config.train.parallelism, FORMATS[config.train.param_dtype]
    parted = layout.tensor * layout.pipeline > 1  # FSDP then handles replicas too
    replicas = config.data_parallel > 1 and (width != 4 or parted)
    return layout.fsdp * layout.context > 1 or (
        (width != format_ or replicas) and not casts(config)
    )


def _looked_up(config: Config, width: int, stage: StageNumbers) -> int:
    """Returns the bytes of an embedding's gradient beyond a tensor rank's part. DTensor computes
    the whole gradient and takes a view (torch 2.13).
    """
    part = config.train.parallelism.tensor
    whole = width * config.model.vocab_size * config.model.hidden_size
    return whole - whole // part if stage.first and not is_xla(config) else 0


def _moments(
    config: Config, width: int, stage: StageNumbers, flow: Flow
) -> Iterator[tuple[int, ...]]:
    """Yields the fields of `Memory` at each moment that may be the peak of a step. These are the
    loss, blocks' backward passes, their end, and the update.
    """
    held = _held(config, width, stage)
    kept = stage.under_way * stage.blocks * flow.kept + _exchanged(config, stage) * flow.hidden
    busy, part = flow.again + flow.work, config.train.parallelism.tensor
    matrix = config.model.hidden_size * config.model.intermediate_size // part
    # the output layer's gradient is kept until a pass ends, and a block's first one until the block
    # has all its gradients
    waiting = width * (stage.output + matrix) if held.reduced else 0

    def memory(gradients: int, blocks: int, activations: float, reducing: float) -> tuple[int, ...]:
        return (
            held.weights,
            gradients,
            held.moments,
            held.copies(blocks),
            int(activations),
            int(reducing),
        )

    if stage.last:
        yield memory(held.before, 1, kept + flow.entering, _loss(config, width, flow))
    yield memory(held.before, GATHERED_BLOCKS, kept + busy, waiting)
    waiting += held.reduced
    yield memory(held.before, GATHERED_BLOCKS, kept - flow.kept + busy, waiting + held.replicated)
    others = stage.blocks - 1
    yield memory(
        held.after,
        GATHERED_BLOCKS,
        kept - others * flow.kept + busy,
        waiting + others * held.replicated,
    )
    if held.reduced:
        around = (width + REDUCED) * stage.around + _looked_up(config, width, stage) + held.reduced
        yield memory(
            held.after,
            1,
            kept - stage.blocks * flow.kept + 2 * flow.hidden,
            around + stage.blocks * held.replicated,
        )
    yield held.weights, held.weights, held.moments, 0, 0, _updating(config, stage)


def _moments_of(config: Config, stage: StageNumbers, numbers: int) -> int:
    """Returns the number of elements in the optimizer's moments."""
    matrices = (
        stage.blocks * parts_of(config.model).block.matrices // config.train.parallelism.tensor
    )
    return OPTIMIZERS[config.train.optimizer].numbers(matrices, numbers - matrices)


def _updating(config: Config, stage: StageNumbers) -> int:
    """Returns the bytes of working memory of an optimizer step, in addition to its state
    (engine/optimizers.py).
    """
    model, train, layout = config.model, config.train, config.train.parallelism
    shape = (model.hidden_size, model.intermediate_size)
    if OPTIMIZERS[train.optimizer].orthogonal:
        alike = (3 if FAMILIES[model.family].rotary else 2) * stage.blocks
        together = min(alike, max(1, STRAIGHTENED // prod(shape)))
        return 4 * together * (3 * prod(shape) + 2 * min(shape) ** 2)
    if train.param_dtype == "bf16" and not train.compile:
        largest = max(prod(shape), model.hidden_size * model.vocab_size) // (
            layout.tensor * layout.fsdp * layout.context
        )
        return ROUNDING * 4 * min(ROUNDED, largest)
    return 0


def _loss(config: Config, width: int, flow: Flow) -> float:
    """Returns the peak bytes of the loss. These are logits and their gradients, or later the
    gradients of logits, output layer and hidden states.
    """
    family, train, model = FAMILIES[config.model.family], config.train, config.model
    guessed = (
        train.micro_batch_size * family.guesses(train.sequence_length) / train.parallelism.context
    )
    logits = 4 * guessed * model.vocab_size / train.parallelism.tensor
    layer = width * model.vocab_size * model.hidden_size / train.parallelism.tensor
    if family.causal and train.parallelism.tensor == 1 and logits > LOGITS_BYTES:
        return _pieces(config, width, flow)
    copies = LOSS if train.parallelism.tensor == 1 else LOSS + 1
    return max(copies * logits, logits + layer + flow.gradient)


def _pieces(config: Config, width: int, flow: Flow) -> float:
    """Returns the peak bytes of a loss in pieces (models/loss.py, Pieces). These are one piece's
    logits, in fp32 and for products, and both gradients.

    After the last piece, both gradients exist twice: as computed, and as passed to backward.
    """
    numbers = config.model.vocab_size * config.model.hidden_size
    logits = LOGITS_BYTES * (1 + (width / FULL if width < FULL else 0))
    layer, product = width, 0
    if casts(
        config
        # a piece's product is cast, but its sum is not, so a CPU first copies the product into
        # the sum's format
    ):
        layer, product = FULL, width + FULL
    return (
        max(logits + (layer + product) * numbers, 2 * layer * numbers + flow.gradient)
        + flow.gradient
    )


def _exchanged(config: Config, stage: StageNumbers) -> float:
    """Returns how many copies of a micro-batch's hidden states, or of their gradients, stages keep
    for sending and receiving.

    torch.distributed.pipelining allocates a buffer for each tensor that a stage receives in a step.
    The interleaved schedule frees sent tensors only at the step's end (torch 2.13, schedules.py).
    1F1B keeps the outputs of micro-batches in flight.
    """
    layout, received = config.train.parallelism, stage.neighbours * passes_of(config)
    if not received:
        return 0
    return received + (received if layout.virtual_stages > 1 else stage.under_way)
