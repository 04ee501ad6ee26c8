"""A small NxD Core of our own, on CPUs and gloo: what engine/parallel/nxd.py uses of it, by its exact signatures, and no more.

It divides, communicates and shards as NxD documents, so that our code runs in CI, where NxD Core and torch_xla are not: tensor
ranks, sequence parallelism, ZeRO-1, and stages that all do their forward passes first. tests/unit/test_nxd_signatures.py holds its
signatures against those that were recorded from NxD's source; what NxD itself does with our code, check.py tells.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing as torch_s,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional

GROUPS: dict[str, list[list[int]]] = {}
MINE: dict[
    str, tuple[dist.ProcessGroup, int, int]
] = {}  # kind → the group, this rank's place in it, its size


def neuronx_distributed_config(
    tensor_parallel_size=1, pipeline_parallel_size=1, expert_parallel_size=1, context_parallel_size=1, pipeline_config=None,
    optimizer_config=None, activation_checkpoint_config=None, pad_model=False, sequence_parallel=False, model_init_config=None,
    lora_config=None, mixed_precision_config=None, sequential_move_factor=11, lnc_size=1,
):  # fmt: skip
    """The config as it is given; the groups of ranks, tensor ranks being neighbours, and stages far apart."""
    assert expert_parallel_size == context_parallel_size == 1, "the stand-in has no such ranks"
    grid = torch.arange(dist.get_world_size()).view(
        pipeline_parallel_size, -1, tensor_parallel_size
    )
    GROUPS.update(
        tensor=grid.flatten(0, 1).tolist(),
        data=grid.transpose(1, 2).flatten(0, 1).tolist(),
        pipeline=grid.permute(1, 2, 0).flatten(0, 1).tolist(),
    )
    for kind, rows in GROUPS.items():
        for ranks in rows:
            group = dist.new_group(ranks, backend="gloo")
            if dist.get_rank() in ranks:
                MINE[kind] = group, ranks.index(dist.get_rank()), len(ranks)
    return {
        "pipeline_parallel_size": pipeline_parallel_size, "pipeline_config": pipeline_config, "optimizer_config": optimizer_config,
        "mixed_precision_config": mixed_precision_config,
    }  # fmt: skip


def initialize_parallel_model(
    nxd_config, model_fn, include_buffers=False, *model_args, **model_kwargs
):
    model = model_fn()
    if nxd_config["pipeline_parallel_size"] > 1:
        model = NxDPPModel(model, **nxd_config["pipeline_config"])
    for each in model.modules():
        each._parameters = {
            name: value if value is None else moved(value)
            for name, value in each._parameters.items()
        }
    return model


def moved(parameter: Tensor) -> nn.Parameter:
    """As on another device: a parameter of its own, also where it was tied, with those attributes alone that NxD takes along."""
    found = nn.Parameter(parameter.detach().clone())
    known = (
        "tensor_model_parallel",
        "partition_dim",
        "partition_stride",
        "num_partitions",
        "sequence_parallel_enabled",
        "shared",
    )
    vars(found).update({name: value for name, value in vars(parameter).items() if name in known})
    return found


def initialize_parallel_optimizer(nxd_config, optimizer_class, parameters, **defaults):
    options = nxd_config["optimizer_config"]
    most = options["max_grad_norm"] if options["grad_clipping"] else float("inf")
    if options["zero_one_enabled"]:
        assert defaults.pop("max_norm") == most
        return Optimizer(NeuronZero1Optimizer(parameters, optimizer_class, **defaults), most, True)
    return Optimizer(optimizer_class(parameters, **defaults), most, False)


def get_data_parallel_replica_groups():
    return GROUPS["data"]


def get_tensor_model_parallel_replica_groups():
    return GROUPS["tensor"]


def get_pipeline_model_parallel_replica_groups():
    return GROUPS["pipeline"]


def get_pipeline_model_parallel_rank():
    return MINE["pipeline"][1]


def get_tensor_model_parallel_rank():
    return MINE["tensor"][1]


def get_data_parallel_rank():
    return MINE["data"][1]


def total(value: Tensor, kind: str) -> Tensor:
    value = value.clone()
    dist.all_reduce(value, group=MINE[kind][0])
    return value


def joined(part: Tensor, dim: int, kind: str) -> Tensor:
    group, _, size = MINE[kind]
    parts = [torch.empty_like(part.contiguous()) for _ in range(size)]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)


def own(whole: Tensor, dim: int, kind: str) -> Tensor:
    _, rank, size = MINE[kind]
    return whole.chunk(size, dim)[rank].contiguous()


def all_gather(input, dim=0, groups=None, output=None, pin_layout=True):
    assert groups == GROUPS["data"] and output is None
    return joined(input, dim, "data")


def all_reduce(op_type, tensor_bucket, groups, pin_layout=True):
    assert op_type == "sum"
    name = f"copies {groups}"
    if name not in MINE:
        made = {tuple(ranks): dist.new_group(ranks, backend="gloo") for ranks in groups}
        mine = next(ranks for ranks in groups if dist.get_rank() in ranks)
        MINE[name] = made[tuple(mine)], mine.index(dist.get_rank()), len(mine)
    dist.all_reduce(tensor_bucket, group=MINE[name][0])


class Both(torch.autograd.Function):
    """One function forward, another of the gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor, forth: Any, back: Any) -> Tensor:
        context.back = back
        return forth(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return context.back(gradient), None, None


def gather_from_sequence_parallel_region(
    input_, sequence_dimension=0, to_model_parallel=True, process_group=None, tile_cc=False
):
    dim = sequence_dimension
    back = (
        (lambda g: own(total(g, "tensor"), dim, "tensor"))
        if to_model_parallel
        else (lambda g: own(g, dim, "tensor"))
    )
    return Both.apply(input_, lambda x: joined(x, dim, "tensor"), back)


def reduce_scatter_to_sequence_parallel_region(
    input_, sequence_dimension=0, process_group=None, dtype=torch.float32
):
    dim = sequence_dimension
    return Both.apply(
        input_, lambda x: own(total(x, "tensor"), dim, "tensor"), lambda g: joined(g, dim, "tensor")
    )


def scatter_to_sequence_parallel_region(input_, sequence_dimension=0, process_group=None):
    dim = sequence_dimension
    return Both.apply(input_, lambda x: own(x, dim, "tensor"), lambda g: joined(g, dim, "tensor"))


def divided(parameter: nn.Parameter, dim: int) -> nn.Parameter:
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.num_partitions = (
        True,
        dim,
        MINE["tensor"][2],
    )
    return parameter


class ColumnParallelLinear(nn.Module):
    def __init__(
        self, input_size, output_size, bias=True, gather_output=True, dtype=torch.float32, device=None, stride=1, init_method=None,
        sequence_parallel_enabled=False, sequence_dimension=None, keep_master_weight=False, skip_bias_add=False, pad=False,
        pad_alignment_size_per_rank=1, keep_padded_output=False, tensor_model_parallel_group=None, reduce_dtype=torch.float32,
        rank_ordering=None,
    ):  # fmt: skip
        super().__init__()
        rows = output_size // MINE["tensor"][2]
        self.weight = divided(
            nn.Parameter(torch.empty(rows, input_size, dtype=dtype, device=device)), 0
        )
        self.bias = (
            divided(nn.Parameter(torch.empty(rows, dtype=dtype, device=device)), 0)
            if bias
            else None
        )
        self.parted, self.dim = sequence_parallel_enabled, sequence_dimension

    def forward(self, x: Tensor) -> Tensor:
        if self.parted:
            x = gather_from_sequence_parallel_region(x, self.dim)
        else:
            x = Both.apply(x, lambda x: x.clone(), lambda g: total(g, "tensor"))
        return functional.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(
        self, input_size, output_size, bias=True, input_is_parallel=False, dtype=torch.float32, device=None, stride=1,
        init_method=None, sequence_parallel_enabled=False, sequence_dimension=None, keep_master_weight=False, skip_bias_add=False,
        pad=False, reduce_output=True, tensor_model_parallel_group=None, reduce_dtype=torch.float32, tile_cc=False,
        rank_ordering=None,
    ):  # fmt: skip
        super().__init__()
        assert input_is_parallel and sequence_parallel_enabled
        columns = input_size // MINE["tensor"][2]
        self.weight = divided(
            nn.Parameter(torch.empty(output_size, columns, dtype=dtype, device=device)), 1
        )
        self.bias = (
            nn.Parameter(torch.empty(output_size, dtype=dtype, device=device)) if bias else None
        )
        if self.bias is not None:
            self.bias.sequence_parallel_enabled = True
        self.dim = sequence_dimension

    def forward(self, x: Tensor) -> Tensor:
        x = reduce_scatter_to_sequence_parallel_region(functional.linear(x, self.weight), self.dim)
        return x if self.bias is None else x + self.bias


class ParallelEmbedding(nn.Module):
    def __init__(
        self, num_embeddings, embedding_dim, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False,
        init_method=None, device=None, dtype=torch.float32, shard_across_embedding=False, pad=False,
        sequence_parallel_enabled=False, tensor_model_parallel_group=None, use_spmd_rank=False, sequence_dimension=None,
        tile_cc=False, rank_ordering=None, collect_output=True,
    ):  # fmt: skip
        super().__init__()
        self.rows, self.collects = num_embeddings // MINE["tensor"][2], collect_output
        self.weight = divided(
            nn.Parameter(torch.empty(self.rows, embedding_dim, dtype=dtype, device=device)), 0
        )

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.rows * MINE["tensor"][1]
        mine = (local >= 0) & (local < self.rows)
        x = functional.embedding(local * mine, self.weight) * mine[..., None]
        return Both.apply(x, lambda x: total(x, "tensor"), lambda g: g) if self.collects else x


def parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing=0.0):
    logits, rows = vocab_parallel_logits, vocab_parallel_logits.size(-1)
    most = logits.detach().max(-1).values
    dist.all_reduce(most, dist.ReduceOp.MAX, group=MINE["tensor"][0])
    local = target - rows * MINE["tensor"][1]
    mine = (local >= 0) & (local < rows)
    logits = logits - most[..., None]
    said = logits.gather(-1, (local * mine)[..., None])[..., 0] * mine
    both = torch.stack((logits.exp().sum(-1), said))
    everywhere = Both.apply(
        both, lambda x: total(x, "tensor"), lambda g: g
    )  # each rank's part has the gradient of the whole
    return everywhere[0].log() - everywhere[1]


