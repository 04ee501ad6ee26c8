"""What a rank needs of its device's memory, from the layout and the shapes alone: arithmetic, which tests compare with torch.

Counted is what engine/ does (parallel/blocks.py shards, models/ keep for backward), not what a device could do at best. Where a
compiled block keeps less than its modules one by one, it is the latter that counts: an estimate errs on the side that fits.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from .families import FAMILIES
from .sizes import Numbers, parts_of
from .types import Config, Layout

FORMATS = {"fp32": 4, "bf16": 2}  # bytes of a number
REDUCED = 4  # bytes of a number while gradients are summed over ranks, which is done in fp32
GATHERED_BLOCKS = 2  # with ZeRO 3: the block that computes, and the next one, gathered ahead (Zhao et al. 2023, FSDP, 3.3.2)
LOGITS_BYTES = 1 << 30  # of fp32 logits at once, where they come in pieces: 8,192 tokens of a vocabulary of 32,000
LOSS = 3  # fp32 copies of the logits at the peak: their log-softmax, its gradient, and that of the logits (models/loss.py)


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank at its fullest moment, by what they hold."""

    weights: int  # that the optimizer works on
    gradients: int
    moments: int  # the optimizer's state
    copies: int  # of weights in the format of the products, and gathered from other ranks
    activations: int  # kept from forward for backward, and what one block works with
    loss: int  # logits and their gradients; or what gradients are reduced in, where that is more

    @property
    def total(self) -> int:
        return sum(astuple(self))


@dataclass(frozen=True)
class Stage:
    """What a rank of a pipeline has: numbers in blocks and around them, and the micro-batches that are under way at once."""

    blocks: int
    block: int
    around: int
    under_way: float
    last: bool
    neighbours: int = 0  # stages that its own ones receive from, hidden states or their gradients


def memory_of(config: Config, half: bool) -> Memory:
    """The memory of the stage that needs most; `half`: products are computed in bf16."""
    return max((_memory(config, half, stage) for stage in _stages(config)), key=lambda memory: memory.total)


