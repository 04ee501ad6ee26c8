"""How a model is divided among ranks, and how a step goes through the parts.

parts       what the training loop asks of any layout
mesh        the ranks as a grid        replicas    every rank has the whole model (DDP)
division    every other layout, in one short function: slices → stages → weights → recomputation → fp8 → compilation → shards
tensor      a model's plan as DTensors, the sequence in parts      context   the sequence in parts for attention too
pipeline    stages and their schedule  blocks      what is done to each block
weights     a rank's first values      gradients   their norm and clipping, right in every layout
fp8         products in fp8
nxd         all of this by NxD Core, on devices that only it divides a model over; nxd_layers and nxd_shards are its parts
"""

from __future__ import annotations

import torch

from ...config import Config
from ..world import World
from .parts import Parts
from .replicas import Replicas

__all__ = ["Parts", "Replicas", "arrange"]


def arrange(config: Config, world: World) -> Parts:
    """The model and its optimizer as this rank has them; all ranks call it together.

    Where each rank can have a whole model and its weights are of fp32, DDP is the fastest, by far on CPUs (tests/bench/LOG.md).
    """
    if world.device.lazy:
        from .nxd import Nxd  # only now: NxD is there on Trn1 alone

        return Nxd(config, world)
    layout = config.train.layout
    divided = layout.shard * layout.tensor * layout.pipeline * layout.context > 1
    precision = world.precision(config.train.precision)
    casts = precision in (torch.bfloat16, torch.float16) and world.device.casts and config.train.weights == "fp32"
    if divided or not (casts or precision == torch.float32):
        from .division import divide  # only now: pipelines and sharding take a while to import

        return divide(config, world.device, precision)
    return Replicas(config, world, precision)