def apply_activation_checkpointing(
    model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda _: True
):
    torch_s(model, checkpoint_wrapper_fn=checkpoint_wrapper_fn, check_fn=check_fn)


class NeuronZero1Optimizer:
    """Each data-parallel rank updates its rows of each parameter, filled up to as many on all, in fp32."""

    def __init__(self, *args, **kwargs):
        groups, kind, *_ = args
        self.param_groups, (_, rank, ways) = groups, MINE["data"]
        dealt = [
            group
            | {"params": [self.share(p.detach().float(), ways, rank) for p in group["params"]]}
            for group in groups
        ]
        self.base_optimizer = kind(
            [group | {"params": [nn.Parameter(p) for p in group["params"]]} for group in dealt],
            **kwargs,
        )
        for ours, theirs in zip(groups, self.base_optimizer.param_groups, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})

    @staticmethod
    def share(value: Tensor, ways: int, rank: int) -> Tensor:
        each = -(-len(value) // ways)
        filled = torch.zeros((each * ways, *value.shape[1:]))
        filled[: len(value)] = value
        return filled[rank * each : (rank + 1) * each].clone()

    def pairs(self):
        for ours, theirs in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            theirs["lr"] = ours["lr"]
            yield from zip(ours["params"], theirs["params"], strict=True)


class Optimizer:
    """As NxDOptimizer: gradients are summed over tensor ranks where a sequence is in parts, averaged over data ranks, clipped."""

    def __init__(self, optimizer: Any, most: float, zero: bool) -> None:
        self.optimizer, self.most, self.zero, self.grad_norm = optimizer, most, zero, None

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        ways, square = MINE["data"][2], torch.zeros(())
        for group in self.param_groups:
            for parameter in group["params"]:
                if getattr(parameter, "sequence_parallel_enabled", False):
                    parameter.grad = total(parameter.grad, "tensor")
                parameter.grad = total(parameter.grad, "data") / ways
                once = getattr(parameter, "tensor_model_parallel", False) or MINE["tensor"][1] == 0
                square += (
                    parameter.grad.float().square().sum()
                    * once
                    * (not getattr(parameter, "shared", False))
                )
        self.grad_norm = total(total(square, "tensor"), "pipeline").sqrt()
        factor = min(1.0, self.most / (float(self.grad_norm) + 1e-6))
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad *= factor
        self._update()

    def _update(self) -> None:
        if not self.zero:
            return self.optimizer.step()
        _, rank, ways = MINE["data"]
        pairs = list(self.optimizer.pairs())
        for parameter, master in pairs:
            master.grad = self.optimizer.share(parameter.grad.float(), ways, rank)
        self.optimizer.base_optimizer.step()
        for parameter, master in pairs:
            parameter.copy_(joined(master.detach(), 0, "data")[: len(parameter)])

    def zero_grad(self, set_to_none=False):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


class PipelineStageModule(nn.Module):
    def __init__(self, layers, num_stages, stage_index, partition_fn=None):
        super().__init__()
        places = partition_fn(layers, num_stages)
        self.stage_modules = nn.ModuleList(
            layer for layer in layers if places[layer] == stage_index
        )

    def forward(self, x):
        for layer in self.stage_modules:
            x = layer(x)
        return x

    @staticmethod
    def mark_weight_sharing(layer_and_weight_path, sharing_group_name="default"):
        for layer, path in layer_and_weight_path:
            layer.weight_sharing = {sharing_group_name: path}


FORMATS = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
)  # of what stages pass on, as the first number sent


