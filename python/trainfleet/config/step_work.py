"""Inputs of the speed model (speed.py): a rank's work per step, its device, and the constants."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class HostOverheads:
    """Overheads when the host itself runs each operation, as on CPUs, in seconds or bytes of memory
    traffic.

    Measured on one CPU as differences in CPU time between layouts that differ in one respect
    (tests/bench/LOG.md).
    """

    launch: float = 1.7e-6  # seconds per operation
    # bytes per parameter and micro-batch, for casts and gradient accumulation
    weights: float = 24.0
    logits: float = 90.0  # bytes per logit in the loss
    # Seconds per block with tensor parallelism, for DTensor dispatch and ranks that wait for each
    # other.
    sliced: float = 0.0275
    gathered: float = 2.5e-3  # seconds per block with weights that FSDP gathers
    gathering: float = 70.0  # bytes per gathered parameter
    passed: float = 1e-3  # seconds per micro-batch at a pipeline stage
    # seconds per pipeline step, for the gradient norm and gradients of tied weights
    agreed: float = 8e-3
    straightened: float = 1.25e-3  # seconds per sharded matrix that Muon gathers
    # Bytes per attention score under dropout, for which torch does not use its fused kernel. The
    # number doubles if a head's scores exceed `cache`, in bytes.
    dropped: float = 34.0
    cache: float = 2**20
    # Bytes that attention moves per feature and byte of a feature, because bf16 is converted.
    attended: float = 230.0


# Formats that a device may support, best first, for matmuls in a format.
NEAR = {"fp8": ("fp8", "bf16"), "bf16": ("bf16",), "fp16": ("fp16", "bf16")}


@dataclass(frozen=True)
class DeviceSpeed:
    """Speed of one rank's device.

    Attributes:
        flops: Dense FLOP/s by number format.
        memory: Memory bandwidth in bytes/s.
        inside: Bytes/s per direction to other ranks in the node.
        outside: Bytes/s per direction of the rank's share of the node's network.
        node: Ranks per node.
        efficiency: Fraction of the peak that large matmuls reach.
        attention: Fraction of that rate that fused attention reaches.
        kernels: False if whole graphs run without kernel launches (Neuron).
        domain: Number of ranks that the inside links connect, if they span several nodes (GB200
            NVL72).
        side: Number of ranks along one side of a torus. A group across both sides has twice the
            links.
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
    host: HostOverheads | None = None  # set if the host itself runs each operation
    side: int = 0

    @property
    def joined(self) -> int:
        return self.domain or self.node

    def peak(self, format_: str) -> float:
        """Returns the matmul FLOP/s in a format, or in the closest format the device supports."""
        for each in NEAR.get(format_, ()):
            if self.flops.get(each):
                return self.flops[each]
        return self.flops["fp32"]


@dataclass(frozen=True)
class Work:
    """A rank's work per step: model shape, batch and layout. A degree of 1 means no parallelism.

    Attributes:
        shard: Number of ranks that shard the state.
        zero: ZeRO stage, which selects the sharded parts of the state.
        recompute: How much of a forward pass outside attention is repeated.
        flash: Whether attention avoids storing scores.
        dropped: Whether dropout applies to attention scores.
        fused: Whether elementwise operations are compiled.
        tuned: Whether the engine has custom kernels (Megatron): for attention scores before
            FlashAttention, and for matmuls since.
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
    # Fraction of tokens with computed logits: 0.15 for masked models that gather them.
    predicted: float = 1.0
    # The optimizer is Muon, and each rank orthogonalizes all matrices of its stage.
    straightened: bool = False
    gradient_bytes: int = 4  # bytes per element while gradients are reduced across ranks
    state_bytes: int = 4  # bytes per weight, gradient or moment in the optimizer
    dropped: bool = False
    # Stages have equal block counts, and the last stage also has the output layer. If False, stages
    # are balanced.
    even: bool = False

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def tokens(self) -> float:
        """Returns the number of tokens in a micro-batch on one rank."""
        return self.micro_batch * self.length / self.context

    @property
    def step_tokens(self) -> float:
        """Returns the number of tokens in a step across all ranks."""
        return float(self.micro_batch * self.length * self.passes * self.data)

    @property
    def queries(self) -> float:
        return self.heads * (self.head or self.width / self.heads)

    @property
    def keys(self) -> float:
        return self.queries * self.kv_heads / self.heads

    @property
    def products(self) -> tuple[tuple[float, float], ...]:
        """Returns the input and output sizes of a block's matmuls on one tensor rank."""
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
        """Returns the number of parameters in one block's matrices across all tensor ranks."""
        return self.width * (
            2 * self.queries + 2 * self.keys + (3 if self.gated else 2) * self.inner
        )

    @property
    def straightening(self) -> float:
        """Returns Muon's FLOPs per block: five Newton-Schulz iterations with three matmuls each.

        See engine/optimizers.py.
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
        """Returns the number of parameters in a rank's stage before sharding."""
        around = self.width * self.vocabulary * (1 if self.pipeline > 1 else 2)
        return (self.block_numbers * ceil(self.layers / self.pipeline) + around) / self.tensor


