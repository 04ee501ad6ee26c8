"""What Trainium's two stacks can't do, as rules between keys: each with what would work.

`neuron-xla` is PyTorch/XLA with NxD Core, all that Trn1 has (SDK 2.31 is its last); `neuron` is native PyTorch, for Trn2 and Trn3
alone (awsdocs-neuron.readthedocs-hosted.com: v2.31.0 and v2.33.0, release notes, 2026-07-07 and 2026-10-19).
"""

from __future__ import annotations

from collections.abc import Iterator

from .. import hardware
from .types import Config

XLA = "neuron-xla"
GENERATIONS = {"neuron": ("trn2", "trn2u", "trn3"), XLA: ("trn1", "trn1n")}  # families that a stack is made for
FAMILIES = ("llama", "gpt2", "bert", "roberta")  # whose plans engine/parallel realises with NxD Core's layers
RANKS = (1, 2, 8, 32)  # of a trn1 node, whose collectives run on these numbers of cores alone (optimum-neuron issue 761)
LENGTHS = 128  # a NeuronCore's partitions: attention's kernels take sequences in tiles of so many tokens


def is_xla(config: Config) -> bool:
    return config.fleet.stack == XLA


def copies(config: Config) -> dict[int, int]:
    """Tensor degrees above the number of key-value heads that work -> on how many ranks each head is (kv_size_multiplier)."""
    model = config.model
    if not is_xla(config) or model.family != "llama":
        return {}
    degrees = range(2 * model.kv_heads, model.heads + 1, model.kv_heads)
    return {degree: degree // model.kv_heads for degree in degrees if model.heads % degree == 0}


def copies_heads(config: Config) -> bool:
    """Whether tensor ranks outnumber the key-value heads, so that several have the same one."""
    return config.train.layout.tensor in copies(config)


def check_node(config: Config) -> Iterator[tuple[str, str]]:
    """What a type of node has against the stack, the ranks and the sequence length."""
    fleet, row = config.fleet, config.fleet.node_type
    if row is None or row.accelerator is None or row.accelerator.kind != "neuron" or fleet.stack == "cpu":
        return
    family = row.name.partition(".")[0]
    if fleet.stack in GENERATIONS and family not in GENERATIONS[fleet.stack]:
        has = "PyTorch/XLA alone" if hardware.stack_of(row) == XLA else "native PyTorch alone"
        yield "fleet.stack", f"{fleet.stack}: {family} trains by {has}; {hardware.stack_of(row)} works"
    fit = [ranks for ranks in RANKS if ranks <= row.accelerators]
    if family in GENERATIONS[XLA] and fleet.ranks_per_node not in fit:
        fits = ", ".join(map(str, fit))
        yield "fleet.ranks_per_node", f"{fleet.ranks_per_node}: the collectives of a {row.name} run on {fits} cores"
    if config.train.sequence_length % LENGTHS:
        below = config.train.sequence_length // LENGTHS * LENGTHS
        near = ", ".join(str(length) for length in (below, below + LENGTHS) if 0 < length <= config.model.max_sequence_length)
        yield (
            "train.sequence_length",
            f"{config.train.sequence_length}: Trainium's kernels take multiples of {LENGTHS}; {near} work",
        )


def check_layout(config: Config) -> Iterator[tuple[str, str]]:
    """Layouts that NxD Core lacks, or that are not built on it."""
    train, layout, ways = config.train, config.train.layout, config.data_parallel
    if not is_xla(config):
        return
    if layout.shard not in (1, ways):
        yield "train.layout.shard", f"{layout.shard}: NxD Core shards over all {ways} data-parallel ranks or none; 1, {ways} work"
    if layout.shard > 1 and layout.zero != 1:
        yield "train.layout.zero", f"{layout.zero}: NxD Core shards the optimizer's state alone; 1 works"
    for name in ("context", "interleave"):
        if (degree := getattr(layout, name)) > 1:
            yield f"train.layout.{name}", f"{degree}: not with stack {XLA}; 1 works"
    if train.recompute not in ("none", "full"):
        yield "train.recompute", f"{train.recompute}: NxD Core recomputes whole blocks; full works, or none"
    if train.optimizer == "lamb" and (layout.shard > 1 or layout.tensor > 1):
        yield (
            "train.optimizer",
            "lamb: needs the norm of whole matrices, so train.layout.shard 1 and train.layout.tensor 1; adamw works",
        )


def check_training(config: Config) -> Iterator[tuple[str, str]]:
    """What a step can't be where PyTorch/XLA runs it as one program, and NxD's optimizer makes it."""
    train = config.train
    if not is_xla(config):
        return
    if config.model.family not in FAMILIES:
        yield "model.family", f"{config.model.family}: not built on NxD Core; {', '.join(FAMILIES)} are"
    if train.spike_sigmas:
        yield "train.spike_sigmas", f"{train.spike_sigmas:g}: NxD's optimizer can't leave a step out; 0 works"
    if train.optimizer == "muon":
        yield "train.optimizer", f"muon: not with stack {XLA}; adamw works"
    if train.weights == "bf16":
        yield "train.weights", f"bf16: not with stack {XLA}; fp32 works, of which ZeRO 1 keeps the only copy"
    if train.precision == "fp8":
        yield "train.precision", "fp8: not on Trainium; bf16 works"
    if train.compile:
        yield "train.compile", "true: PyTorch/XLA compiles every step anyway; false works"
    if train.search_micro_batch:
        yield "train.search_micro_batch", f"true: every size would be compiled, for up to an hour; false works with stack {XLA}"
