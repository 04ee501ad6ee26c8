"""NxD Core's slices and ZeRO-1 shards, represented as DTensors on a CPU mesh.

With DTensors, a checkpoint from Trn1 can be saved, verified, resumed in another layout and exported
like any other. Tensor ranks hold slices of a matrix along one dimension. ZeRO-1 pads the rows of
each slice with zeros and divides them among the data-parallel ranks. A mesh of (tensor, data) ranks
expresses both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from neuronx_distributed.parallel_layers import parallel_state
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from trainfleet.engine.optimizers import local


@dataclass(frozen=True)
class Grid:
    """This rank's stage, and its position in the stage's mesh of (tensor, data) ranks.

    `copied` is the same mesh as (heads, copies, data), in which tensor ranks with the same
    key-value heads are adjacent.
    """

    stage: int
    tensor: int
    data: int
    mesh: DeviceMesh
    copied: DeviceMesh

    @property
    def ways(self) -> int:
        return int(self.mesh.size(1))

    @property
    def slices(self) -> int:
        return int(self.mesh.size(0))


def grid(copies: int) -> Grid:
    """Creates the mesh from NxD's process groups. Must be called on all ranks.

    Tensor ranks are not always adjacent: 4 tensor ranks on Trn1 are 8 apart. `copies` is the number
    of tensor ranks with the same key-value heads.
    """
    stages = [list(row) for row in parallel_state.get_pipeline_model_parallel_replica_groups()]
    tensors = [list(row) for row in parallel_state.get_tensor_model_parallel_replica_groups()]
    datas = [list(row) for row in parallel_state.get_data_parallel_replica_groups()]
    ranks = torch.zeros((len(stages[0]), len(tensors[0]), len(datas[0])), dtype=torch.int64)
    for row in datas:
        ranks[position(stages, row[0]), position(tensors, row[0])] = torch.tensor(row)
    meshes = [DeviceMesh("cpu", part, mesh_dim_names=("tensor", "data")) for part in ranks]
    split = [part.view(-1, copies, part.size(1)) for part in ranks]
    copied = (
        meshes
        if copies == 1
        else [DeviceMesh("cpu", part, mesh_dim_names=("heads", "copies", "data")) for part in split]
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    mine = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    return Grid(stage, *mine, meshes[stage], copied[stage])


def position(rows: list[list[int]], rank: int) -> int:
    return next(row.index(rank) for row in rows if rank in row)


@dataclass(frozen=True)
class Slice:
    """Position of this rank's slice in the entire parameter.

    `dimension` is the dimension that is divided among tensor ranks, or None if every rank has the
    entire parameter. `copies` is the number of tensor ranks with the same slice.
    """

    shape: torch.Size  # shape of the entire parameter
    dimension: int | None
    copies: int = 1

    @classmethod
    def of(cls, parameter: Tensor) -> Slice:
        """Derives a slice from the attributes that NxD's layers set on a parameter."""
        if not getattr(parameter, "tensor_model_parallel", False):
            return cls(parameter.shape, None)
        dimension, ranks = int(parameter.partition_dim), int(parameter.num_partitions)  # type: ignore[attr-defined]
        shape, copies = list(parameter.shape), int(getattr(parameter, "copies", 1))
        shape[dimension] *= ranks // copies
        return cls(torch.Size(shape), dimension, copies)

    def cut(self, whole: Tensor, grid: Grid) -> Tensor:
        """Returns this tensor rank's slice of an entire parameter."""
        parts = grid.slices // self.copies
        return (
            whole
            if self.dimension is None
            else whole.chunk(parts, self.dimension)[grid.tensor // self.copies]
        )

    def join(self, part: Tensor, grid: Grid, dealt: bool) -> DTensor:
        """Returns this rank's part as a DTensor of the entire parameter.

        If `dealt`, `part` is only the slice's ZeRO-1 shard, with or without padding.
        """
        placements: list[Placement] = [
            Replicate() if self.dimension is None else Shard(self.dimension),
            Replicate(),
        ]
        placements += [Replicate()] if self.copies > 1 else []
        host = part.detach().cpu()
        if dealt and host.ndim:
            placements[-1], host = Shard(0), unfilled(host, self.rows(grid), grid)
        stride, mesh = (
            torch.empty(self.shape, device="meta").stride(),
            grid.copied if self.copies > 1 else grid.mesh,
        )
        return DTensor.from_local(
            host, mesh, placements, run_check=False, shape=self.shape, stride=stride
        )

    def rows(self, grid: Grid) -> int:
        """Returns the number of rows in a tensor rank's slice."""
        return self.shape[0] // (grid.slices // self.copies if self.dimension == 0 else 1)


def unfilled(share: Tensor, rows: int, grid: Grid) -> Tensor:
    """Removes the padding from this data-parallel rank's shard.

    `rows` is the number of rows in the slice that was sharded.
    """
    each = -(-rows // grid.ways)
    return share[: max(0, min(each, rows - grid.data * each))]


def put(target: Tensor, found: Tensor) -> None:
    """Copies a checkpoint's tensor to a device tensor and fills any remaining rows with zeros."""
    part = local(found)
    value = torch.zeros(target.shape, dtype=target.dtype)
    (value[: len(part)] if part.ndim else value).copy_(part)
    target.data.copy_(value.to(target.device))
