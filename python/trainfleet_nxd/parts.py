"""Implementation of `Parts` with NxD Core, for Trn1.

It supports tensor, sequence and pipeline parallelism, ZeRO-1, and fp32 master weights for AdamW.
NxD provides the parallel layers, the pipeline schedule, the optimizer step, and the reduction,
clipping and sharding of gradients. trainfleet provides the model, its initial values, and the names
and files of checkpoints.

Every step runs the same programs: one per micro-batch, and one for the update. A compilation after
the second step is an error, because each one takes minutes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import neuronx_distributed as nxd
import torch
from neuronx_distributed.parallel_layers.comm import all_gather, all_reduce
from neuronx_distributed.parallel_layers.parallel_state import (
    get_data_parallel_replica_groups,
    get_tensor_model_parallel_replica_groups,
)
from neuronx_distributed.utils.activation_checkpoint import apply_activation_checkpointing
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainfleet import models
from trainfleet.config import Config
from trainfleet.config.optimizers import OPTIMIZERS
from trainfleet.config.tables import named
from trainfleet.devices.base import Lazy
from trainfleet.engine.batches import MicroBatch, filled
from trainfleet.engine.parallel.pipeline import Absent
from trainfleet.engine.parallel.rank_model import MOMENTS, State
from trainfleet.engine.parallel.tensor import find_tied
from trainfleet.engine.timing import Stopwatch
from trainfleet.engine.world import World
from trainfleet.models.network import Network
from trainfleet.trust.errors import RunError

from . import layers as nxd_layers
from . import shards as nxd_shards
from .shards import Slice

SETTLED = 2  # initial steps that may compile; optimizer state exists from the second on


@dataclass
class Owned:
    """A parameter on this rank.

    `slice` is its position in the entire parameter. `master` is the tensor that the optimizer
    updates: the parameter itself, or its ZeRO-1 shard.
    """

    module: nn.Module
    attribute: str
    slice: Slice
    master: Tensor

    @property
    def parameter(self) -> Tensor:
        return cast(Tensor, self.module._parameters[self.attribute])


class Nxd:
    """A rank's part of a model, split by NxD Core."""

    whole = None
    scale: Tensor | None = None

    def __init__(self, config: Config, world: World) -> None:
        """Builds this rank's part. Must be called on all ranks."""
        self.device, self.size, self.length = (
            cast(Lazy, world.device),
            config.train.micro_batch_size,
            config.train.sequence_length,
        )
        train, layout = config.train, config.train.parallelism
        half = world.precision(train.precision) == torch.bfloat16
        self.zero = not OPTIMIZERS[train.optimizer].whole and layout.fsdp == config.data_parallel
        self.format = torch.bfloat16 if half and self.zero else torch.float32
        self.casts = half and not self.zero
        options = settings(config, self.zero)
        # number of tensor ranks with the same key-value heads
        copies = max(1, layout.tensor // config.model.kv_heads)
        self.grid = nxd_shards.grid(copies)
        self.data, self.ways, self.depth = self.grid.data, self.grid.ways, layout.pipeline
        self.micro_batches = train.global_batch_size // (self.ways * train.micro_batch_size)
        self.like: MicroBatch | None = None  # latest training batch
        with torch.device("meta"):
            self.root = models.build(config.model)
        if layout.tensor > 1:
            nxd_layers.realise(self.root, self.format, copies, self.grid.tensor)
        if layout.pipeline > 1:  # later stages see only slices of the sequence
            self.root.positions = torch.arange(self.length, device=self.device.torch_device)
        self.stages = (
            nxd_layers.Stages(self.root, layout.pipeline, self.grid.stage)
            if layout.pipeline > 1
            else None
        )
        names, tied = (
            {(id(module), name): where for where, module, name in weights_of(self.root)},
            find_tied(self.root),
        )
        self.again = {
            names[id(module), name]: names[id(owner), name]
            for module, (owner, name) in tied.items()
        }
        # filled now, because NxD moves the model later and drops custom parameter attributes
        self.slices: dict[str, Slice] = {}
        drawn = self._draw(train.seed)
        if train.activation_checkpointing == "full":
            recompute(self.stages.head if self.stages else self.root)
        if self.stages:
            self.stages.initialize(options)
        self.model: Any = (
            None if self.stages else nxd.initialize_parallel_model(options, lambda: self.root)
        )
        for module, (
            owner,
            name,
        ) in tied.items():  # the move to the device separated tied parameters
            module._parameters[name] = owner._parameters[name]
        self.optimizer = optimizer(options, self.root, config)
        self.held = self._hold(names)
        self._add_up(copies)
        self.set_weights(drawn)
        self.steps, self.compiled = 0, 0

    @torch.no_grad()
    def _draw(self, seed: int) -> dict[str, Tensor]:
        """Draws the initial fp32 values of this rank's parameters, as slices of the values that a
        single process would draw.
        """
        found: dict[str, Tensor] = {}
        made: dict[int, nn.Parameter] = {}
        for where, module, name in weights_of(self.root):
            old = cast(Tensor, module._parameters[name])
            part = self.slices[where] = Slice.of(old)
            if id(old) not in made:
                values = self.root.draw(where, part.shape, seed, self.device.generator)
                found[where] = part.cut(values, self.grid).clone()
                made[id(old)] = nn.Parameter(found[where].to(self.format))
                vars(made[id(old)]).update(vars(old))  # keep the attributes that NxD sets
            module._parameters[name] = made[id(old)]
        return found

    def _hold(self, names: Mapping[tuple[int, str], str]) -> dict[str, Owned]:
        """Returns this rank's parameters, keyed by their names in the entire model.

        A tied parameter appears only once.
        """
        inner = self.optimizer.optimizer
        groups = zip(
            inner.param_groups,
            (inner.base_optimizer if self.zero else inner).param_groups,
            strict=True,
        )
        masters = {
            id(own): master
            for ours, theirs in groups
            for own, master in zip(ours["params"], theirs["params"], strict=True)
        }
        found: dict[str, Owned] = {}
        seen: set[int] = set()
        for module in self.root.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in masters and id(parameter) not in seen:
                    seen.add(id(parameter))
                    where = names[id(module), name]
                    found[where] = Owned(module, name, self.slices[where], masters[id(parameter)])
        # create the moments now, so that the first step runs the same program as later steps
        for held in found.values():
            moments = {name: torch.zeros_like(held.master) for name in ("exp_avg", "exp_avg_sq")}
            self.states[held.master].update({"step": torch.zeros(()), **moments})
        return found

    def _add_up(self, copies: int) -> None:
        """Registers hooks that sum gradients over ranks with the same key-value heads.

        This keeps the copies of these heads equal.
        """
        rows = [list(row) for row in get_tensor_model_parallel_replica_groups()]
        groups = [
            row[first : first + copies] for row in rows for first in range(0, len(row), copies)
        ]

        def total(gradient: Tensor) -> Tensor:
            found = gradient.clone()
            all_reduce("sum", found, groups)
            return found

        for held in self.held.values():
            if held.slice.copies > 1:
                held.parameter.register_hook(total)  # type: ignore[no-untyped-call]

    @property
    def states(self) -> Any:
        inner = self.optimizer.optimizer
        return (inner.base_optimizer if self.zero else inner).state

    def listen(self, watch: Stopwatch) -> None:
        # the host only traces the passes, so its timings do not reflect device time
        pass

    def train(self, batches: Iterator[tuple[int, MicroBatch]], watch: Stopwatch) -> Tensor:
        self.compiled = self.device.compilations()
        if self.stages:
            given = [batch for _, batch in batches]
            self.like = given[0]
            with watch.part("pipeline"):
                loss = self.stages.train(given)
            # only the last stage has a loss
            return self._zero() if loss is None else loss * self.depth
        total = self._zero()
        for _, batch in batches:
            self.like = batch
            with watch.own_work(), self._format():
                loss = self.model(batch.inputs, **batch.named) / self.micro_batches
            with watch.part("backward"):
                loss.backward()
            total += loss.detach()
            self.device.settle()
        return total

    def _zero(self) -> Tensor:
        return torch.zeros((), device=self.device.torch_device)

    def update(self, rate: float, skips: Callable[[Tensor], Tensor]) -> None:
        """Runs one optimizer step.

        NxD only returns the gradient norm after the step, so a bad step is applied, and the next
        check then ends the run.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        skips(self.optimizer.grad_norm.reshape(()).float())
        self.optimizer.zero_grad(set_to_none=True)
        self.device.settle()
        self.steps += 1
        new = self.device.compilations() - self.compiled
        if new and self.steps > SETTLED:
            raise RunError(
                f"{new} programs were compiled again in step {self.steps} of this attempt",
                where="PyTorch/XLA",
                why="every step after the second must run the same programs; a shape or a constant "
                "changed",
                next="set XLA_IR_DEBUG=1 XLA_HLO_DEBUG=1 to find it; see "
                "docs/source/learn/troubleshoot.md in github.com/pytorch/xla",
            )

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], most: int) -> Tensor:
        """Returns this rank's share of the summed loss.

        All tensor ranks compute the same sum, so each returns an equal share. All ranks run the
        same number of passes, because every program contains collectives across all ranks.
        """
        total = self._zero()
        self.root.eval()
        passes = -(-most // self.size)
        passes = -(-passes // self.micro_batches) * self.micro_batches if self.stages else passes
        assert self.like, "validation needs a training step first"
        given = list(filled(batches, passes, self.like.blank(self.size)))
        for start in range(0, len(given), self.micro_batches) if self.stages else ():
            assert self.stages
            mean = self.stages.evaluate(given[start : start + self.micro_batches])
            total += 0 if mean is None else mean * self.micro_batches
        for batch in given if not self.stages else ():
            with self._format():
                total += self.model(batch.inputs, **batch.named, reduction="sum")
            self.device.settle()
        self.root.train()
        return total / self.grid.slices

    def _format(self) -> AbstractContextManager[object]:
        return self.device.autocast(torch.bfloat16) if self.casts else nullcontext()

    def state(self) -> State:
        found: State = {"model": self.weights(), "optimizer": {}}
        for name, held in self.held.items():
            for moment, value in self.states[held.master].items():
                part = (
                    value.detach().cpu()
                    if not value.ndim
                    else held.slice.join(value, self.grid, self.zero)
                )
                found["optimizer"][f"{MOMENTS}{name}.{moment}"] = part
        return found

    def restore(self, state: State) -> None:
        self.set_weights(state["model"])
        for name, held in self.held.items():
            for moment, target in self.states[held.master].items():
                nxd_shards.put(target, state["optimizer"][f"{MOMENTS}{name}.{moment}"])
        self.device.settle()

    def weights(self) -> State:
        """Returns the model's weights. With ZeRO-1, these are the fp32 master weights.

        Tied weights appear under both of their names.
        """
        found: State = {
            name: held.slice.join(held.master, self.grid, self.zero)
            for name, held in self.held.items()
        }
        return found | {name: found[first] for name, first in self.again.items() if first in found}

    def set_weights(self, weights: Mapping[str, Tensor], whole: bool = False) -> None:
        """Loads weights into both the optimizer and the model.

        NxD's own loading leaves one of them stale (README, Trainium).
        """
        for name, held in self.held.items():
            if name not in weights:
                continue
            found = held.slice.cut(weights[name], self.grid) if whole else weights[name]
            if self.zero and not isinstance(found, DTensor):
                found = share(found, self.grid)
            nxd_shards.put(held.master, found)
            if self.zero:
                self._spread(held)
        self.device.settle()

    def _spread(self, held: Owned) -> None:
        """All-gathers a parameter's shards from the data-parallel ranks into the model."""
        shares = held.master.data.to(held.parameter.dtype)
        full = (
            all_gather(shares, dim=0, groups=get_data_parallel_replica_groups())
            if self.ways > 1
            else shares
        )
        held.parameter.data.copy_(full[: len(held.parameter)])
        self.device.settle()

    def broken(self) -> list[str]:
        return [name for name, held in self.held.items() if not bool(held.master.isfinite().all())]


def settings(config: Config, zero: bool) -> dict[str, Any]:
    """Returns NxD's config. This also creates NxD's process groups."""
    train, layout = config.train, config.train.parallelism
    ways = config.data_parallel
    found: dict[str, Any] = nxd.neuronx_distributed_config(
        tensor_parallel_size=layout.tensor,
        pipeline_parallel_size=layout.pipeline,
        pipeline_config={
            "num_microbatches": train.global_batch_size // (ways * train.micro_batch_size),
            "use_zero1_optimizer": zero,
        },
        optimizer_config={
            "zero_one_enabled": zero,
            "grad_clipping": True,
            "max_grad_norm": train.gradient_clip or math.inf,
        },
        sequence_parallel=layout.tensor > 1,
        mixed_precision_config={
            "use_master_weights": zero,
            "use_fp32_grad_acc": zero,
            "use_master_weights_in_ckpt": zero,
        },
    )
    return found


def optimizer(options: dict[str, Any], model: nn.Module, config: Config) -> Any:
    """Wraps the configured optimizer in NxD's.

    Weight decay applies to matrices, but not to vectors.
    """
    train = config.train
    values: dict[str, Any] = {
        "lr": train.learning_rate,
        "betas": (train.beta1, train.beta2),
        "eps": train.epsilon,
    }
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {
            "params": [each for each in parameters if each.ndim >= 2],
            "weight_decay": train.weight_decay,
        },
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]
    row = OPTIMIZERS[train.optimizer]
    if row.whole:
        groups[0]["matrix"] = True
    elif options["optimizer_config"]["zero_one_enabled"]:
        # NxD 0.18 does not pass this limit on, so torch_xla would use its default of 1.0
        values["max_norm"] = options["optimizer_config"]["max_grad_norm"]
    return nxd.initialize_parallel_optimizer(options, named(row.xla), groups, **values)


def weights_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields the name, module and attribute of every parameter.

    A tied parameter appears under each of its names.
    """
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{name}", module, name


def recompute(model: Network) -> None:
    """Enables activation checkpointing: blocks keep only their inputs for the backward pass."""
    kind = type(
        next(
            block
            for block in model.get_submodule(model.plan.blocks).children()
            if not isinstance(block, Absent)
        )
    )
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kind))


def share(slice_: Tensor, grid: nxd_shards.Grid) -> Tensor:
    """Returns this data-parallel rank's rows of a slice."""
    each = -(-len(slice_) // grid.ways)
    return slice_[grid.data * each : (grid.data + 1) * each]
