"""Predicts a rank's peak device memory from the layout and the model shape.

The formulas model what engine/ actually does (sharding in parallel/blocks.py, activations that
models/ saves for the backward pass), not the theoretical minimum. They err on the high side: a
compiled block counts as much as its separate modules, even if it saves less. Tests compare them
with torch.

Not all of this memory is in use at once. For example, logits are freed before the blocks' gradients
are computed, and activations before the last gradients are reduced. The prediction is therefore the
maximum over all candidate peaks of a step (_moments).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import prod

from .activations import FULL, Flow, flow_of
from .families import FAMILIES
from .limits import casts, is_xla
from .optimizers import OPTIMIZERS
from .sizes import look_ups, parts_of
from .types import Config, Layout, Model

FORMATS = {"fp32": 4, "bf16": 2}  # bytes per element
REDUCED = 4  # bytes per element while gradients are reduced across ranks, in fp32
# With ZeRO 3, the current block and the prefetched one (Zhao et al. 2023, FSDP, 3.3.2).
GATHERED_BLOCKS = 2
# fp32 logits per chunk of a chunked loss: 8,192 tokens with a vocabulary of 32,000.
LOGITS_BYTES = 1 << 30
ROUNDING = 10  # fp32 temporaries per matrix in an uncompiled bf16 update
# Maximum matrix elements per batch when rounding and when orthogonalizing.
ROUNDED, STRAIGHTENED = (1 << 26, 1 << 24)
# fp32 tensors of the logits' size at the peak: log-softmax, its gradient and the logits' gradient
# (models/loss.py). Tensor parallelism needs one more.
LOSS = 3


@dataclass(frozen=True)
class Memory:
    """Peak memory of the fullest rank, in bytes, by purpose."""

    weights: int  # master weights, which the optimizer updates
    gradients: int
    moments: int  # optimizer state
    copies: int  # weights cast for matmuls or gathered from other ranks
    activations: int  # activations saved for backward, and one block's working memory
    # logits and their gradients, gradient reduction buffers, or the optimizer's working memory
    loss: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class StageNumbers:
    """A rank's pipeline stages.

    Attributes:
        blocks: Number of blocks on the rank.
        block: Parameters per block.
        around: Parameters outside blocks.
        under_way: Peak number of micro-batches in flight.
    """

    blocks: int
    block: int
    around: int
    under_way: float
    last: bool
    first: bool
    output: int = 0  # parameters of the output layer
    neighbours: int = 0  # stages that send hidden states or gradients to this rank


def memory_of(config: Config, half: bool) -> Memory:
    """Returns the peak memory of the fullest rank. `half` means that matmuls run in bf16."""
    width = 2 if half else 4
    flow = flow_of(config, width)
    parts = _stages(config.model, config.train.parallelism, passes_of(config))
    stages = [list(_moments(config, width, stage, flow)) for stage in parts]
    # XLA may reorder a step, so all parts are assumed to peak at once.
    if is_xla(config):
        stages = [[tuple(map(max, zip(*moments, strict=True)))] for moments in stages]
    return Memory(*max(chain.from_iterable(stages), key=sum))


@cache
def _stages(model: Model, layout: Layout, passes: int) -> list[StageNumbers]:
    parts = parts_of(model)
    ranks, end = layout.tensor, layout.pipeline - 1
    first, block = parts.first.on_rank(ranks, look_ups(model)), parts.block.on_rank(ranks)
    # With several stages, the last one has its own copy of tied weights.
    again = first if end == 0 or model.tie_word_embeddings else 0
    around = {0: first, end: parts.last.on_rank(ranks) + again}
    blocks = _blocks(model.layers, end + 1, layout.virtual_stages)
    # the middle ranks with the most micro-batches in flight and with the most blocks
    middle = {1, blocks.index(max(blocks[1:-1]), 1)} if end > 1 else ()
    return [
        StageNumbers(
            blocks[rank],
            block,
            around.get(rank, 0),
            min(_under_way(layout, rank), passes),
            rank == end,
            rank == 0,
            model.vocab_size * model.hidden_size // ranks * (rank == end),
            (2 * layout.virtual_stages - (rank in around)) * (end > 0),
        )
        for rank in dict.fromkeys((0, *middle, end))
    ]


@cache
def _blocks(layers: int, pipeline: int, rounds: int) -> list[int]:
    """Returns the number of blocks per rank.

    Stages differ by at most one block (engine/parallel/pipeline.py, _bounds).
    """
    stages = pipeline * rounds
    sizes = [layers * (each + 1) // stages - layers * each // stages for each in range(stages)]
    return [sum(sizes[rank::pipeline]) for rank in range(pipeline)]


def _under_way(layout: Layout, rank: int) -> float:
    """Returns the peak number of micro-batches in flight on a rank.

    A micro-batch is in flight between its forward and backward pass. It counts as a fraction if it
    is in flight on only some of the rank's stages.

    With 1F1B on p ranks, the first rank has p micro-batches in flight, and each later rank one
    fewer. With v interleaved stages per rank, the first rank has (p - 1) / v more (Narayanan et al.
    2021, arXiv:2104.04473, 2.2), and each later rank 2 / v fewer.
    """
    ranks, stages = layout.pipeline, layout.virtual_stages
    if stages == 1:
        return ranks - rank
    return (2 * (ranks - 1 - rank) + (stages - 1) * ranks + 1) / stages


def passes_of(config: Config) -> int:
    """Returns the number of micro-batches per step on each rank."""
    return max(
        1,
        config.train.global_batch_size
        // max(1, config.data_parallel * config.train.micro_batch_size),
    )


@dataclass(frozen=True)
class HeldBytes:
    """A rank's memory other than activations, in bytes.

    `block`, `reduced` and `replicated` are 0 if FSDP does not copy the weights.

    Attributes:
        weights: Weights that the optimizer updates.
        moments: Optimizer state.
        before: Gradients before the last micro-batch.
        after: Gradients after the last micro-batch.
        around: Part of `gathered` for weights outside blocks.
        block: Part of `gathered` for one block.
        gathered: Size of the weight copies if all weights are gathered at once.
        reduced: Buffer for reducing a block's gradients across ranks.
        replicated: Buffer for reducing a block's gradients across replicas. FSDP frees it only at
            the end of a step (torch 2.13, _fsdp_param_group.py).
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
        """Returns the size of the weight copies while `blocks` blocks are gathered, in bytes.

        Includes the weights outside blocks.
        """
        return min(self.gathered, self.around + blocks * self.block)


