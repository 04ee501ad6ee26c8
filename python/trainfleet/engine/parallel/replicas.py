"""Plain data parallelism: every rank has the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ... import models
from ...config import Config
from .. import optimizer
from ..batches import Batch
from ..meter import Stopwatch
from ..world import World
from . import blocks


class Replicas:
    """The whole model, whose gradients come out as means over the ranks, reduced in buckets while backward still runs."""

    stages = 1
    copies = 1  # ranks that compute the same loss
    whole = True  # whether this rank has all of the model

    def __init__(self, config: Config, world: World) -> None:
        self.device, train = world.device, config.train
        self.data, self.ways = world.rank, world.size
        self.micro_batches = train.global_batch // (world.size * train.micro_batch)
        self.model = models.build(config.model)
        self.model.initialize(train.seed)
        self.model.to(self.device.torch_device)
        parts = list(self.model.get_submodule(self.model.plan.blocks).children())
        blocks.recompute(parts, train.recompute)
        self.shared: torch.nn.Module = self.model
        if world.size > 1:
            self.shared = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self._settle_buckets()
        if train.compile:  # only now: the pass of two tokens would be compiled first, and everything then for any shape
            blocks.compile(self.model, parts, train.recompute)

    def _settle_buckets(self) -> None:
        """Has DDP lay out its buckets for good, with a backward pass of two tokens that nothing remains of.

        It lays them out anew after the first pass, and gloo adds up ranks in an order that depends on a gradient's place: a
        resumed run's first step, with the first layout, would differ from an unbroken run's in its last bits (4 ranks, seen).
        """
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=self.device.torch_device)
        self.shared(tokens, targets=tokens).backward()
        self.model.zero_grad(set_to_none=True)

    def train(self, batches: Iterator[tuple[int, Batch]], watch: Stopwatch) -> Tensor:
        """Leaves the gradients of the global batch's mean loss in the parameters; this rank's part of that loss comes back."""
        total = torch.zeros((), device=self.device.torch_device)
        for left, batch in batches:
            shared = self.shared
            with shared.no_sync() if left and isinstance(shared, DistributedDataParallel) else nullcontext():
                with watch.own_work():
                    loss = shared(batch.inputs, **batch.named) / self.micro_batches
                with watch.part("backward"):
                    loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch], most: int) -> Tensor:
        """The summed loss of this rank's batches."""
        total = torch.zeros((), dtype=torch.float64, device=self.device.torch_device)
        self.model.eval()
        for batch in batches:
            total += self.model(batch.inputs, **batch.named, reduction="sum")
        self.model.train()
        return total

    def clip(self, limit: float) -> Tensor:
        """The gradients' global norm, left on the device; they are scaled down to `limit` when over it (0: never)."""
        return optimizer.clip(self.model.parameters(), limit)
