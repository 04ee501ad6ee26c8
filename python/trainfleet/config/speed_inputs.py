"""Derives the inputs of the speed model (speed.py) from a config: a rank's work and its device."""

from __future__ import annotations

from collections.abc import Iterator

from ..hardware import cpu_speed, node_types
from ..hardware.accelerators import Accelerator
from .families import FAMILIES
from .limits import format_of, is_half
from .memory import FORMATS, passes_of
from .optimizers import OPTIMIZERS
from .speed import ALIGNED, StepTime, padded, step_of
from .step_work import FITTED, ON_CPUS, DeviceSpeed, HostOverheads, Work
from .types import Config

# Fractions of the measured matmul throughput (tests/bench/LOG.md, Attention on CPUs).
CPU_EFFICIENCY, CPU_ATTENTION = (1.0, 0.5)
# Fraction of its cores' combined throughput that a multi-core rank reaches. Most operations of a
# small model are too short to scale perfectly.
CPU_THREADS = 0.93
# Memory bandwidth per core, and gloo bandwidth between two ranks, in bytes/s.
CPU_MEMORY, LOOPBACK = (10e9, 1.5e9)
MUCH = 0.1  # fraction of a step above which PCIe communication deserves a warning
UNKNOWN_NETWORK = 12.5e9  # assumed bytes/s of an unknown host: 100 Gbit/s


def predict(config: Config) -> StepTime | None:
    """Predicts the step time by part. Returns None for an unknown device."""
    row = config.fleet.rank_device
    if row is not None:
        return step_of(work_of(config), as_device(config, row))
    if not config.fleet.on_local_cpus:
        return None
    return step_of(work_of(config), local_cpu(config), ON_CPUS)


def work_of(config: Config) -> Work:
    """Returns a rank's work per step."""
    model, train, layout = config.model, config.train, config.train.parallelism
    family = FAMILIES[model.family]
    return Work(
        model.layers,
        model.hidden_size,
        model.intermediate_size,
        model.heads,
        model.kv_heads,
        model.vocab_size,
        gated=family.rotary,
        causal=family.causal,
        length=train.sequence_length,
        micro_batch=train.micro_batch_size,
        passes=passes_of(config),
        data=config.data_parallel,
        shard=layout.fsdp,
        zero=layout.zero_stage,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        interleave=layout.virtual_stages,
        format=format_of(config),
        weight_bytes=2 if is_half(config) else 4,
        recompute=_nearest(train.recomputation),
        flash=family.causal or config.fleet.platform != "neuron-xla",
        fused=bool(train.compile),
        head=model.head_dim or 0,
        predicted=family.guesses(train.sequence_length) / train.sequence_length,
        straightened=OPTIMIZERS[train.optimizer].orthogonal,
        even=True,
        state_bytes=FORMATS[train.param_dtype],
        dropped=model.dropout > 0,
    )


def _nearest(recompute: str | float) -> str:
    """Returns the recomputation mode closest to a fraction of saved activations."""
    if isinstance(recompute, str):
        return recompute
    return "none" if recompute > 0.75 else "selective" if recompute > 0.25 else "full"


def as_device(config: Config, row: Accelerator) -> DeviceSpeed:
    """Returns a rank's device, including its share of the node's network bandwidth."""
    machine, ranks = config.fleet.node_type, config.fleet.ranks_per_node
    outside = (
        machine.network_gbps / 8 * 1e9 / max(1, machine.accelerators)
        if machine
        else UNKNOWN_NETWORK / ranks
    )
    flops = {
        format_: row.peak(format_)
        for format_ in ("fp8", "bf16", "fp16", "fp32")
        if format_ == "fp32" or getattr(row, format_)
    }
    return DeviceSpeed(
        row.name,
        flops,
        row.bandwidth,
        row.neighbours,
        outside,
        ranks,
        row.efficiency,
        row.attention,
        row.kind != "neuron",
        domain=row.domain,
        side=row.side,
    )


def local_cpu(config: Config) -> DeviceSpeed:
    """Returns a rank's share of this machine's CPU cores as a device."""
    share = node_types.local_cores() / config.world_size
    share *= CPU_THREADS if share > 1 else 1.0
    measured = cpu_speed.of_this_machine()
    flops = {format_: measured.rate(format_) * share for format_ in ("fp32", "bf16", "fp16")}
    return DeviceSpeed(
        "CPU",
        flops,
        CPU_MEMORY * share,
        LOOPBACK,
        LOOPBACK,
        config.world_size,
        CPU_EFFICIENCY,
        CPU_ATTENTION,
        kernels=False,
        host=HostOverheads(),
    )


def warnings(config: Config) -> Iterator[str]:
    """Yields warnings about slow GPU settings: misaligned sizes, tensor parallelism across nodes,
    and heavy communication over PCIe at an assumed rate.
    """
    row, model, tensor = config.fleet.rank_device, config.model, config.train.parallelism.tensor
    if row is None or row.kind != "cuda":
        return
    sizes = (
        ("model.hidden_size", model.hidden_size),
        ("model.intermediate_size per tensor rank", model.intermediate_size / tensor),
        ("model.vocab_size per tensor rank", model.vocab_size / tensor),
    )
    for name, size in sizes:
        if size % ALIGNED:
            slower = f"its matmuls are predicted to be {FITTED.misaligned:g} times slower"
            yield f"{name} is {size:g}, not a multiple of {ALIGNED}; {slower}"
    if (size := padded(model.head_features)) != model.head_features:
        yield f"a head has {model.head_features} features; attention computes {size:g}"
    if tensor > (row.domain or config.fleet.ranks_per_node):
        yield f"train.parallelism.tensor {tensor} spans nodes; each block waits for the network"
    step = predict(config)
    share = step.linked / step.total if step else 0.0
    if share > MUCH and not row.links and config.fleet.ranks_per_node > 1:
        rate = f"an assumed {row.neighbours / 1e9:g} GB/s over PCIe"
        yield f"exchange takes {share:.0%} of a step at {rate}; make profile measures it"
