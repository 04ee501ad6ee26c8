"""Inputs of the speed model (speed.py): a rank's work in a step, and its device."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class HostOverheads:
    """Overheads of a step if the host itself runs each operation, as on CPUs: seconds, and bytes of
    memory traffic.

    They were measured on one CPU, as differences in CPU seconds between layouts that differ in one
    respect (tests/bench/LOG.md).
    """

    launch: float = 1.7e-6  # per operation
    weights: float = 24.0  # bytes per parameter and micro-batch: casts and gradient accumulation
    logits: float = 90.0  # bytes per logit in the loss
    # per block with tensor parallelism: DTensor's dispatch, and ranks that wait for each other
    sliced: float = 0.0275
    gathered: float = 2.5e-3  # per block with weights that FSDP gathers
    gathering: float = 70.0  # bytes per gathered parameter
    passed: float = 1e-3  # per micro-batch at a pipeline stage
    agreed: float = 8e-3  # per step of a pipeline: gradient norm and gradients of tied weights
    straightened: float = 1.25e-3  # per sharded matrix that Muon gathers
    # bytes per attention score under dropout, for which torch leaves its fused kernel
    dropped: float = 48.0
    # bytes per feature that attention moves, times the bytes of a feature: bf16 is converted
    attended: float = 230.0


@dataclass(frozen=True)
class DeviceSpeed:
    """One rank's device: dense FLOP/s by number format, memory in bytes/s, links in bytes/s per
    direction, and ranks per node.

    `inside` is a rank's rate to others in its node, and `outside` its share of the node's network.
    `domain`: number of ranks that the inside links join, if they span several nodes (GB200 NVL72).
    `efficiency`: fraction of the peak that large products reach. `attention`: fraction of that rate
    that fused attention reaches. `kernels`: False if whole graphs run without kernel launches
    (Neuron). `side`: number of ranks along one side of a torus; a group across both sides has twice
    the wires.
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
        """Returns the FLOP/s of products in a format, or in the nearest format that the device
        supports.
        """
        near = {"fp8": ("fp8", "bf16"), "bf16": ("bf16",), "fp16": ("fp16", "bf16")}.get(
            format_, ()
        )
        return next((self.flops[each] for each in near if self.flops.get(each)), self.flops["fp32"])


@dataclass(frozen=True)
class Work:
    """A rank's work in a step: the model's shape, its batch and the layout. A degree is 1 if it
    divides nothing.

    `shard`: number of ranks that divide the state, of which `zero` selects the parts. `recompute`:
    how much of a forward pass outside attention is repeated. `flash`: attention does not store
    scores. `dropped`: dropout removes some scores. `fused`: elementwise operations are compiled.
    `tuned`: the engine has custom kernels (Megatron), for products since FlashAttention, for scores
    before it.
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
    head: int = 0  # features per head; 0: the width over the heads
    # fraction of tokens with computed logits: 0.15 for masked models that gather them
    predicted: float = 1.0
    # the optimizer is Muon, and each rank orthogonalizes all matrices of its stage
    straightened: bool = False
    gradient_bytes: int = 4  # per element, while gradients are summed over ranks
    state_bytes: int = 4  # per weight, gradient or moment in the optimizer
    dropped: bool = False
    # stages have equal numbers of blocks, and the last one also has the output layer; otherwise
    # stages are balanced
    even: bool = False

    @property
    def world(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def tokens(self) -> float:
        """Returns the tokens of a micro-batch on one rank."""
        return self.micro_batch * self.length / self.context

    @property
    def step_tokens(self) -> float:
        """Returns the tokens of a step over all ranks."""
        return float(self.micro_batch * self.length * self.passes * self.data)

    @property
    def queries(self) -> float:
        return self.heads * (self.head or self.width / self.heads)

    @property
    def keys(self) -> float:
        return self.queries * self.kv_heads / self.heads

    @property
    def products(self) -> tuple[tuple[float, float], ...]:
        """Returns the inputs and outputs of a block's matrix products on one tensor rank."""
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
        """Returns the parameters in one block's matrices over all tensor ranks."""
        return self.width * (
            2 * self.queries + 2 * self.keys + (3 if self.gated else 2) * self.inner
        )

    @property
    def straightening(self) -> float:
        """Returns Muon's FLOPs for one block: five Newton-Schulz iterations of three products each
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
        """Returns the parameters in a rank's stage before sharding."""
        around = self.width * self.vocabulary * (1 if self.pipeline > 1 else 2)
        return (self.block_numbers * ceil(self.layers / self.pipeline) + around) / self.tensor