class NxDPPModel(nn.Module):
    """Stages that take whole micro-batches in turn: all forward, then all backward."""

    def __init__(
        self, module, transformer_layer_cls=None, num_microbatches=1, virtual_pipeline_size=1, output_loss_value_spec=None,
        return_mb_loss=False, broadcast_and_average_loss=False, use_zero1_optimizer=False, use_model_wrapper=False,
        use_optimizer_wrapper=False, pipeline_cuts=None, input_names=None, leaf_module_cls=None, autowrap_functions=None,
        autowrap_modules=None, autowrap_obj_methods=None, tracer_cls=None, param_init_fn=None, trace_file_path=None,
        return_loss_on_cpu=True, deallocate_pipeline_outputs=False, auto_partition=False, fuse_microbatches=False,
        manual_pp_partition=False, manual_pp_stage_partition_fn=None, manual_pp_loss_fn=None, _delay_tracing=False,
        _turn_off_odd_even_scheduler=False, _all_reduce_send_recv=False, _fused_send_recv=False, _fused_fwd_bwd=False,
        _mark_step_before_pp_runtime=True, _mark_step_after_pp_runtime=True, _deallocate_send_tensors=True,
        _use_gloo_for_metadata_comm=False, _debug_mode=False, _debug_pp_size=8, _debug_pp_rank=0,
    ):  # fmt: skip
        super().__init__()
        assert manual_pp_partition and not broadcast_and_average_loss and virtual_pipeline_size == 1
        self.group, self.stage, self.stages = MINE["pipeline"]
        self.ranks = next(row for row in GROUPS["pipeline"] if dist.get_rank() in row)
        self.part = PipelineStageModule(
            module, self.stages, self.stage, manual_pp_stage_partition_fn
        )
        self.count, self.loss_fn = num_microbatches, manual_pp_loss_fn
        self.shared = [
            path
            for layer in self.part.stage_modules
            for path in getattr(layer, "weight_sharing", {}).values()
        ]
        ends = [dist.new_group([row[0], row[-1]], backend="gloo") for row in GROUPS["pipeline"]]
        self.ends = ends[GROUPS["pipeline"].index(self.ranks)]

    def run_train(self, *args, **kwargs):
        done = self._forward(**kwargs)
        for given, found in done:
            last = self.stage == self.stages - 1
            found.backward(None if last else self._receive(self.stage + 1))
            if self.stage:
                self._send(given.grad, self.stage - 1)
        for path in self.shared:
            dist.all_reduce(getattr(self.part.stage_modules[0], path).grad, group=self.ends)
        return self._mean(done)

    @torch.no_grad()
    def run_eval(self, *args, **kwargs):
        return self._mean(self._forward(**kwargs))

    def _forward(self, inputs, labels):
        done = []
        for tokens, targets in zip(inputs.chunk(self.count), labels.chunk(self.count), strict=True):
            given = (
                self._receive(self.stage - 1).requires_grad_(torch.is_grad_enabled())
                if self.stage
                else [tokens]
            )
            found = self.part(given)
            if self.stage == self.stages - 1:
                found = self.loss_fn(found[0], targets) / self.count
            else:
                self._send(found.detach(), self.stage + 1)
            done.append((given, found))
        return done

    def _mean(self, done):
        return sum(found.detach() for _, found in done) if self.stage == self.stages - 1 else None

    def _send(self, value, stage):
        dist.send(
            torch.tensor([FORMATS.index(value.dtype), *value.shape]),
            self.ranks[stage],
            group=self.group,
        )
        dist.send(value.contiguous(), self.ranks[stage], group=self.group)

    def _receive(self, stage):
        dist.recv(about := torch.empty(4, dtype=torch.int64), self.ranks[stage], group=self.group)
        number, *shape = about.tolist()
        dist.recv(
            value := torch.empty(shape, dtype=FORMATS[number]), self.ranks[stage], group=self.group
        )
        return value


