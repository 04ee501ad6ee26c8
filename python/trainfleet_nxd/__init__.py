"""Platform for Trn1 (trainfleet.config.platforms): PyTorch/XLA is the device, and NxD Core splits
the model.

device                  a Trn1 NeuronCore
parts, layers, shards   a rank's part of the model, built with NxD Core
weights, folder         checkpoints in NxD Core's format, read and written without NxD Core;
                        `folder` does not import torch
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainfleet.config import Config
from trainfleet.config.platforms import Degrees
from trainfleet.trust.errors import RunError

from . import folder


class Platform:
    """Implementation of the platform interface (config/platforms.py). Imports torch only when
    needed.
    """

    device = "neuron_xla"

    def open(self, index: int) -> Any:
        from .device import NeuronXla

        return NeuronXla(index)

    def arrange(self, config: Config, world: Any) -> Any:
        from .parts import Nxd  # NxD is installed only on Trn1

        return Nxd(config, world)

    checkpoint_at = staticmethod(folder.tag_of)
    require_readable = staticmethod(folder.require_readable)
    described = staticmethod(folder.described)

    def load(self, checkpoint: Path, shape: Any, sizes: Any) -> Any:
        from .weights import load

        return load(checkpoint, shape, sizes)

    def saving(
        self, config: Config, degrees: Degrees, where: str
    ) -> Callable[[Any, Path], list[str]]:
        from . import weights

        layout, shape = config.train.parallelism, config.model
        found = weights.Degrees(degrees[0] or layout.tensor, degrees[1] or layout.pipeline)
        if why := weights.refusal(shape, found):
            then = "use FORMAT=nxd-tp1, or omit FORMAT to export a Hugging Face folder"
            raise RunError(
                f"can't be exported for NxD Core with {found}", where=where, why=why, next=then
            )
        return lambda whole, out: weights.save(whole, shape, found, out)