def _held(config: Config, width: int, stage: StageNumbers) -> HeldBytes:
    layout, several = config.train.parallelism, passes_of(config) > 1
    numbers, format_ = stage.blocks * stage.block + stage.around, FORMATS[config.train.param_dtype]
    # Context ranks share their weights, so the state is also sharded across them
    # (engine/parallel/gradients.py).
    ranks, copied = layout.fsdp * layout.context, _copied(config, width)
    whole = _is_whole(layout)
    # Unsharded gradients are reduced in place, without a buffer.
    summed = copied and (is_xla(config) or not (whole and several))
    replicas = summed and _are_replicated(config)
    cast = _cast(config, width, stage)
    all_ = width * numbers if copied else cast
    before, after = _gradients(config, stage, numbers, copied)
    if replicas and not is_xla(config):
        before = REDUCED * numbers // ranks  # the sum over micro-batches
        replicas = format_ != REDUCED  # fp32 gradients are views of the buffer
    width *= copied
    return HeldBytes(
        weights=format_ * numbers // ranks,
        moments=format_ * _moments_of(config, stage, numbers) // ranks,
        before=before,
        after=after,
        around=all_ if whole or cast else width * stage.around,
        block=width * stage.block,
        gathered=all_,
        reduced=REDUCED * stage.block * summed,
        replicated=REDUCED * stage.block // ranks * replicas,
    )


def _cast(config: Config, width: int, stage: StageNumbers) -> int:
    """Returns the size of the matmul weights' cast copies, kept until the pass ends, in bytes."""
    return width * (stage.blocks * stage.block + stage.output) * casts(config)


def _are_replicated(config: Config) -> bool:
    """Returns whether replicas of a rank sum their gradients over several micro-batches."""
    return config.train.parallelism.fsdp < config.data_parallel and passes_of(config) > 1


def _is_whole(layout: Layout) -> bool:
    """Returns whether weights stay gathered and gradients unreduced until a step's last
    micro-batch, as in torch's pipelining (torch 2.13, stage.py).
    """
    return layout.zero_stage == 1 or layout.pipeline > 1


def _gradients(config: Config, stage: StageNumbers, numbers: int, copied: bool) -> tuple[int, int]:
    """Returns the size of gradients before and after the last micro-batch, in bytes."""
    layout, several = config.train.parallelism, passes_of(config) > 1
    ranks, format_ = layout.fsdp * layout.context, FORMATS[config.train.param_dtype]
    after = format_ * numbers // ranks
    if several and ranks > 1 and _is_whole(layout):
        after = REDUCED * numbers
    after += 0 if copied else _looked_up(config, format_, stage)
    buckets = not copied and config.data_parallel > 1  # DDP's buckets; gradients are views of them
    return after if several or buckets else 0, after


def _copied(config: Config, width: int) -> bool:
    """Returns whether FSDP copies weights to gather or cast them. DDP never copies them."""
    layout, format_ = config.train.parallelism, FORMATS[config.train.param_dtype]
    parted = layout.tensor * layout.pipeline > 1  # FSDP then replaces DDP
    replicas = config.data_parallel > 1 and (width != 4 or parted)
    return layout.fsdp * layout.context > 1 or (
        (width != format_ or replicas) and not casts(config)
    )


