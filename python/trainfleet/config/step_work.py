"""Inputs of the speed model (speed.py): a rank's work per step, its device, and the constants."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class HostOverheads:
    """Overheads if the host runs the operations itself, as on CPUs, in seconds or bytes of memory
    traffic.

    Measured on one CPU, by comparing the CPU time of layouts that differ in a single respect
    (tests/bench/LOG.md).
    """

    launch: float = 1.7e-6  # seconds per operation
    # bytes per parameter and micro-batch, for casts and gradient accumulation
    weights: float = 24.0
    logits: float = 90.0  # bytes per logit in the loss
    # seconds per block with tensor parallelism, for DTensor dispatch and waiting for other ranks
    sliced: float = 0.0275
    gathered: float = 2.5e-3  # seconds per block whose weights FSDP gathers
    gathering: float = 70.0  # bytes per gathered parameter
    passed: float = 1e-3  # seconds per micro-batch at a pipeline stage
    # seconds per step of a pipeline, to reduce the gradient norm and tied weights' gradients
    agreed: float = 8e-3
    straightened: float = 1.25e-3  # seconds per sharded matrix that Muon gathers
    # Bytes per attention score with dropout, because torch then does not use its fused kernel.
    # Doubles if a head's scores take more than `cache` bytes.
    dropped: float = 34.0
    cache: float = 2**20
    # Attention's memory traffic in bytes per feature is this divided by the dtype's size. bf16
    # takes more traffic, because it is converted.
    attended: float = 230.0


# Dtype of a matmul → dtypes in which a device may run it, best first.
NEAR = {"fp8": ("fp8", "bf16"), "bf16": ("bf16",), "fp16": ("fp16", "bf16")}


@dataclass(frozen=True)
class DeviceSpeed:
    """Speed of one rank's device.

    Attributes:
        flops: Dense FLOP/s by dtype.
        memory: Memory bandwidth in bytes/s.
        inside: Bytes/s per direction to other ranks in the node.
        outside: Rank's share of the node's network bandwidth, in bytes/s per direction.
        node: Ranks per node.
        efficiency: Fraction of peak FLOP/s that large matmuls reach.
        attention: Fraction of the large-matmul rate that fused attention reaches.
        kernels: Whether operations are launched as kernels. Neuron runs whole graphs instead.
        domain: Number of ranks that the inside links connect, if they span nodes (GB200 NVL72).
        side: Number of ranks along one side of a torus. A group that spans both dimensions has
            twice the links.
    """

    name: str
    flops: dict[str, float]
    memory: float
    inside: float
    outside: float
    node: int
    efficiency: float
    attention: float
    kernels: bool = True
    domain: int = 0
    host: HostOverheads | None = None  # set if the host runs the operations itself
    side: int = 0

    @property
    def joined(self) -> int:
        return self.domain or self.node

    def peak(self, format_: str) -> float:
        """Returns the peak matmul FLOP/s in a dtype, or in the closest dtype that is supported."""
        for each in NEAR.get(format_, ()):
            if self.flops.get(each):
                return self.flops[each]
        return self.flops["fp32"]


@dataclass(frozen=True)
class Work:
    """A rank's work per step: model shape, batch and layout. A degree of 1 means no parallelism.

    Attributes:
        shard: Number of ranks that shard the state.
        zero: ZeRO stage.
        recompute: Recomputation mode: none, selective or full.
        flash: Whether fused attention avoids storing the scores.
        dropped: Whether attention scores use dropout.
        fused: Whether elementwise operations are compiled.
        tuned: Whether the engine has hand-tuned kernels (Megatron): for attention scores without
            FlashAttention, and for matmuls and attention with it.
    """

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    gated: bool
    causal: bool
    length: int
    micro_batch: int
    passes: int
    data: int
    shard: int
    zero: int
    tensor: int
    pipeline: int
    context: int
    interleave: int
    format: str
    weight_bytes: int = 2
    recompute: str = "none"
    flash: bool = True
    fused: bool = True
    sequence_parallel: bool = True
    tuned: bool = False
    head: int = 0  # features per head; 0 means width / heads
    # fraction of tokens whose logits are computed: 0.15 for masked models that gather them
    predicted: float = 1.0
    # whether the optimizer is Muon, where each rank orthogonalizes all matrices of its stage
    straightened: bool = False
    gradient_bytes: int = 4  # bytes per element while gradients are reduced across ranks
    state_bytes: int = 4  # bytes per weight, gradient or moment in the optimizer
    dropped: bool = False
    # whether stages have equal block counts, with the output layer as extra work on the last one;
    # otherwise, stages are balanced
    even: bool = False

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def tokens(self) -> float:
        """Returns the number of tokens per micro-batch on one rank."""
        return self.micro_batch * self.length / self.context

    @property
    def step_tokens(self) -> float:
        """Returns the number of tokens per step across all ranks."""
        return float(self.micro_batch * self.length * self.passes * self.data)

    @property
    def queries(self) -> float:
        return self.heads * (self.head or self.width / self.heads)

    @property
    def keys(self) -> float:
        return self.queries * self.kv_heads / self.heads

    @property
    def products(self) -> tuple[tuple[float, float], ...]:
        """Returns the input and output size of each of a block's matmuls on one tensor rank."""
        part = self.tensor
        rows = (2 if self.gated else 1) * self.inner
        return (
            (
                self.width,
                (self.queries + 2 * max(self.keys, part * self.queries / self.heads)) / part,
            ),
            (self.queries / part, self.width),
            (self.width, rows / part),
            (self.inner / part, self.width),
        )

    @property
    def block_numbers(self) -> float:
        """Returns the number of parameters in a block's matrices, before tensor parallelism."""
        return self.width * (
            2 * self.queries + 2 * self.keys + (3 if self.gated else 2) * self.inner
        )

    @property
    def straightening(self) -> float:
        """Returns Muon's FLOPs per block, for five Newton-Schulz iterations of three matmuls each
        (engine/optimizers.py).
        """
        wide, inner = (self.width, self.queries), (self.width, self.inner)
        shapes = (
            wide,
            wide,
            (self.width, self.keys),
            (self.width, self.keys),
            *(inner,) * (3 if self.gated else 2),
        )
        return sum(5 * (4 * min(shape) ** 2 * max(shape) + 2 * min(shape) ** 3) for shape in shapes)

    @property
    def numbers(self) -> float:
        """Returns the number of parameters of a rank's stage before sharding."""
        around = self.width * self.vocabulary * (1 if self.pipeline > 1 else 2)
        return (self.block_numbers * ceil(self.layers / self.pipeline) + around) / self.tensor


