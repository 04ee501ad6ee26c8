"""Predicts step time, broken down into compute, memory traffic, communication and idle time.

The model follows a micro-batch through a rank's stage. It sums the time of matmuls, attention,
memory-bound operations, kernel launches and the layout's collectives over each group's links.
Matmul efficiency depends on matrix size. It then adds the pipeline bubble, the optimizer update and
the gradient exchange that does not overlap with compute. Constants are fitted to published results,
which tests/bench/fit_planner.py lists. Each part cites its sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2

from .step_work import FITTED, Constants, DeviceSpeed, HostOverheads, Work

# Latency in seconds per ring step, inside a node and between nodes (NCCL 2.30, tuning.cc, Simple).
HOP, HOP_OUTSIDE = (3.4e-6, 14e-6)
# Matrix dimensions must be multiples of this for 16-byte loads of two-byte dtypes (NVIDIA's Matrix
# Multiplication Background guide).
ALIGNED = 8
# Head sizes of FlashAttention's kernels (static_switch.h). Others are padded to the next size.
HEADS = (32, 64, 96, 128, 160, 192, 256)
# Work relative to a forward pass. The backward pass computes input and weight gradients.
FORWARD, BACKWARD = (1.0, 2.0)


# phases of a step, each corrected as a whole (engine/timing.py)
GROUPS = {
    "products": ("products",),
    "attention": ("attention",),
    "traffic": ("traffic", "idle"),
    "calls": ("launches",),
    "exchange": ("tensor", "shards", "stages", "context"),
    "gradients": ("gradients",),
    "update": ("update",),
    "rest": ("other",),
}


@dataclass(frozen=True)
class StepTime:
    """Step time by part, in seconds. Communication that overlaps with compute is not counted."""

    products: float
    attention: float
    traffic: float
    launches: float
    tensor: float
    shards: float
    stages: float
    context: float
    idle: float
    gradients: float
    update: float
    other: float

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))

    def corrected(self, factors: Mapping[str, float]) -> StepTime:
        """Returns the step time with each phase (GROUPS) scaled by its factor, by default 1."""
        of = {name: factors.get(group, 1.0) for group, names in GROUPS.items() for name in names}
        return StepTime(**{name: seconds * of[name] for name, seconds in vars(self).items()})

    def group(self, name: str) -> float:
        """Returns the time of a phase (GROUPS), in seconds."""
        return float(sum(getattr(self, part) for part in GROUPS[name]))

    @property
    def linked(self) -> float:
        """Returns the total communication time, in seconds."""
        return self.group("exchange") + self.gradients

    def limit(self) -> str:
        """Returns the name of the slowest part."""
        return max(vars(self), key=vars(self).__getitem__)


Rank = tuple[Work, DeviceSpeed, Constants]  # inputs of a rank's times


def step_of(work: Work, device: DeviceSpeed, constants: Constants = FITTED) -> StepTime:
    """Predicts the time of one optimizer step."""
    at, c, layers = (work, device, constants), constants, ceil(work.layers / work.pipeline)
    again = {"none": 0.0, "selective": c.selective, "full": c.full}[work.recompute]
    products, attention, traffic = _computing(at, layers, again)
    computing = products + attention + traffic
    launches = _launches(at, layers * (FORWARD + BACKWARD + again), computing)
    tensor = layers * _tensor(at) * (2 + (again if work.recompute == "full" else 0))
    ring = layers * _context(at, computing / layers)
    per_pass = computing + launches + tensor + ring
    shards, at_end = _shards(at, per_pass)
    stages = _stages(at)
    idle = _idle(at, per_pass + shards + stages)
    slow = _slowed(at)
    parts = (products, attention, traffic, launches, tensor, shards, stages, ring)
    scaled = [part * (work.passes * slow) for part in parts]
    return StepTime(*[*scaled, idle * slow, at_end, _update(at), c.step])


def _slowed(at: Rank) -> float:
    """Returns the slowdown factor due to stragglers and, on Neuron, to pipelining whole graphs."""
    work, device, c = at
    slow = 1 + c.spread * log2(max(1.0, work.world / device.joined))
    return slow * c.staged if work.pipeline > 1 and not device.kernels else slow


def _computing(at: Rank, layers: int, again: float) -> tuple[float, float, float]:
    """Returns the time of a micro-batch's matmuls, attention and memory-bound operations, in
    seconds.

    `again` is the fraction of a forward pass that is recomputed.
    """
    work, device, _ = at
    times, block, head = FORWARD + BACKWARD + again, _block(at), _head(at)
    whole = work.pipeline == 1 or work.even  # all of the output layer is extra work
    # Otherwise, engines offset the output layer with fewer blocks. The slowest stage is assumed to
    # spend only half of the output layer's time in addition to its blocks.
    share = 1.0 if whole else (layers * block + head / 2) / (layers * block)
    products = layers * block * times * share + (head * (FORWARD + BACKWARD) if whole else 0.0)
    # Full recomputation repeats all of attention, because it skips only a block's last matmul.
    # Engines differ in selective recomputation.
    repeated = 1.0 if work.recompute == "full" else min(1.0, 4 * again)
    attention = layers * _attention(at) * (FORWARD + 2.5 + repeated)
    loss = _loss(work, device) if whole else 0.0
    return products, attention, layers * _traffic(at) * times + loss


def _idle(at: Rank, one: float) -> float:
    """Returns the pipeline bubble, in seconds. `one` is a micro-batch's time per stage."""
    work, device, c = at
    ending = 0.0  # time of the output layer, which only the last stage runs
    if work.even:
        ending = _head(at) * (FORWARD + BACKWARD) + _loss(work, device)
    return c.bubble * (one - ending) * (work.pipeline - 1) / work.interleave


