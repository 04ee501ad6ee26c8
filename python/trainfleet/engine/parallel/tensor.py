"""Implements tensor and sequence parallelism: applies a model's plan with DTensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ...models.network import Network, Total
from ...models.parallel_plan import ParallelPlan
from ..optimizers import whole

PART, WHOLE = Shard(1), Replicate()  # placements of the sequence, dimension 1 of [B, T, D]


def split(model: Network, mesh: DeviceMesh) -> None:
    """Gives this rank its slice of every matrix. Between modules a hidden state is the rank's part
    of the sequence.
    """
    tied = find_tied(model)
    for module in model.modules():
        if isinstance(module, Total):
            module.register_forward_hook(lambda _, inputs, loss: whole(loss))
    parallelize_module(model, mesh, styles(model.plan))
    for module, (owner, name) in tied.items():  # each got a separate slice
        module._parameters[name] = owner._parameters[name]


def styles(plan: ParallelPlan) -> dict[str, ParallelStyle]:
    """Returns the transformation of each module. Only the logits stay a DTensor: the loss is
    computed from slices of the vocabulary.
    """
    found: dict[str, ParallelStyle] = {}
    for name in plan.embeddings:
        found[name] = RowwiseParallel(
            input_layouts=WHOLE, output_layouts=PART if name == plan.divided else WHOLE
        )
    if plan.divided not in plan.embeddings:
        found[plan.divided] = PrepareModuleOutput(output_layouts=WHOLE, desired_output_layouts=PART)
    found |= {name: SequenceParallel(use_local_output=True) for name in plan.norms}
    found |= {
        name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in plan.head_norms
    }
    found |= {name: GatherInput() for name in plan.gathered if name not in plan.column}
    found |= {name: GatherInput(alike=True) for name in plan.alike}
    found |= {name: ColwiseParallel() for name in plan.column}
    found |= {name: RowwiseParallel(output_layouts=PART) for name in plan.row}
    gathered = plan.head in plan.gathered
    found[plan.head] = ColwiseParallel(
        input_layouts=PART if gathered else WHOLE, use_local_output=False
    )
    return found


class GatherInput(ParallelStyle):
    """Gathers a module's first input, a part of the sequence; its gradient is summed over the ranks
    and scattered.

    A module that every rank computes `alike` gets a plain tensor, so that each rank has its entire
    gradient.
    """

    def __init__(self, alike: bool = False) -> None:
        super().__init__()
        self.alike = alike

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            part: Tensor = inputs[0]
            whole = DTensor.from_local(part, device_mesh, (PART,), run_check=False).redistribute(
                placements=(WHOLE,)
            )
            return (whole.to_local() if self.alike else whole), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


def find_tied(model: nn.Module) -> dict[nn.Module, tuple[nn.Module, str]]:
    """Returns the modules with tied parameters: for each, the owner and the parameter's name."""
    owners: dict[int, nn.Module] = {}
    found = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            owner = owners.setdefault(id(parameter), module) if parameter is not None else module
            if owner is not module:
                found[module] = (owner, name)
    return found
