"""Pipeline parallelism: divides the blocks into stages, and schedules the micro-batches."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from ...devices import Device
from ...models.network import Network
from ..batches import MicroBatch
from ..optimizers import whole
from .gradients import Mesh, local, scaled
from .tensor import find_tied


class Absent(nn.Module):
    """Placeholder for a module that belongs to another stage. Returns its first argument."""

    def forward(self, x: Tensor, *others: object) -> Tensor:
        return x


class StageModule(nn.Module):
    """Pipeline stage as a module.

    Maps tokens or a hidden state to a hidden state, or to features in the last stage.
    """

    def __init__(self, part: Network) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor, **documents: Tensor) -> Tensor:
        return self.part.features(x, **documents)


def cut(model: Network, stages: int, kept: list[int]) -> list[StageModule]:
    """Strips the model down to the stages in `kept` and returns one module per kept stage.

    Parameters keep their names, so checkpoints do not depend on the stages.
    """
    last, spare, views = stages - 1, spare_of(model), []
    for stage in kept:
        view = copy.copy(model)
        view._modules = dict(model._modules)
        _keep_blocks(view, set(range(*_bounds(model, stage, stages))))
        if stage > 0:  # the last stage keeps the embedding if it is tied to the head
            _remove(view, spare if stage == last else model.plan.first)
        if stage < last:
            _remove(view, model.plan.last)
        views.append(StageModule(view))
    _keep_blocks(
        model, {block for stage in kept for block in range(*_bounds(model, stage, stages))}
    )
    if 0 not in kept:
        _remove(model, spare if last in kept else model.plan.first)
    if last not in kept:
        _remove(model, model.plan.last)
    return views


def spare_of(model: Network) -> tuple[str, ...]:
    """Returns the first-stage modules that the last stage can drop.

    The last stage must keep modules with weights tied to its own.
    """
    owners = {owner for owner, _ in find_tied(model).values()}
    found = []
    for name in model.plan.first:
        module = model.get_submodule(name)
        if owners.isdisjoint(module.modules()):
            found.append(name)
        else:
            found += [
                f"{name}.{child}" for child, part in module.named_children() if part not in owners
            ]
    return tuple(found)


def _bounds(model: Network, stage: int, stages: int) -> tuple[int, int]:
    """Returns a stage's range of block indices as (start, end).

    Stage sizes differ by at most one block.
    """
    count = len(model.get_submodule(model.plan.blocks))  # type: ignore[arg-type]
    return count * stage // stages, count * (stage + 1) // stages


def _keep_blocks(model: Network, kept: set[int]) -> None:
    blocks = model.get_submodule(model.plan.blocks)
    assert isinstance(blocks, nn.ModuleList)
    setattr(
        model,
        model.plan.blocks,
        nn.ModuleList(b if i in kept else Absent() for i, b in enumerate(blocks)),
    )


def _remove(model: Network, names: tuple[str, ...]) -> None:
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Absent())


class Linked(PipelineStage):
    """Pipeline stage with workarounds for two torch bugs.

    During setup, torch 2.9 sends int64 but receives fp32, so gloo aborts the process (8 bytes
    instead of 4). This class uses fp32 on both sides. torch 2.9 to 2.11 also run each stage once,
    with dropout, to infer shapes. A resumed run would then get different random numbers, so this
    class restores the generators afterwards.
    """

    def __init__(
        self, module: nn.Module, number: int, count: int, device: Device, group: dist.ProcessGroup
    ) -> None:
        super().__init__(module, number, count, device.torch_device, group=group)
        self.generators = device.generators()

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        states = [generator.get_state() for generator in self.generators]
        found = super()._prepare_forward_infra(*args, **kwargs)
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)
        return found

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        found: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
        for each in found:
            each.tensor = each.tensor.float()
        return found


class Pipeline:
    """This rank's stages, and the schedule that runs a step through the whole pipeline."""

    def __init__(
        self, stages: list[StageModule], mesh: Mesh, micro_batches: int, device: Device
    ) -> None:
        layout = mesh.layout
        count = layout.pipeline * layout.virtual_stages
        numbers = numbers_of(mesh)
        group = mesh.group("pipeline")
        made = [
            Linked(stage, number, count, device, group)
            for stage, number in zip(stages, numbers, strict=True)
        ]
        self.first = numbers[0] == 0
        self.last = numbers[-1] == count - 1
        self.count = micro_batches
        self.head = stages[-1].part
        self.reduction = "mean"
        self.divisor = 1.0
        self.scale: Tensor | None = None
        # Otherwise, torch keeps the outputs of all micro-batches until the step ends. torch 2.9
        # lacks this option.
        self.lean: dict[str, Any] = (
            {"return_outputs": False}
            if "return_outputs" in signature(Schedule1F1B.step).parameters
            else {}
        )
        self.schedule: Schedule1F1B | ScheduleInterleaved1F1B
        if layout.virtual_stages == 1:
            self.schedule = Schedule1F1B(
                made[0], micro_batches, loss_fn=self._loss, scale_grads=False
            )
        else:
            self.schedule = ScheduleInterleaved1F1B(
                [*made], micro_batches, loss_fn=self._loss, scale_grads=False
            )

    def train(self, batch: MicroBatch, scale: Tensor | None = None) -> Tensor:
        """Computes the gradients, multiplied by `scale`.

        Returns the mean loss on the last stage and 0 on other stages.
        """
        self.reduction, self.divisor = batch.averaged(self.count, self.head.parts)
        self.scale, losses = scale, list[Tensor]()
        self.schedule.step(*self._given(batch), **self._named(batch, losses), **self.lean)
        total = self._sum(losses, batch.inputs)
        return total if scale is None else total / scale

    def evaluate(self, batch: MicroBatch) -> Tensor:
        """Returns the summed loss on the last stage and 0 on other stages."""
        self.reduction = "sum"
        self.divisor = 1.0
        self.scale = None
        losses = list[Tensor]()
        self.schedule.eval(*self._given(batch), **self._named(batch, losses))
        return self._sum(losses, batch.inputs)

    def _given(self, batch: MicroBatch) -> list[Tensor]:
        return [batch.inputs] if self.first else []

    def _named(self, batch: MicroBatch, losses: list[Tensor]) -> dict[str, Any]:
        """Returns the schedule's named arguments. Every stage gets the document indices."""
        documents = {} if batch.documents is None else {"documents": batch.documents}
        return {"target": batch.targets if self.last else None, "losses": losses, **documents}

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        loss = whole(self.head.loss(x, targets, self.reduction))
        return scaled(loss / self.divisor, self.scale)

    def _sum(self, losses: list[Tensor], like: Tensor) -> Tensor:
        return (
            torch.stack([loss.detach() for loss in losses]).sum()
            if losses
            else torch.zeros((), device=like.device)
        )


def numbers_of(mesh: Mesh) -> list[int]:
    """Returns the stage numbers of this rank.

    With interleaving, a rank has several stages, spaced `pipeline` stages apart (Narayanan et al.
    2021).
    """
    return [mesh.stage + turn * mesh.layout.pipeline for turn in range(mesh.layout.virtual_stages)]


class Tie:
    """Weights shared by the first and last stage, which both get the sum of their gradients."""

    def __init__(self, model: Network, names: list[str], mesh: Mesh) -> None:
        """Creates the process groups. Must be called on all ranks."""
        for line in mesh.grid.mesh.flatten(1).T.tolist():
            group = dist.new_group([line[0], line[-1]])
            if dist.get_rank() in (line[0], line[-1]):
                self.group = group
        held = dict(model.named_parameters())
        self.shared = [held[name] for name in names if name in held]
        # the gradient norm counts tied weights only once, on the first stage
        self.copies = frozenset(id(parameter) for parameter in self.shared if mesh.stage > 0)

    def settle(self) -> None:
        for parameter in self.shared:
            dist.all_reduce(local(parameter), group=self.group)
