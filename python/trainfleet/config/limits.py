"""Hardware limits: matmul dtypes, usable device memory and the two Trainium platforms, with the
config rules for them. Each message suggests a value that works.

`neuron-xla` is PyTorch/XLA with NxD Core, the only platform for Trn1 (last release: SDK 2.31).
`neuron` is native PyTorch, for Trn2 and Trn3 only (awsdocs-neuron.readthedocs-hosted.com: v2.31.0
and v2.33.0, release notes, 2026-07-07 and 2026-10-19).
"""

from __future__ import annotations

from ..hardware import cpu_speed, node_types
from ..hardware.accelerators import Accelerator
from .families import FAMILIES
from .optimizers import OPTIMIZERS, USUAL
from .types import Config, Refusals

# Usable fraction of device memory. The rest is left for the driver, NCCL buffers and fragmentation
# (tests/bench/accounts.py).
USABLE = 0.9


def usable_bytes(device: Accelerator) -> float:
    return USABLE * device.memory_gib * 2**30


def format_of(config: Config) -> str:
    """Returns the matmul dtype: fp8, bf16, fp16 or fp32.

    For `auto` on CPUs, assumes this machine's CPU, although each rank decides for its own.
    """
    if config.train.precision != "auto":
        return config.train.precision
    if config.fleet.on_local_cpus:
        return "bf16" if cpu_speed.of_this_machine().half else "fp32"
    device = config.fleet.rank_device
    return "fp32" if device is None else device.half


def is_half(config: Config) -> bool:
    """Returns whether activations take two bytes per element. fp8 applies only to matmuls."""
    return format_of(config) != "fp32"


def by_parts(config: Config) -> bool:
    """Returns whether norms and dropout run unfused and save intermediates, as in torch 2.13 on
    CPUs.
    """
    return config.fleet.on_local_cpus and not config.train.compile


def casts(config: Config) -> bool:
    """Returns whether every matmul casts its inputs, as in unsharded models on CPUs
    (engine/parallel/__init__.py).
    """
    layout, train = config.train.parallelism, config.train
    divided = layout.fsdp * layout.tensor * layout.pipeline * layout.context > 1
    plain = not divided and train.param_dtype == "fp32" and format_of(config) in ("bf16", "fp16")
    return plain and config.fleet.on_local_cpus


def check_budget(config: Config) -> Refusals:
    """Rejects an activation memory budget that other settings don't support.

    A budget requires selective checkpointing, compiled blocks and no tensor parallelism.
    """
    train, key = config.train, "train.activation_memory_budget"
    budget, tensor = train.activation_memory_budget, train.parallelism.tensor
    if budget is None:
        return
    if train.activation_checkpointing != "selective":
        why = "a budget needs selective checkpointing"
        then = "use null, or SET='train.activation_checkpointing=selective'"
        yield key, f"{budget}: {why}; {then}"
    elif not train.compile:
        why = "a budget needs compiled blocks"
        yield key, f"{budget}: {why}; use null, or SET='train.compile=true'"
    elif tensor > 1:
        # torch 2.13's partitioner can't size a device mesh, which these blocks take as input
        yield key, f"{budget} is not supported with train.parallelism.tensor {tensor}; use null"


def check_formats(config: Config) -> Refusals:
    """Rejects dtypes that the device, the optimizer or the layout does not support."""
    train, device = config.train, config.fleet.rank_device
    if device is not None and device.bf16 is None and config.fleet.platform != "cpu":
        instead = {"param_dtype": "fp32", "precision": f"{device.half}, as auto does"}
        told = f"bf16: {device.name} has no bf16 instructions"
        yield from (
            (f"train.{key}", f"{told}; use {other}")
            for key, other in instead.items()
            if getattr(train, key) == "bf16"
        )
    elif train.param_dtype == "bf16" and train.precision not in ("bf16", "fp8"):
        told = f"bf16 is not supported with train.precision {train.precision}"
        yield "train.param_dtype", f"{told}; use fp32, or train.precision bf16"
    if train.param_dtype not in (formats := OPTIMIZERS[train.optimizer].formats):
        told = (
            f"{train.param_dtype}: train.optimizer {train.optimizer} supports only "
            f"{', '.join(formats)}"
        )
        yield "train.param_dtype", f"{told}; set train.optimizer {USUAL} for both"
    if train.precision == "fp16" and config.fleet.platform.startswith("neuron"):
        yield (
            "train.precision",
            "fp16 is not supported on Trainium, which has no loss scaling; use bf16",
        )
    if train.precision == "fp8" and (against := _against_fp8(config, device)):
        yield "train.precision", f"fp8: {against}"


def _against_fp8(config: Config, device: Accelerator | None) -> str:
    """Returns why fp8 is unsupported and what to use instead, or "".

    If the device is unknown, the ranks check for support.
    """
    if config.fleet.node_type is not None if device is None else device.fp8 is None:
        name = device.name if device else "a CPU"
        return f"{name} has no fp8 instructions (GPUs since Ada and Hopper do); use auto"
    if not config.train.compile:
        return "slower than bf16 unless compiled; use bf16, or train.compile true"
    tensor = config.train.parallelism.tensor
    return f"not supported with train.parallelism.tensor {tensor}; use bf16, or tensor 1" * (
        tensor > 1
    )


