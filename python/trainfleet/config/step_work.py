"""Inputs of the speed model (speed.py): a rank's work per step, and its device."""

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
    # Bytes per attention score under dropout, for which torch does not use its fused kernel.
    dropped: float = 48.0
    # Bytes that attention moves per feature and byte of a feature, because bf16 is converted.
    attended: float = 230.0


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
        near = {"fp8": ("fp8", "bf16"), "bf16": ("bf16",), "fp16": ("fp16", "bf16")}.get(
            format_, ()
        )
        return next((self.flops[each] for each in near if self.flops.get(each)), self.flops["fp32"])


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
