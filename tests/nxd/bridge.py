"""torch_xla's collectives by gloo, for ranks that compute on CPUs: PJRT's CPU client has none, so by itself every rank is alone.

Tensors stay torch_xla's lazy ones, NxD's source and ours stay as they are; each collective fetches its tensors, asks gloo, and puts
the answer back. Each counts, so that a check can tell that it happened.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

counts: Counter[str] = Counter()
groups_made: dict[tuple[int, ...], Any] = {}
KINDS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "mul": dist.ReduceOp.PRODUCT,
}


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def group_of(groups: Any) -> tuple[Any, list[int]]:
    """gloo's group for this rank's row of the replica groups, and the row."""
    rows = [list(row) for row in groups] if groups else [list(range(size()))]
    mine = next(row for row in rows if rank() in row)
    if tuple(mine) not in groups_made:
        store = dist.PrefixStore("-".join(map(str, mine)), base_store())
        groups_made[tuple(mine)] = dist.ProcessGroupGloo(store, mine.index(rank()), len(mine))
    return groups_made[tuple(mine)], mine


def base_store() -> Any:
    return dist.PrefixStore("bridge", dist.distributed_c10d._get_default_store())


def fetched(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.detach().cpu()
    return (
        found.float().contiguous() if found.dtype == torch.bfloat16 else found.contiguous().clone()
    )


def all_reduce(
    reduce_type: str, inputs: Any, scale: float = 1.0, groups: Any = None, pin_layout: bool = True
) -> Any:
    counts["all_reduce"] += 1
    group, _ = group_of(groups)
    single = isinstance(inputs, torch.Tensor)
    answers = []
    for tensor in [inputs] if single else inputs:
        host = fetched(tensor)
        options = dist.AllreduceOptions()
        options.reduceOp = KINDS[reduce_type]
        group.allreduce([host], options).wait()
        answers.append(
            (host * scale).to(tensor.dtype).to(tensor.device)
            if scale != 1
            else host.to(tensor.dtype).to(tensor.device)
        )
    if single:
        return answers[0]
    for tensor, answer in zip(inputs, answers, strict=True):
        tensor.data.copy_(answer)
    return inputs


def all_gather(value: torch.Tensor, dim: int = 0, groups: Any = None, output: Any = None, pin_layout: bool = True, channel_id: Any = None,
               use_global_device_ids: Any = None) -> Any:  # fmt: skip
    counts["all_gather"] += 1
    if isinstance(value, list):
        answers = [all_gather(tensor, dim, groups) for tensor in value]
        return put(answers, output)
    group, row = group_of(groups)
    host = fetched(value)
    parts = [torch.empty_like(host) for _ in row]
    group.allgather([parts], [host]).wait()
    return put(torch.cat(parts, dim).to(value.dtype).to(value.device), output)


def reduce_scatter(reduce_type: str, input: Any, scale: float, scatter_dim: int, shard_count: int, groups: Any = None, output: Any = None,
                   pin_layout: bool = True, channel_id: Any = None, use_global_device_ids: Any = None) -> Any:  # fmt: skip
    counts["reduce_scatter"] += 1
    if isinstance(input, list):
        return put(
            [
                reduce_scatter(reduce_type, tensor, scale, scatter_dim, shard_count, groups)
                for tensor in input
            ],
            output,
        )
    _, row = group_of(groups)
    total = all_reduce(reduce_type, input, scale, groups)
    counts["all_reduce"] -= 1
    return put(total.chunk(shard_count, scatter_dim)[row.index(rank())].contiguous(), output)


def put(answer: Any, output: Any) -> Any:
    if output is None:
        return answer
    for target, value in (
        zip(output, answer, strict=True) if isinstance(output, list) else [(output, answer)]
    ):
        target.copy_(value)
    return output


def gather_bucketized(
    input_list: Any,
    dim: int = 0,
    groups: Any = None,
    output: Any = None,
    pin_layout: bool = False,
    bucket_cap_mb: int = 160,
) -> Any:
    return all_gather(list(input_list), dim, groups, output, pin_layout)


def scatter_bucketized(reduce_type: str, input_list: Any, scale: float, scatter_dim: int, shard_count: int, groups: Any = None, output: Any = None,
                       pin_layout: bool = False, bucket_cap_mb: int = 160) -> Any:  # fmt: skip
    return reduce_scatter(
        reduce_type, list(input_list), scale, scatter_dim, shard_count, groups, output, pin_layout
    )


def rendezvous(tag: str, payload: bytes = b"", replicas: Any = None) -> list[bytes]:
    group, _ = group_of(None)
    group.barrier().wait()
    return [payload] * size()


def install() -> None:
    """Puts these in the places of torch_xla's, before NxD is imported."""
    import torch_xla.core.xla_env_vars as names
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    for name, call in (("all_reduce", all_reduce), ("all_gather", all_gather), ("reduce_scatter", reduce_scatter),
                       ("all_gather_bucketized", gather_bucketized), ("reduce_scatter_bucketized", scatter_bucketized),
                       ("rendezvous", rendezvous)):  # fmt: skip
        setattr(xm, name, call)
    for name, answer in (("world_size", size), ("global_device_count", size), ("global_ordinal", rank), ("local_ordinal", rank),
                         ("local_process_count", size), ("process_count", size), ("process_index", rank)):  # fmt: skip
        setattr(xr, name, answer)
    names.HOST_WORLD_SIZE = "LOCAL_WORLD_SIZE"  # NxD asks for it wherever PJRT_DEVICE is not NEURON, and torch_xla 2.9 has it no more
