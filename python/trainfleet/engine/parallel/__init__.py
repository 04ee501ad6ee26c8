"""Divides a model among ranks, and runs steps through the parts.

rank_model  the interface of any layout for the training loop; every rank has the entire model (DDP)
parallelize  every other layout, in one short function: slices → stages → weights → recomputation →
             fp8 → compilation → shards
tensor      a model's plan as DTensors, the sequence in parts, for attention too
pipeline    stages and their schedule
blocks      transformations of each block: first values, fp8, recomputation, compilation, shards
gradients   the ranks as a grid; gradients' norm and clipping, right in every layout

A lazy device has its own division (config/platforms.py).
"""

from __future__ import annotations

import torch

from ...config import Config, platforms
from ..world import World
from .rank_model import Parts, Replicas

__all__ = ["Parts", "Replicas", "arrange"]


def arrange(config: Config, world: World) -> Parts:
    """Makes this rank's model and its optimizer; all ranks call it together.

    If each rank can have an entire model with fp32 weights, DDP is the fastest, by far on CPUs
    (tests/bench/LOG.md).
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
        from .parallelize import divide  # only now: pipelines and sharding take a while to import

        return divide(config, world.device, precision)
    return Replicas(config, world, precision)