def _product(at: Rank, size: tuple[float, float], format_: str) -> float:
    """Returns the time of a matmul of a micro-batch's tokens with one matrix, in seconds.

    Small dimensions reduce its throughput.
    """
    work, device, c = at
    inputs, outputs = size
    flops = device.peak(format_)
    efficiency = device.efficiency * (c.fp8 if format_ == "fp8" and "fp8" in device.flops else 1.0)
    balance = flops / device.memory
    thin = 1 + balance * (c.thin_tokens / work.tokens + c.thin_width / min(inputs, outputs))
    thin /= c.tuned if work.tuned and work.flash else 1.0
    if device.kernels and (inputs % ALIGNED or outputs % ALIGNED):
        thin *= c.misaligned
    return 2 * work.tokens * inputs * outputs * thin / (flops * efficiency)


def _block(at: Rank) -> float:
    work, _, _ = at
    return sum(_product(at, size, work.format) for size in work.products)


def _head(at: Rank) -> float:
    work, _, _ = at
    return work.predicted * _product(
        at, (work.width, work.vocabulary / work.tensor), _beside(work.format)
    )


def _beside(format_: str) -> str:
    """Returns the dtype of attention and of matmuls outside blocks."""
    return "bf16" if format_ == "fp8" else format_


def _launches(at: Rank, blocks: float, computing: float) -> float:
    """Returns the launch overhead per micro-batch that does not overlap with compute, in seconds.

    `blocks` is the micro-batch's work, in forward passes of one block.
    """
    work, device, c = at
    called = blocks * c.kernels * (0.6 if work.fused else 1.0)
    if device.host is None:
        return max(0.0, called * c.launch - computing) if device.kernels else 0.0
    host, layers, numbers = device.host, ceil(work.layers / work.pipeline), work.numbers
    seconds = called * host.launch + host.weights * numbers / device.memory
    if work.tensor > 1:
        seconds += layers * host.sliced
    if work.zero == 3 and work.shard > 1 and work.pipeline == 1:
        seconds += layers * host.gathered + host.gathering * numbers / device.memory
    return seconds + (host.passed if work.pipeline > 1 else 0.0)


def _attention(at: Rank) -> float:
    """Returns the forward time of a block's attention, in seconds.

    Attention takes 4 x length x width FLOPs per token, or half as many if causal.
    """
    work, device, c = at
    seen = 0.5 if work.causal and work.flash else 1.0
    flops = 4 * work.tokens * work.length * seen * work.queries / work.tensor
    if device.kernels and work.flash:
        flops *= padded(work.queries / work.heads) * work.heads / work.queries
    peak = device.peak(_beside(work.format))
    seconds = flops / (peak * device.efficiency * (device.attention if work.flash else 1.0))
    scores = work.tokens * work.length * work.heads / work.tensor
    if device.host:
        return seconds + _attended(work, device.host, scores) / device.memory
    if work.flash:
        return seconds / (c.tuned_attention if work.tuned else 1.0)
    passes = c.scores_fused if work.tuned else c.scores
    return seconds + passes * work.weight_bytes * scores / device.memory