def _looked_up(config: Config, width: int, stage: StageNumbers) -> int:
    """Returns the size of an embedding's gradient beyond the tensor rank's shard, in bytes.

    DTensor computes the whole gradient, and the shard is a view of it (torch 2.13).
    """
    part = config.train.parallelism.tensor
    whole = width * config.model.vocab_size * config.model.hidden_size
    return whole - whole // part if stage.first and not is_xla(config) else 0


def _moments(
    config: Config, width: int, stage: StageNumbers, flow: Flow
) -> Iterator[tuple[int, ...]]:
    """Yields the fields of `Memory` at each candidate peak of a step.

    Candidates are the loss, the blocks' backward passes, the end of backward, and the update.
    """
    held, model = _held(config, width, stage), config.model
    matrix = model.hidden_size * model.intermediate_size // config.train.parallelism.tensor
    # The output layer's gradient is held until the pass ends, and a block's first gradient until
    # all of the block's gradients are computed.
    waiting = width * (stage.output + matrix) if held.reduced else 0
    for gradients, blocks, kept, buffers in _passes(config, width, stage, flow, held, waiting):
        copies = held.copies(blocks)
        yield held.weights, gradients, held.moments, copies, int(kept), int(buffers)
    yield held.weights, held.weights, held.moments, 0, 0, _updating(config, stage)


# gradient bytes, number of gathered blocks, activation bytes, bytes of other buffers
Moment = tuple[int, int, float, float]


def _passes(
    config: Config, width: int, stage: StageNumbers, flow: Flow, held: HeldBytes, waiting: int
) -> Iterator[Moment]:
    """Yields the candidate peaks before the update. `waiting`: bytes of gradients held longer."""
    kept = stage.under_way * stage.blocks * flow.kept + _exchanged(config, stage) * flow.hidden
    busy = flow.again + flow.work
    if stage.last:
        yield held.before, 1, kept + flow.entering, _loss(config, width, flow)
    yield held.before, GATHERED_BLOCKS, kept + busy, waiting
    waiting += held.reduced
    yield held.before, GATHERED_BLOCKS, kept - flow.kept + busy, waiting + held.replicated
    others = stage.blocks - 1
    last = kept - others * flow.kept + busy
    yield held.after, GATHERED_BLOCKS, last, waiting + others * held.replicated
    if held.reduced:
        around = (width + REDUCED) * stage.around + _looked_up(config, width, stage)
        around += held.reduced + stage.blocks * held.replicated
        yield held.after, 1, kept - stage.blocks * flow.kept + 2 * flow.hidden, around


def _moments_of(config: Config, stage: StageNumbers, numbers: int) -> int:
    """Returns the number of elements in the optimizer's moments."""
    matrices = (
        stage.blocks * parts_of(config.model).block.matrices // config.train.parallelism.tensor
    )
    return OPTIMIZERS[config.train.optimizer].numbers(matrices, numbers - matrices)


def _updating(config: Config, stage: StageNumbers) -> int:
    """Returns the working memory of an optimizer step, in bytes (engine/optimizers.py)."""
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
    """Returns the peak memory of the loss in bytes.

    The peak is either the logits and their gradients, or the gradients of the logits, output layer
    and hidden states.
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
    """Returns the peak memory of a chunked loss in bytes (models/loss.py, Pieces).

    It consists of one chunk's logits, in fp32 and in the matmul dtype, and the gradients of the
    output layer and hidden states. After the last chunk, both gradients exist twice: as computed,
    and as passed to backward.
    """
    numbers = config.model.vocab_size * config.model.hidden_size
    logits = LOGITS_BYTES * (1 + (width / FULL if width < FULL else 0))
    # Each chunk's matmul is cast, but the sum over chunks is not, so a CPU first copies the result
    # to the sum's dtype.
    layer, product = (FULL, width + FULL) if casts(config) else (width, 0)
    return (
        max(logits + (layer + product) * numbers, 2 * layer * numbers + flow.gradient)
        + flow.gradient
    )


def _exchanged(config: Config, stage: StageNumbers) -> float:
    """Returns the number of hidden-state buffers that stages hold for sending and receiving.

    torch.distributed.pipelining allocates one buffer per tensor that a stage receives in a step.
    The interleaved schedule frees sent tensors only at the end of the step (torch 2.13,
    schedules.py). 1F1B holds only the outputs of micro-batches in flight.
    """
    layout, received = config.train.parallelism, stage.neighbours * passes_of(config)
    if not received:
        return 0
    return received + (received if layout.virtual_stages > 1 else stage.under_way)
