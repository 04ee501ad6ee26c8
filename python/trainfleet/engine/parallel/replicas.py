"""Implements plain data parallelism: every rank has the entire model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ... import models
from ...config import Config
from .. import optimizer
from ..batches import MicroBatch
from ..timing import Stopwatch
from ..world import World
from . import blocks, gradients, materialize
from .rank_model import TorchParts


class Replicas(TorchParts):
    """The entire model on every rank. Gradients are averaged over the ranks in buckets while the
    backward pass still runs.
    """

    model: models.Network

    def __init__(
        self, config: Config, world: World, precision: torch.dtype = torch.float32
    ) -> None:
        """Sets up the model; `precision`: the format of products, to which their factors are
        cast.
        """
        self.device, train = world.device, config.train
        self.precision = precision
        self.data, self.ways = world.rank, world.size
        self.micro_batches = train.global_batch_size // (world.size * train.micro_batch_size)
        with torch.device("meta"):
            model = models.build(config.model)
        materialize.draw(model, train.seed, self.device, torch.float32)
        super().__init__(
            model, optimizer.build(model, train, self.device, precision), train.gradient_clip
        )
        parts = list(model.get_submodule(model.plan.blocks).children())
        blocks.recompute(parts, train.recomputation, self.device)
        self.shared: torch.nn.Module = self.model
        if world.size > 1:
            self.shared = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self._settle_buckets()
        # only now: otherwise the pass of two tokens would be compiled first, and later all code for
        # any shape
        if train.compile:
            blocks.compile_blocks(self.model, parts, train.recomputation, self.device)

    @property
    def whole(self) -> models.Network:
        return self.model

    def listen(self, watch: Stopwatch) -> None:
        if self.ways > 1:
            watch.hear(self.model.get_submodule(self.model.plan.first[0]))

    def _settle_buckets(self) -> None:
        """Makes DDP rebuild its buckets now, by a backward pass of two tokens; discards its
        gradients.

        DDP rebuilds them after its first backward pass, and gloo's order of summation depends on
        the place of a gradient. Without this, a resumed run's first step would differ from an
        unbroken run's in its last bits (seen with 4 ranks).
        """
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=self.device.torch_device)
        self.shared(tokens, targets=tokens).backward()
        self.model.zero_grad(set_to_none=True)

    def train(self, batches: Iterator[tuple[int, MicroBatch]], watch: Stopwatch) -> Tensor:
        total = torch.zeros((), device=self.device.torch_device)
        for left, batch in batches:
            shared = self.shared
            with (
                shared.no_sync()
                if left and isinstance(shared, DistributedDataParallel)
                else nullcontext()
            ):
                with watch.own_work(), self._casting():
                    loss = shared(batch.inputs, **batch.named) / self.micro_batches
                with watch.part("backward"):
                    gradients.scaled(loss, self.scale).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], most: int) -> Tensor:
        total = torch.zeros((), dtype=self.device.loss_sums, device=self.device.torch_device)
        self.model.eval()
        for batch in batches:
            with self._casting():
                total += self.model(batch.inputs, **batch.named, reduction="sum")
        self.model.train()
        return total

    def _casting(self) -> AbstractContextManager[object]:
        whole = self.precision == torch.float32
        return (
            nullcontext()
            if whole
            else torch.autocast(self.device.torch_device.type, self.precision)
        )