XLA = "neuron-xla"
NATIVE = "neuron"
# Core counts that collectives support within a trn1 node (optimum-neuron issue 761).
RANKS = (1, 2, 8, 32)
LENGTHS = 128  # tile size of attention kernels: the partition count of a NeuronCore


def is_xla(config: Config) -> bool:
    return config.fleet.platform == XLA


def copies(config: Config) -> dict[int, int]:
    """Maps each supported tensor degree above model.kv_heads to the number of copies of each
    key/value head, which NxD Core calls kv_size_multiplier.
    """
    model = config.model
    if not is_xla(config) or not FAMILIES[model.family].copies_heads:
        return {}
    degrees = range(2 * model.kv_heads, model.heads + 1, model.kv_heads)
    return {degree: degree // model.kv_heads for degree in degrees if model.heads % degree == 0}


def copies_heads(config: Config) -> bool:
    """Returns whether key/value heads are replicated across tensor ranks."""
    return config.train.parallelism.tensor in copies(config)


def check_node(config: Config) -> Refusals:
    """Rejects a platform, rank count or sequence length that the node type does not support."""
    fleet, row = config.fleet, config.fleet.node_type
    if (
        row is None
        or row.accelerator is None
        or row.accelerator.kind != "neuron"
        or fleet.platform == "cpu"
    ):
        return
    made_for = node_types.platform_of(row)
    if fleet.platform in (NATIVE, XLA) and fleet.platform != made_for:
        has = "PyTorch/XLA" if made_for == XLA else "native PyTorch"
        yield (
            "fleet.platform",
            f"{fleet.platform}: {row.family} trains only with {has}; use {made_for}",
        )
    fit = [ranks for ranks in RANKS if ranks <= row.accelerators]
    if made_for == XLA and fleet.ranks_per_node not in fit:
        fits = ", ".join(map(str, fit))
        yield (
            "fleet.ranks_per_node",
            f"{fleet.ranks_per_node}: collectives on a {row.name} support only {fits} cores",
        )
    yield from _check_length(config)


def _check_length(config: Config) -> Refusals:
    length = config.train.sequence_length
    if length % LENGTHS:
        below = length // LENGTHS * LENGTHS
        works = range(1, config.model.max_position_embeddings + 1)
        near = ", ".join(str(each) for each in (below, below + LENGTHS) if each in works)
        yield (
            "train.sequence_length",
            f"{length}: Trainium's kernels need a multiple of {LENGTHS}; "
            f"nearest valid values: {near}",
        )


def check_layout(config: Config) -> Refusals:
    """Rejects layouts that NxD Core, or trainfleet's use of it, does not support."""
    train, layout, ways = config.train, config.train.parallelism, config.data_parallel
    if not is_xla(config):
        return
    if layout.fsdp not in (1, ways):
        yield (
            "train.parallelism.fsdp",
            f"{layout.fsdp}: NxD Core shards over all {ways} data-parallel ranks or none; use 1 or "
            f"{ways}",
        )
    if layout.fsdp > 1 and layout.zero_stage != 1:
        yield (
            "train.parallelism.zero_stage",
            f"{layout.zero_stage}: NxD Core shards only the optimizer's state; use 1",
        )
    for name in ("context", "virtual_stages", *["pipeline"] * train.document_mask):
        if (degree := getattr(layout, name)) > 1:
            yield (
                f"train.parallelism.{name}",
                f"{degree} is not supported on platform {XLA}"
                f"{' with train.document_mask' * (name == 'pipeline')}; use 1",
            )
    if train.activation_checkpointing not in ("none", "full"):
        yield (
            "train.activation_checkpointing",
            f"{train.activation_checkpointing}: NxD Core recomputes only whole blocks; use full or "
            "none",
        )
    row = OPTIMIZERS[train.optimizer]
    if row.xla and row.whole and (layout.fsdp > 1 or layout.tensor > 1):
        needs = (
            "needs the norm of whole matrices, so train.parallelism.fsdp and "
            "train.parallelism.tensor must be 1"
        )
        yield "train.optimizer", f"{row.name} {needs}; use {USUAL}"


def check_training(config: Config) -> Refusals:
    """Rejects settings that PyTorch/XLA with NxD's optimizer does not support, because a step runs
    as one program.
    """
    train = config.train
    if not is_xla(config):
        return
    if not FAMILIES[config.model.family].xla:
        built = ", ".join(family.name for family in FAMILIES.values() if family.xla)
        yield (
            "model.family",
            f"{config.model.family} is not supported on NxD Core; supported: {built}",
        )
    if train.spike_sigmas:
        yield (
            "train.spike_sigmas",
            f"{train.spike_sigmas:g}: NxD's optimizer can't skip a step; use 0",
        )
    if not OPTIMIZERS[train.optimizer].xla:
        yield (
            "train.optimizer",
            f"{train.optimizer} is not supported on platform {XLA}; use {USUAL}",
        )
    if train.param_dtype == "bf16":
        yield (
            "train.param_dtype",
            f"bf16 is not supported on platform {XLA}; use fp32 (ZeRO 1 keeps a single copy)",
        )
    if train.precision == "fp8":
        yield "train.precision", "fp8 is not supported on Trainium; use bf16"
    if config.data.conversations:
        yield "data.conversations", f"true is not supported on platform {XLA}; use false"
    if train.compile:
        yield "train.compile", "true: PyTorch/XLA always compiles every step; use false"