def _attended(work: Work, host: HostOverheads, scores: float) -> float:
    """Returns the memory traffic of attention's forward pass on a host, in bytes."""
    features = work.tokens * work.queries / work.tensor
    spilled = 2 if 4 * work.length**2 > host.cache else 1
    bytes_ = host.dropped * spilled * scores * work.dropped
    return bytes_ + host.attended / work.weight_bytes * features


def padded(head: float) -> float:
    """Returns the kernel head size to which a head is padded."""
    return next((size for size in HEADS if head <= size), head)


def _traffic(at: Rank) -> float:
    """Returns the forward time of a block's memory-bound operations, in seconds.

    These are norms, activation functions, residuals and copies.
    """
    work, device, c = at
    wide = (
        (c.traffic_fused if work.fused else c.traffic)
        * work.width
        / (work.tensor if work.sequence_parallel else 1)
    )
    inner = c.traffic_inner * (1.5 if work.gated else 1.0) * work.inner / work.tensor
    return work.tokens * (wide + inner) * work.weight_bytes / device.memory


def _loss(work: Work, device: DeviceSpeed) -> float:
    """Returns the time of the softmax over the vocabulary and its gradient, in seconds.

    Both pass over the fp32 logits several times.
    """
    bytes_ = device.host.logits if device.host else 6 * 4
    return bytes_ * work.tokens * work.predicted * work.vocabulary / work.tensor / device.memory