@dataclass(frozen=True)
class Constants:
    """Fitted constants, dimensionless or in seconds. fit_planner.py also prints their errors."""

    # Number of tokens at which a matmul takes twice its ideal time, per FLOP/byte of the device.
    thin_tokens: float = 1.44
    # Smaller matrix dimension at which a matmul takes twice its ideal time, per FLOP/byte of the
    # device.
    thin_width: float = 1.23
    # Slowdown of a matmul with misaligned dimensions. nanoGPT became 25 % faster when its
    # vocabulary was padded from 50,257 to 50,304 tokens (Karpathy 2023). The output layer is a
    # third of a step.
    misaligned: float = 1.75
    fp8: float = 1.0  # fraction of peak that fp8 matmuls reach, relative to bf16's fraction
    # Memory traffic of an unfused block's forward pass per token, in multiples of the hidden size.
    traffic: float = 22.0
    traffic_fused: float = 32.5
    traffic_inner: float = 5.9  # memory traffic in multiples of the feed-forward size
    scores: float = 18.5  # memory passes over stored attention scores
    # memory passes if one kernel scales, masks and normalizes the scores (Narayanan et al. 2021,
    # 4.2)
    scores_fused: float = 4.6
    launch: float = 9e-6  # seconds per kernel launch
    kernels: float = 45.0  # kernels per block in the forward pass
    ring: float = 0.79  # fraction of a link's nominal bandwidth that large collectives reach
    ring_outside: float = 0.78
    latency: float = 1.2e-05  # seconds per collective inside a node, per doubling of its ranks
    latency_outside: float = 3e-05
    # fraction of tensor-parallel communication that overlaps with compute
    hidden_tensor: float = 0.23
    # fraction of sharded weight and gradient communication that overlaps with compute
    hidden_shard: float = 0.78
    bubble: float = 0.84  # actual pipeline bubble as a fraction of the theoretical one
    # Slowdown of pipeline stages that run as whole graphs: median of AWS's NxD runs (LOG.md).
    staged: float = 1.1
    update: float = 75.5  # optimizer memory traffic in bytes per fp32 parameter
    step: float = 0.0054  # fixed overhead per step in seconds
    spread: float = 0.0058  # slowdown per doubling of the node count, due to stragglers
    selective: float = 0.06  # fraction of a forward pass that selective recomputation repeats
    # Matmul speed of a hand-tuned engine (Megatron) relative to torch, due to custom kernels and
    # overlapped communication.
    tuned: float = 1.28
    # Attention speed of a hand-tuned engine (Megatron) relative to torch, on GPUs for which torch's
    # kernels are slow.
    tuned_attention: float = 2.02
    # Fraction of a forward pass that full recomputation repeats. It skips the output layer and the
    # last matmul.
    full: float = 0.84


FITTED = Constants()
# Constants for CPUs, measured on one machine. Ranks communicate over gloo, with little overlap.
# Finished runs correct these predictions.
ON_CPUS = Constants(
    thin_tokens=0.1,
    thin_width=1.0,
    traffic=11.0,
    traffic_fused=11.0,
    traffic_inner=2.8,
    ring=0.7,
    ring_outside=0.7,
    latency=5e-4,
    latency_outside=5e-4,
    hidden_tensor=0.0,
    hidden_shard=0.3,
    bubble=0.85,
    staged=1.0,
    step=0.005,
    spread=0.0,
)
