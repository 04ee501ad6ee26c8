"""Splits a model across ranks and runs its training steps.

rank_model   interface to a rank's part of the model; DDP
parallelize  all other layouts: tensor slices, pipeline stages, initial weights, recomputation, fp8,
             compilation and sharding, applied in this order
tensor       tensor and sequence parallelism with DTensor; context parallelism
pipeline     pipeline stages and their schedule
blocks       per-block transformations: initial weights, fp8, recomputation, compilation, sharding
gradients    device mesh; gradient norm and clipping in every layout

A lazy device's platform implements its own layouts (config/platforms.py).
"""

from __future__ import annotations

import torch

from ...config import Config, platforms
from ..world import World
from .rank_model import Parts, Replicas

__all__ = ["Parts", "Replicas", "arrange"]


def arrange(config: Config, world: World) -> Parts:
    """Creates this rank's part of the model, and its optimizer. Must be called on all ranks.

    Uses DDP if the layout does not split the model and weights are fp32. DDP is the fastest option
    for such layouts, especially on CPUs (tests/bench/LOG.md).
    """
    if world.device.lazy:
        parts: Parts = platforms.arrange(world.device.kind, config, world)
        return parts
    layout = config.train.parallelism
    divided = layout.fsdp * layout.tensor * layout.pipeline * layout.context > 1
    precision = world.precision(config.train.precision)
    casts = (
        precision in (torch.bfloat16, torch.float16)
        and world.device.casts
        and config.train.param_dtype == "fp32"
    )
    if divided or not (casts or precision == torch.float32):
        from .parallelize import Division  # deferred: pipelining and FSDP are slow to import

        return Division(config, world.device, precision)
    return Replicas(config, world, precision)