def _link(device: DeviceSpeed, c: Constants, ranks: int, stride: int) -> tuple[float, float]:
    """Returns the bandwidth (bytes/s) and latency of a collective over `ranks` ranks, `stride`
    apart.

    On a torus, several rings run at once over separate links (AWS Neuron, Intra-node Collective
    Communications).
    """
    if ranks * stride <= device.joined:
        wires = 2 if stride < device.side < ranks * stride else 1
        return device.inside * wires * c.ring, c.latency * log2(max(2, ranks))
    # ranks of the group per node, each of which adds its share of the network bandwidth
    together = max(1, device.joined // stride)
    inside, outside = device.inside * c.ring, together * device.outside * c.ring_outside
    rate = outside if together == 1 else 1 / (1 / inside + 1 / outside)
    return rate, c.latency_outside * log2(max(2, ranks))


def _around(device: DeviceSpeed, ranks: int, stride: int) -> float:
    """Returns the ring latency of an all-gather or reduce-scatter, in seconds.

    NCCL has no tree algorithm for them (tuning.cc).
    """
    if not device.kernels:
        return 0.0
    nodes = ceil(ranks * stride / device.joined)
    return (
        (ranks - nodes) * HOP + (nodes - 1) * HOP_OUTSIDE
        if nodes < ranks
        else (ranks - 1) * HOP_OUTSIDE
    )


def _tensor(at: Rank) -> float:
    """Returns a block's tensor-parallel communication time per pass, in seconds.

    A forward or backward pass needs two all-gathers and two reduce-scatters (arXiv:2205.05198).
    """
    work, device, c = at
    if work.tensor == 1:
        return 0.0
    rate, latency = _link(device, c, work.tensor, 1)
    bytes_ = work.tokens * work.width * work.weight_bytes * (work.tensor - 1) / work.tensor
    return 4 * (bytes_ / rate + latency) * (1 - c.hidden_tensor)


def _context(at: Rank, block: float) -> float:
    """Returns the non-overlapped time to exchange a block's keys and values across context ranks,
    in seconds.
    """
    work, device, c = at
    if work.context == 1:
        return 0.0
    rate, latency = _link(device, c, work.context, work.tensor)
    bytes_ = 2 * work.tokens * work.keys / work.tensor * work.weight_bytes * (work.context - 1)
    exchange = 3 * (bytes_ / rate + latency * work.context)
    return exchange * (1 - c.hidden_shard) + max(0.0, c.hidden_shard * exchange - block)


def _shards(at: Rank, computing: float) -> tuple[float, float]:
    """Returns the non-overlapped time to exchange weights and gradients, in seconds.

    The first value is per micro-batch, the second per step.
    """
    work, _, _ = at
    if work.data * work.context == 1:
        return 0.0, 0.0
    if work.zero == 3 and work.shard > 1 and work.pipeline == 1:
        return _gathered(at, computing), 0.0
    return 0.0, _reduced(at, computing)


def _gathered(at: Rank, computing: float) -> float:
    """Returns the time per micro-batch to gather weights in both passes and to reduce gradients
    (ZeRO 3).
    """
    work, device, c = at
    group = work.data * work.context
    together = min(group, work.shard * work.context)  # ranks that share one copy of the weights
    rate, latency = _link(device, c, together, work.tensor)
    bytes_ = (
        (2 * work.weight_bytes + work.gradient_bytes) * work.numbers * (together - 1) / together
    )
    latency += _around(device, together, work.tensor)
    exchange = bytes_ / rate + 3 * (work.layers / work.pipeline) * latency
    over = _hidden(_replicas(at, together, group // together), computing, c)
    return _hidden(exchange, computing, c) + over / work.passes


def _reduced(at: Rank, computing: float) -> float:
    """Returns the time per step to reduce gradients, if weights stay gathered for a whole step."""
    work, device, c = at
    group, ways = work.data * work.context, max(1, work.shard)
    rate, latency = _link(device, c, group, work.tensor)
    latency += _around(device, ways, work.tensor) if ways > 1 else 0.0
    # With sharding, ranks then gather the updated weights, or else the reduced gradients.
    back = work.weight_bytes if ways > 1 else work.gradient_bytes
    bytes_ = (work.gradient_bytes + back) * work.numbers * (group - 1) / group
    exchange = bytes_ / rate + work.layers / work.pipeline * latency
    if not device.kernels:
        return exchange  # compute and communication are separate graphs, so they do not overlap
    # Stages finish one after another, which leaves more compute to overlap with.
    window = computing * (1 + (work.pipeline - 1) / work.interleave)
    return _hidden(exchange, 2 / 3 * window, c)


def _replicas(at: Rank, together: int, replicas: int) -> float:
    """Returns the time to reduce gradients across weight replicas (HSDP), in seconds."""
    work, device, c = at
    if replicas == 1:
        return 0.0
    rate, latency = _link(device, c, replicas, work.tensor * together)
    return (
        2 * work.gradient_bytes * work.numbers / together * (replicas - 1) / replicas / rate
        + latency
    )


def _hidden(exchange: float, window: float, c: Constants) -> float:
    """Returns the part of an exchange that does not overlap with `window` seconds of compute."""
    return exchange * (1 - c.hidden_shard) + max(0.0, c.hidden_shard * exchange - window)


def _stages(at: Rank) -> float:
    """Returns the non-overlapped time to pass hidden states and gradients between stages, in
    seconds.

    Adjacent stages are world / pipeline ranks apart.
    """
    work, device, c = at
    if work.pipeline == 1:
        return 0.0
    # fraction of hops between nodes
    leaving = (
        min(1.0, work.world / work.pipeline / device.joined) if work.world > device.joined else 0.0
    )
    inside, outside = device.inside * c.ring, device.outside * c.ring_outside
    bytes_ = work.tokens * work.width * work.weight_bytes / work.tensor
    hop = bytes_ * (leaving / outside + (1 - leaving) / inside) + c.latency_outside
    return 2 * work.interleave * hop * (1 - c.hidden_tensor)


def _update(at: Rank) -> float:
    work, device, c = at
    # On a host, rounding costs as much time as the smaller dtype saves.
    bytes_ = c.update * (1 if device.host else work.state_bytes / 4)
    seconds = bytes_ * work.numbers / max(1, work.shard) / device.memory
    seconds += device.host.agreed if device.host and work.pipeline > 1 else 0.0
    return seconds + (_straighten(work, device) if work.straightened else 0.0)


def _straighten(work: Work, device: DeviceSpeed) -> float:
    """Returns the time to orthogonalize a stage's matrices (Muon), in seconds.

    Sharded matrices are gathered first.
    """
    layers, matrices = ceil(work.layers / work.pipeline), 4 + (3 if work.gated else 2)
    peak = device.peak(_beside(work.format)) * device.efficiency
    seconds = layers * work.straightening / peak
    if device.host and work.tensor * work.shard > 1:
        seconds += layers * (
            matrices * device.host.straightened
            + device.host.gathering * work.block_numbers / device.memory
        )
    return seconds
