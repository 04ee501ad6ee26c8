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


def divide(config: Config, device: Device, precision: torch.dtype) -> Division:
    """Creates this rank's part of the model. Must be called on all ranks.

    The order matters: matrices are sliced before blocks are wrapped, recomputation and fp8 come
    before compilation, and sharding comes after it. No rank ever holds the entire model.
    """
    train, layout, mesh = config.train, config.train.parallelism, Mesh(config, device)
    format_ = PRECISIONS[train.param_dtype]
    with torch.device("meta"):
        model = models.build(config.model)
    tied = tied_names(model)
    if layout.tensor > 1:
        tensor.split(model, mesh.grid["tensor"])
    stages: list[Any] = [model]
    if layout.pipeline > 1:
        stages = pipeline.cut(
            model, layout.pipeline * layout.virtual_stages, pipeline.numbers_of(mesh)
        )
    blocks.draw(model, train.seed, device, format_)
    for part in (model, *(stage.part for stage in stages if isinstance(stage, StageModule))):
        part.positions = torch.arange(train.sequence_length, device=device.torch_device)
        if mesh.context_group:
            tensor.spread(
                part, train.sequence_length, mesh.context, mesh.context_group, device.torch_device
            )
    blocks.recompute(blocks_of(model), train.recomputation, device)
    if precision == PRECISIONS["fp8"]:
        blocks.convert(blocks_of(model), device)
        precision = torch.bfloat16  # dtype of everything outside the fp8 matmuls
    if train.compile:
        blocks.compile_blocks(
            model,
            blocks_of(model),
            train.recomputation,
            device,
            loss=layout.tensor * layout.pipeline == 1,
        )
    if mesh.sharing().size() > 1 or precision != format_:
        # In a pipeline, ZeRO 3 would free and regather the weights for every micro-batch.
        frees = layout.zero_stage == 3 and layout.pipeline == 1
        for stage in stages:
            blocks.shard(stage, blocks_of(stage), mesh.sharing(), frees, precision, device)
    return Division(config, device, mesh, model, stages, tied, precision)


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
    """This rank's part of a split model.

    Parameters keep the names that they have in the full model.
    """

    model: Network

    def __init__(
        self,
        config: Config,
        device: Device,
        mesh: Mesh,
        model: Network,
        stages: list[Any],
        tied: list[str],
        precision: torch.dtype,
    ) -> None:
        """Creates this rank's part.

        `tied` lists parameters shared by embedding and head. `precision` is the matmul dtype.
        """
        super().__init__(
            model,
            optimizer.build(model, config.train, device, precision),
            config.train.gradient_clip,
        )
        self.mesh, self.device, self.root, self.stages = mesh, device, stages[0], stages
        self.zero, self.size = config.train.parallelism.zero_stage, config.train.micro_batch_size
        self.data, self.ways, self.shape = mesh.data, mesh.ways, config.model
        self.micro_batches = config.train.global_batch_size // (
            mesh.ways * config.train.micro_batch_size
        )
        self.like: MicroBatch | None = None  # latest batch, used as a template for padding
        self.tie: Tie | None = None
        self.pipeline: Pipeline | None = None
        if mesh.layout.pipeline > 1:
            self.pipeline = Pipeline(stages, mesh, self.micro_batches, device)
            self.tie = Tie(model, tied, mesh) if tied else None

    @property
    def whole(self) -> Network | None:
        """The entire model with this rank's weights, or None if the layout splits it.

        It has none of the hooks with which FSDP shards and casts.
        """
        if self.mesh.grid.size() > self.mesh.ways or self.mesh.layout.fsdp > 1:
            return None
        with torch.device("meta"):
            model = models.build(self.shape)
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
        # Only the last stage has a loss, so this factor corrects the mean over all ranks.
        return loss * self.mesh.layout.pipeline

    def _pass(self, batch: MicroBatch, left: int, watch: Stopwatch) -> Tensor:
        if isinstance(self.root, FSDPModule) and self.zero == 1:
            self.root.set_requires_gradient_sync(left == 0)
            self.root.set_reshard_after_backward(left == 0)
        batch = self.part(batch)
        reduction, divisor = batch.averaged(self.micro_batches, self.model.parts)
        with watch.own_work():
            loss = whole(self.root(batch.inputs, **batch.named, reduction=reduction)) / divisor
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
                    total += whole(self.root(part.inputs, **part.named, reduction="sum"))
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
        passes = -(-most // self.size)
        passes = -(-passes // self.micro_batches) * self.micro_batches if self.pipeline else passes
        assert self.like, "validation needs a training step first"
        return filled(batches, passes, self.like.blank(self.size))

    def clip(self, limit: float) -> Tensor:
        return gradients.clip(
            self.model.parameters(), limit, self.mesh, self.tie.copies if self.tie else frozenset()
        )

    def part(self, batch: MicroBatch) -> MicroBatch:
        """Selects this rank's token positions from a batch, except from its document indices, which
        are needed for the other ranks' keys.
        """
        positions, self.like = self.model.positions, batch
        if self.mesh.context_group is None or positions is None:
            return batch
        part = batch.each(lambda tokens: tokens.index_select(1, positions))
        return part._replace(documents=batch.documents)

    def _sliced(self) -> AbstractContextManager[None]:
        """Returns a context in which the loss accepts vocab-parallel logits."""
        return loss_parallel() if self.mesh.layout.tensor > 1 else nullcontext()
