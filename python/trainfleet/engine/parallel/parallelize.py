"""Splits a model across ranks by the configured layout, and runs batches through the parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from ... import models
from ...config import Config
from ...devices import Device
from ...models.network import Network
from .. import optimizer
from ..batches import MicroBatch, filled, join
from ..optimizers import local, whole
from ..timing import Stopwatch
from ..world import PRECISIONS
from . import blocks, gradients, pipeline, tensor
from .gradients import Mesh
from .pipeline import Pipeline, StageModule, Tie
from .rank_model import TorchParts


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Returns this rank's blocks in order."""
    part = module.part if isinstance(module, StageModule) else module
    assert isinstance(part, Network)
    return [
        block
        for block in part.get_submodule(part.plan.blocks).children()
        if not isinstance(block, pipeline.Absent)
    ]


def tied_names(model: nn.Module) -> list[str]:
    """Returns the first name of each tied parameter."""
    shared = {id(owner._parameters[name]) for owner, name in tensor.find_tied(model).values()}
    return [name for name, parameter in model.named_parameters() if id(parameter) in shared]


class Division(TorchParts):
    """This rank's part of a split model. Parameters keep their names from the full model."""

    model: Network
    like: MicroBatch | None = None  # latest batch, used as a template for padding
    pipeline: Pipeline | None = None
    tie: Tie | None = None

    def __init__(self, config: Config, device: Device, precision: torch.dtype) -> None:
        """Creates this rank's part and its optimizer. Must be called on all ranks.

        `precision` is the matmul dtype. The order matters: matrices are sliced before blocks are
        wrapped, recomputation and fp8 come before compilation, and sharding comes after it. No rank
        ever holds the entire model.
        """
        self.config = config
        self.mesh = Mesh(config, device)
        self.device = device
        self.data = self.mesh.data
        self.ways = self.mesh.ways
        train, layout = config.train, self.mesh.layout
        with torch.device("meta"):
            model = models.build(config.model)
        tied = tied_names(model)
        self.stages = self._slice(model)
        blocks.draw(model, train.seed, device, PRECISIONS[train.param_dtype])
        self._place(model)
        precision = self._transform(model, precision)
        self._shard(precision)
        updates = optimizer.build(model, train, device, precision)
        super().__init__(model, updates, train.gradient_clip)
        self.micro_batches = train.global_batch_size // (self.ways * train.micro_batch_size)
        if layout.pipeline > 1:
            self.pipeline = Pipeline(self.stages, self.mesh, self.micro_batches, device)
            self.tie = Tie(model, tied, self.mesh) if tied else None

    def _slice(self, model: Network) -> list[Any]:
        """Removes all but this rank's slices and stages from the model. Returns the stages."""
        layout = self.mesh.layout
        if layout.tensor > 1:
            tensor.split(model, self.mesh.grid["tensor"])
        if layout.pipeline == 1:
            return [model]
        count = layout.pipeline * layout.virtual_stages
        return [*pipeline.cut(model, count, pipeline.numbers_of(self.mesh))]

    def _place(self, model: Network) -> None:
        """Sets the token positions that each stage processes."""
        mesh = self.mesh
        length = self.config.train.sequence_length
        device = self.device.torch_device
        for part in (model, *(stage.part for stage in self.stages if stage is not model)):
            part.positions = torch.arange(length, device=device)
            if mesh.context_group:
                tensor.spread(part, length, mesh.context, mesh.context_group, device)

    def _transform(self, model: Network, precision: torch.dtype) -> torch.dtype:
        """Applies recomputation, fp8 and compilation to the blocks.

        Returns the dtype of everything outside the fp8 matmuls.
        """
        train, layout, parts = self.config.train, self.mesh.layout, blocks_of(model)
        blocks.recompute(parts, train.recomputation, self.device)
        if precision == PRECISIONS["fp8"]:
            blocks.convert(parts, self.device)
            precision = torch.bfloat16
        if train.compile:
            loss = layout.tensor * layout.pipeline == 1
            blocks.compile_blocks(model, parts, train.recomputation, self.device, loss)
        return precision

    def _shard(self, precision: torch.dtype) -> None:
        train, mesh = self.config.train, self.mesh.sharing()
        if mesh.size() == 1 and precision == PRECISIONS[train.param_dtype]:
            return
        # In a pipeline, ZeRO 3 would free and regather the weights for every micro-batch.
        frees = self.mesh.layout.zero_stage == 3 and self.mesh.layout.pipeline == 1
        for stage in self.stages:
            blocks.shard(stage, blocks_of(stage), mesh, frees, precision, self.device)

    @property
    def whole(self) -> Network | None:
        """The entire model with this rank's weights, but without FSDP's hooks for sharding and
        casts.

        None if the layout splits the model.
        """
        if self.mesh.grid.size() > self.mesh.ways or self.mesh.layout.fsdp > 1:
            return None
        with torch.device("meta"):
            model = models.build(self.config.model)
        weights = {name: local(weight) for name, weight in self.model.state_dict().items()}
        model.load_state_dict(weights, assign=True)
        return model

    def listen(self, watch: Stopwatch) -> None:
        # In a pipeline, the passes of several micro-batches overlap, so no single gradient is known
        # to be the last.
        if self.mesh.grid.size() > 1 and not self.pipeline:
            watch.hear(self.model.get_submodule(self.model.plan.first[0]))
        if self.mesh.sharing().size() > 1 and not self.pipeline:
            watch.hear_blocks(blocks_of(self.model))

    def train(self, batches: Iterator[tuple[int, MicroBatch]], watch: Stopwatch) -> Tensor:
        with self._sliced():
            if self.pipeline:
                whole_batch = join([self.part(batch) for _, batch in batches])
                with watch.part("pipeline"):  # forward and backward passes of all micro-batches
                    loss = self.pipeline.train(whole_batch, self.scale)
            else:
                loss = torch.zeros((), device=self.device.torch_device)
                for left, batch in batches:
                    loss += self._pass(batch, left, watch)
        if self.tie:
            self.tie.settle()
        # Only the last stage has a loss, so scale it to make the mean over all ranks correct.
        return loss * self.mesh.layout.pipeline

    def _pass(self, batch: MicroBatch, left: int, watch: Stopwatch) -> Tensor:
        root = self.stages[0]
        if isinstance(root, FSDPModule):
            # Replicas all-reduce the sum over micro-batches once per step.
            root.set_requires_all_reduce(left == 0)
            if self.mesh.layout.zero_stage == 1:
                root.set_requires_gradient_sync(left == 0)
                root.set_reshard_after_backward(left == 0)
        batch = self.part(batch)
        reduction, divisor = batch.averaged(self.micro_batches, self.model.parts)
        with watch.own_work():
            loss = whole(root(batch.inputs, **batch.named, reduction=reduction)) / divisor
        with watch.part("backward"):
            gradients.scaled(loss, self.scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], most: int) -> Tensor:
        """Returns this rank's term of the summed loss, which is 0 except on the last stage.

        Tensor-parallel ranks compute the same loss, so each returns an equal fraction of it.

        All ranks must run the same number of forward passes, so a rank with fewer than `most`
        sequences adds padding, which the loss ignores.
        """
        total = torch.zeros((), dtype=self.device.loss_sums, device=self.device.torch_device)
        self.model.eval()
        filled = [self.part(batch) for batch in self._fill(batches, most)]
        with self._sliced():
            if self.pipeline:
                for start in range(0, len(filled), self.micro_batches):
                    total += self.pipeline.evaluate(
                        join(filled[start : start + self.micro_batches])
                    )
            else:
                for part in filled:
                    total += whole(self.stages[0](part.inputs, **part.named, reduction="sum"))
        self._reshard()
        self.model.train()
        return total / self.mesh.layout.tensor

    def _reshard(self) -> None:
        """Frees weights that were gathered for a forward pass without a backward pass."""
        for stage in self.stages:
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _fill(self, batches: Iterable[MicroBatch], most: int) -> Iterator[MicroBatch]:
        """Yields the batches padded to the micro-batch size, then padding-only batches."""
        size = self.config.train.micro_batch_size
        passes = -(-most // size)
        passes = -(-passes // self.micro_batches) * self.micro_batches if self.pipeline else passes
        assert self.like, "validation needs a training step first"
        return filled(batches, passes, self.like.blank(size))

    def clip(self, limit: float) -> Tensor:
        return gradients.clip(
            self.model.parameters(), limit, self.mesh, self.tie.copies if self.tie else frozenset()
        )

    def part(self, batch: MicroBatch) -> MicroBatch:
        """Restricts a batch to this rank's token positions.

        Document indices stay complete, because the attention mask also covers the other ranks'
        keys.
        """
        positions, self.like = self.model.positions, batch
        if self.mesh.context_group is None or positions is None:
            return batch
        part = batch.each(lambda tokens: tokens.index_select(1, positions))
        return part._replace(documents=batch.documents)

    def _sliced(self) -> AbstractContextManager[None]:
        """Returns a context in which the loss accepts vocab-parallel logits."""
        return loss_parallel() if self.mesh.layout.tensor > 1 else nullcontext()