@dataclass(frozen=True)
class Constants:
    """Fitted constants, dimensionless or in seconds. fit_planner.py prints them with errors."""

    # Tokens at which a matmul takes twice its ideal time, per FLOP/byte of the device.
    thin_tokens: float = 1.44
    # Smaller matrix dimension at which a matmul takes twice its ideal time, per FLOP/byte of the
    # device.
    thin_width: float = 1.23
    # Time of a matmul with a misaligned size. nanoGPT became 25 % faster with 50,304 instead of
    # 50,257 tokens in its vocabulary (Karpathy 2023), and the output layer is a third of a step.
    misaligned: float = 1.75
    fp8: float = 1.0  # efficiency of fp8 matmuls relative to bf16, each against its own peak
    # Memory traffic of an unfused block per token in the forward pass, in multiples of the hidden
    # size.
    traffic: float = 22.0
    traffic_fused: float = 32.5
    traffic_inner: float = 5.9  # memory traffic in multiples of the feed-forward size
    scores: float = 18.5  # memory passes over stored attention scores
    # Memory passes if a single kernel scales, masks and normalizes the scores (Narayanan et al.
    # 2021, 4.2).
    scores_fused: float = 4.6
    launch: float = 9e-6  # seconds per kernel launch
    kernels: float = 45.0  # kernels per block in the forward pass
    ring: float = 0.79  # fraction of a link's nominal bandwidth that large collectives reach
    ring_outside: float = 0.78
    latency: float = 1.2e-05  # seconds per collective inside a node, per doubling of its ranks
    latency_outside: float = 3e-05
    # fraction of the tensor-parallel exchange that overlaps with compute
    hidden_tensor: float = 0.23
    # fraction of the exchange of sharded weights that overlaps with compute
    hidden_shard: float = 0.78
    bubble: float = 0.84  # actual pipeline bubble as a fraction of the theoretical one
    # Slowdown of stages that run as whole graphs: the median of AWS's runs with NxD (LOG.md).
    staged: float = 1.1
    update: float = 75.5  # bytes that the optimizer moves per fp32 parameter
    step: float = 0.0054  # constant overhead per step in seconds
    spread: float = 0.0058  # slowdown per doubling of nodes, because the slowest node sets the pace
    selective: float = 0.06  # fraction of a forward pass that selective recomputation repeats
    # Speed relative to torch of an engine with hand-written kernels, which overlaps communication
    # with matmuls (Megatron).
    tuned: float = 1.28
    # Attention speed of a hand-tuned engine (Megatron) relative to torch, on GPUs that torch's
    # kernels do not use well.
    tuned_attention: float = 2.02
    # Fraction of a forward pass that full recomputation repeats. It skips the output layer and the
    # last matmul.
    full: float = 0.84


FITTED = Constants()
# On CPUs, ranks communicate over gloo, with little overlap. These constants were measured on one
# machine. Finished runs correct predictions.
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
