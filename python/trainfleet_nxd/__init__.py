"""Supports Trn1: PyTorch/XLA as the device, and NxD Core to divide a model. A separate platform
(trainfleet.config.platforms), next to the engine's.

device                          a NeuronCore of Trn1
parts, layers, shards, stages   a rank's part of the model, by NxD Core
weights, folder, files          NxD Core's own checkpoints, read and written without it; `folder`
                                needs no torch
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
    """The interface that config/platforms.py calls. torch is imported only if it is needed."""

    device = "neuron_xla"

    def open(self, index: int) -> Any:
        from .device import NeuronXla

        return NeuronXla(index)

    def arrange(self, config: Config, world: Any) -> Any:
        from .parts import Nxd  # NxD exists only on Trn1

        return Nxd(config, world)

    checkpoint_at = staticmethod(folder.tag_of)
    require_readable = staticmethod(folder.require_readable)
    described = staticmethod(folder.described)

    def load(self, checkpoint: Path, shape: Any, sizes: Any) -> Any:
        from .files import load

        return load(checkpoint, shape, sizes)

    def saving(
        self, config: Config, degrees: Degrees, where: str
    ) -> Callable[[Any, Path], list[str]]:
        from . import files, weights

        layout, shape = config.train.parallelism, config.model
        found = weights.Degrees(degrees[0] or layout.tensor, degrees[1] or layout.pipeline)
        if why := weights.refusal(shape, found):
            then = "use FORMAT=nxd-tp1, or no FORMAT for a Hugging Face folder"
            raise RunError(
                f"can't be exported for NxD Core with {found}", where=where, why=why, next=then
            )
        return lambda whole, out: files.save(whole, shape, found, out)