def module(name: str, *contents: Any, **named: Any) -> None:
    found = types.ModuleType(name)
    vars(found).update({each.__name__: each for each in contents} | named)
    sys.modules[name] = found
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, found)


def install() -> None:
    """Makes it importable as neuronx_distributed, and has ranks of platform neuron-xla compute on the CPU."""
    states = (get_data_parallel_replica_groups, get_tensor_model_parallel_replica_groups, get_pipeline_model_parallel_replica_groups,
              get_pipeline_model_parallel_rank, get_tensor_model_parallel_rank, get_data_parallel_rank)  # fmt: skip
    nxd = "neuronx_distributed"
    module(
        nxd, neuronx_distributed_config, initialize_parallel_model, initialize_parallel_optimizer
    )
    module(f"{nxd}.parallel_layers")
    module(
        f"{nxd}.parallel_layers.layers", ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
    )
    module(f"{nxd}.parallel_layers.loss_functions", parallel_cross_entropy)
    module(f"{nxd}.parallel_layers.comm", all_gather, all_reduce)
    module(f"{nxd}.parallel_layers.parallel_state", *states)
    module(f"{nxd}.parallel_layers.mappings", gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region,
           scatter_to_sequence_parallel_region)  # fmt: skip
    module(f"{nxd}.utils")
    module(f"{nxd}.utils.activation_checkpoint", apply_activation_checkpointing)
    module(f"{nxd}.pipeline")
    module(f"{nxd}.pipeline.manual_pipe_stage", PipelineStageModule)
    from trainfleet import devices
    from trainfleet.devices.cpu import Cpu

    class OnCpu(Cpu):
        kind, lazy = "neuron_xla", True

        def settle(self) -> None: ...

        def compilations(self) -> int:
            return 0

        def autocast(self, dtype: torch.dtype) -> Any:
            return torch.autocast("cpu", dtype=dtype)

    devices.KINDS["neuron_xla"] = OnCpu
