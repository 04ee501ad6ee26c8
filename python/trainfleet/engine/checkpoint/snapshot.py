"""One rank's part of the state, copied to the host at a step boundary, so that training continues while it is written.

What each rank writes is planned once, by all together: a tensor that several ranks hold is written, and copied, by one of them.
The copies' memory is taken at the first save and used again at each one after it, so a save leaves the host's memory as it was.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from ...checkpoints.marker import File
from ...checkpoints.store import Store
from ...devices import Device
from ..parallel.parts import State
from .files import Writer
from .peers import CheckpointError, Peers, attempt

PLANNING = "can't plan a checkpoint"


@dataclass(frozen=True)
class Part:
    """What one rank wrote: where each piece lies, and the files."""

    pieces: list[WriteResult]
    files: dict[str, File]


class Snapshot:
    """This rank's part of the state as `take` found it last."""

    def __init__(self, peers: Peers, state: State) -> None:
        """Plans together with all other ranks."""
        self.planner = DefaultSavePlanner()
        self.planner.set_up_planner(state, is_coordinator=peers.first)
        self.metadata, self.plan = agree(peers, self.planner)
        self.data: dict[MetadataIndex, Tensor | io.BytesIO] = {}

    @property
    def size(self) -> int:
        """Bytes of all ranks' tensors; known to rank 0."""
        tensors = (item for item in self.metadata.state_dict_metadata.values() if isinstance(item, TensorStorageMetadata))
        return sum(tensor.size.numel() * tensor.properties.dtype.itemsize for tensor in tensors)

    def take(self, state: State, device: Device) -> None:
        """Copies the rank's part to the host; training may change the state once this returns."""
        self.planner.set_up_planner(state)
        for item in self.plan.items:
            found = self.planner.resolve_data(item)
            if isinstance(found, Tensor):
                buffer = self.data.get(item.index)
                if not isinstance(buffer, Tensor):
                    buffer = device.host_buffer(found)
                found = buffer.copy_(found.detach(), non_blocking=True)
            self.data[item.index] = found
        self.planner.state_dict = {}  # keeps no reference to the live state
        device.synchronize()

    def resolve_data(self, item: WriteItem) -> Tensor | io.BytesIO:
        """The copy of one item of the plan: the only method of a planner that torch's writer calls."""
        return self.data[item.index]

    def write(self, store: Store, step: int) -> Part:
        """Writes the rank's files to the checkpoint that was begun; durable when this returns."""
        writer = Writer(store, step)
        pieces = writer.write_data(self.plan, self).wait()  # type: ignore[arg-type]
        return Part(pieces, writer.written)

    def write_index(self, store: Store, step: int, parts: list[Part]) -> dict[str, File]:
        """Writes the index of all items, at rank 0; returns all files of the checkpoint."""
        writer = Writer(store, step)
        writer.finish(replace(self.metadata), [part.pieces for part in parts])
        return {name: file for part in parts for name, file in part.files.items()} | writer.written


def agree(peers: Peers, planner: DefaultSavePlanner) -> tuple[Metadata, SavePlan]:
    """At rank 0 the description of the whole state; at each rank the plan of its part."""
    plans = peers.gather(planner.create_local_plan())
    made, failure = attempt(0, PLANNING, lambda: whole_plan(planner, plans)) if peers.first else (None, None)
    if failure := peers.tell(failure):
        raise CheckpointError([failure])
    shares, metadata = made or ([], Metadata({}))
    return metadata, planner.finish_plan(peers.scatter(shares))


def whole_plan(planner: DefaultSavePlanner, plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    shares, metadata = planner.create_global_plan(plans)
    return FileSystemWriter("/").prepare_global_plan(shares), metadata  # gives each rank's files their names