def _stages(config: Config) -> list[Stage]:
    model, layout, parts = config.model, config.train.layout, parts_of(config.model)

    def here(part: Numbers) -> int:
        return part.matrices // layout.tensor + part.vectors

    first, block, last = here(parts.first), here(parts.block), here(parts.last)
    if layout.pipeline == 1:
        return [Stage(model.layers, block, first + last, 1, last=True)]
    blocks, both = -(-model.layers // layout.pipeline), 2 * layout.interleave
    again = first if model.tie_embeddings else 0  # the last stage has tied weights too
    passes, end = passes_of(config), layout.pipeline - 1
    stages = [Stage(blocks, block, first, min(_under_way(layout, 0), passes), last=False, neighbours=both - 1)]
    if layout.pipeline > 2:
        stages.append(Stage(blocks, block, 0, min(_under_way(layout, 1), passes), last=False, neighbours=both))
    return [*stages, Stage(blocks, block, last + again, min(_under_way(layout, end), passes), last=True, neighbours=both - 1)]


def _under_way(layout: Layout, rank: int) -> float:
    """Micro-batches whose forward pass has run on a rank's blocks and whose backward pass has not, at most.

    With 1F1B p on the first rank, one less on each after it. Interleaved, with v stages a rank, (p - 1) / v more on the first
    (Narayanan et al. 2021, arXiv:2104.04473, 2.2), and two stages' worth less on each after it.
    """
    ranks, stages = layout.pipeline, layout.interleave
    if stages == 1:
        return ranks - rank
    return (2 * (ranks - 1 - rank) + (stages - 1) * ranks + 1) / stages


def passes_of(config: Config) -> int:
    """Micro-batches of a rank in a step."""
    return max(1, config.train.global_batch // max(1, config.data_parallel * config.train.micro_batch))


def _memory(config: Config, half: bool, stage: Stage) -> Memory:
    layout = config.train.layout
    numbers, width, format = stage.blocks * stage.block + stage.around, 2 if half else 4, FORMATS[config.train.weights]
    ranks = layout.shard * layout.context  # context ranks have the same weights, and share them (engine/parallel/mesh.py)
    parted = layout.tensor * layout.pipeline > 1  # whose replicas are FSDP's too; DDP, for the others, keeps no other copy
    copied = ranks > 1 or width != format or (config.data_parallel > 1 and (half or parted))
    # torch's pipelining frees no weights and reduces no gradients before a step's last micro-batch (torch 2.13, stage.py)
    whole = layout.zero == 1 or layout.pipeline > 1
    gathered = numbers if whole else min(numbers, stage.around + GATHERED_BLOCKS * stage.block)
    summed = whole and passes_of(config) > 1 and ranks > 1  # between micro-batches gradients stay whole
    most = max(stage.around, stage.block)  # the weights whose gradients are reduced at once
    reducing = width * (stage.around + stage.block) + REDUCED * (most + (most // ranks if parted else 0)) if copied else 0
    return Memory(
        weights=format * numbers // ranks,
        gradients=REDUCED * numbers if summed else format * numbers // ranks,
        moments=format * _moments(config, stage, numbers) // ranks,
        copies=width * gathered if copied else 0,
        activations=int(_activations(config, width, stage)),
        loss=max(reducing, int(_loss(config)) if stage.last else 0),
    )


def _moments(config: Config, stage: Stage, numbers: int) -> int:
    """How many: two of each number; Muon keeps one of those in the blocks' matrices."""
    straight = stage.blocks * parts_of(config.model).block.matrices // config.train.layout.tensor
    return 2 * numbers - (straight if config.train.optimizer == "muon" else 0)


def _loss(config: Config) -> float:
    family, train = FAMILIES[config.model.family], config.train
    guessed = train.micro_batch * family.guesses(train.sequence_length) / train.layout.context
    logits = 4 * guessed * config.model.vocabulary_size / train.layout.tensor
    return LOSS * (min(logits, LOGITS_BYTES) if family.causal and train.layout.tensor == 1 else logits)  # models/loss.py


def _activations(config: Config, width: int, stage: Stage) -> float:
    train = config.train
    tokens = train.micro_batch * train.sequence_length / train.layout.context
    kept, whole = width * _kept(config, train.recompute), width * _kept(config, "none")
    if FAMILIES[config.model.family].dropout and config.model.dropout and train.recompute == "none":
        kept += 2 * config.model.hidden_size  # masks, a byte a number
    wide, part = config.model.hidden_size, train.layout.tensor
    working = 2 * (wide + config.model.intermediate_size / part) * width  # gradients within; those of the hidden states are whole
    head = wide * width if stage.last and part > 1 else 0  # what the last product works on, gathered
    again = max(0, whole - kept)  # what one block computes once more
    return tokens * (stage.under_way * stage.blocks * kept + _exchanged(config, stage) * width + working + head + again)


def _exchanged(config: Config, stage: Stage) -> float:
    """Numbers a token of the hidden states, and their gradients, that stages keep because they pass them on.

    torch.distributed.pipelining has a buffer for whatever a stage receives in a step, and interleaved it lets go of what was sent
    at the step's end alone (torch 2.13, schedules.py); 1F1B keeps the outputs of micro-batches under way.
    """
    layout, received = config.train.layout, stage.neighbours * passes_of(config)
    if not received:
        return 0
    sent = received if layout.interleave > 1 else stage.under_way
    return (received + sent) * config.model.hidden_size / layout.tensor


def _kept(config: Config, recompute: str | float) -> float:
    """Numbers a token that a block keeps for its backward pass: the inputs of its matrix products, norms and products.

    Counted as Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1) do, of our modules. Between modules a tensor rank has a
    part of the sequence; what enters attention and feed-forward is whole, as it is kept after it was gathered.
    """
    if not isinstance(recompute, str):  # a part of what there is beyond the block's input
        least, most = _kept(config, "full"), _kept(config, "none")
        return least + recompute * (most - least)
    model, layout, rotary = config.model, config.train.layout, FAMILIES[config.model.family].rotary
    wide, inner, part = model.hidden_size, model.intermediate_size, layout.tensor
    keys = 2 * model.kv_heads * model.head_features * layout.context  # and values, of the whole sequence
    if recompute == "full":
        return wide / part  # the block's input
    if recompute == "selective":  # what matrix products and attention made, and the block's input
        return (3 * wide + keys + (2 if rotary else 1) * inner) / part + 2 * wide
    # the inputs of both norms, query, attention; key, value; SwiGLU's four or the two of a plain one; then both modules' inputs
    return (4 * wide + keys + (4 if rotary else 2) * inner) / part + 2 * wide
