"""Arranges the ranks in a device mesh: a rank's place in the layout, and its groups."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...config import Config
from ...devices import Device

# From the slowest links to the fastest: neighbours in `tensor` are neighbours on a node, stages of
# a pipeline are on other nodes.
DIMENSIONS = ("pipeline", "replicate", "shard", "tensor")


class Mesh:
    """The ranks as a grid, pipeline x replicate x shard x tensor, and this one's place in it. All
    ranks make it together.

    Context ranks are neighbours within `shard`: they have the same weights and different tokens, so
    they share everything that data-parallel ranks share.
    """

    def __init__(self, config: Config, device: Device) -> None:
        layout = config.train.parallelism
        self.layout, self.ways = layout, config.data_parallel
        together = layout.fsdp * layout.context
        replicas = config.data_parallel // layout.fsdp
        self.grid = init_device_mesh(
            device.torch_device.type,
            (layout.pipeline, replicas, together, layout.tensor),
            mesh_dim_names=DIMENSIONS,
        )
        self.stage, replica, shared, _ = (int(index) for index in self.grid.get_coordinate() or ())
        self.context = shared % layout.context
        # index of its part among the `ways` parts of a batch
        self.data = replica * layout.fsdp + shared // layout.context
        self.context_group = self._context_group()

    def group(self, dimension: str) -> dist.ProcessGroup:
        """Returns the ranks that differ from this one only in that dimension."""
        return self.grid.get_group(dimension)

    def sharing(self) -> DeviceMesh:
        """Returns the ranks with the same part of the model: 1 dimension, or replicas of those that
        shard it.
        """
        if self.grid["replicate"].size() == 1:
            return self.grid["shard"]
        return self.grid["replicate", "shard"]

    def _context_group(self) -> dist.ProcessGroup | None:
        if self.layout.context == 1:
            return None
        ranks = self.grid.mesh.movedim(2, -1).reshape(-1, self.layout.context)
        made: tuple[dist.ProcessGroup, object] = dist.new_subgroups_by_enumeration(ranks.tolist())  # type: ignore[no-untyped-call]
        return made[0]
