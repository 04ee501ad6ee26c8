"""What a run will need, from arithmetic alone: parameters, memory a rank, time and money."""

from __future__ import annotations

from dataclasses import dataclass

from .. import hardware
from ..config import Config
from ..config.sizes import count_parameters, flops_per_token

ASSUMED_MFU = 0.4  # what a tidy engine reaches on these shapes (trainers compared in the README); a run prints its own


@dataclass(frozen=True)
class Estimate:
    """Parameters; bytes a rank; FLOPs a step; seconds and US dollars for the whole run (None: not known for this hardware)."""

    parameters: int
    memory_bytes: int
    step_flops: float
    seconds: float | None
    usd: float | None


def estimate(config: Config) -> Estimate:
    """The estimate that `make plan` prints and the budget is checked against."""
    parameters = count_parameters(config.model)
    flops = flops_per_token(config.model, config.train.sequence_length) * config.train.global_batch * config.train.sequence_length
    peak = _peak(config)
    seconds = config.train.steps * flops / (peak * ASSUMED_MFU) if peak else None
    price = hardware.usd_per_hour(config.fleet.instance_type, config.fleet.nodes)
    usd = 0.0 if price == 0 else price * seconds / 3600 if price is not None and seconds is not None else None
    return Estimate(parameters, memory_per_rank(config, parameters), flops, seconds, usd)


def memory_per_rank(config: Config, parameters: int) -> int:
    """fp32 weights, gradients and AdamW's two moments, over the ranks that share them, and a micro-batch's activations.

    Activations of a block without recomputation: 34 x tokens x width bytes at 2 bytes a number (Korthikanti et al. 2022,
    arXiv:2205.05198, eq. 1, attention matrix not kept), doubled for fp32; logits and their gradient at 4 bytes.
    """
    layout, model, train = config.train.layout, config.model, config.train
    state = 16 * parameters // (layout.tensor * layout.pipeline * layout.shard)
    tokens = train.micro_batch * train.sequence_length // layout.context
    activations = 68 * tokens * model.hidden_size * model.layers // (layout.tensor * layout.pipeline)
    return state + activations + 8 * tokens * model.vocabulary_size // layout.tensor


def _peak(config: Config) -> float | None:
    """FLOP/s of all ranks together."""
    row = hardware.INSTANCE_TYPES.get(config.fleet.instance_type or "")
    if row is not None:
        return row.accelerator.bf16 * config.world_size if row.accelerator else None
    return None if hardware.local_accelerators() else hardware.local_core_flops() * min(config.world_size, hardware.local_cores())
