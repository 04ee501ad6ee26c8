"""One rank's part of the state, copied to the host at a step boundary, so that training continues while it is written.

What each rank writes is planned once, by all together: a tensor that several ranks hold is written, and copied, by one of them.
The copies' memory is taken at the first save and used again at each one after it, so a save leaves the host's memory as it was.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ...checkpoints import index, pieces
from ...checkpoints.index import file_of
from ...checkpoints.marker import FileSum
from ...checkpoints.pieces import NUMBERS, ArchivePiece, CheckpointIndex
from ...checkpoints.store import CheckpointStore
from ...devices import Device
from ..parallel.rank_model import State
from . import files
from .checkpoint_group import CheckpointError, Peers, attempt
from .tensors import NAMES

PLANNING = "can't plan a checkpoint"


class Snapshot:
    """This rank's part of the state as `take` found it last."""

    def __init__(self, peers: Peers, state: State) -> None:
        """Plans together with all other ranks."""
        self.planner = DefaultSavePlanner()
        self.planner.set_up_planner(state, is_coordinator=peers.first)
        self.index, plan = agree(peers, self.planner)
        # The largest numbers first, so that each is aligned in the file.
        self.items = sorted(plan.items, key=lambda item: -NUMBERS[piece_of(item).dtype])
        self.file = file_of(peers.rank)
        self.data: dict[str, tuple[pieces.Tensor, Tensor]] = {}

    @property
    def size(self) -> int:
        """Bytes of all ranks' tensors; known to rank 0."""
        tensors = filter(None, self.index.entries.values())
        return sum(math.prod(tensor.size) * NUMBERS[tensor.dtype] for tensor in tensors)

    def take(self, state: State, device: Device) -> None:
        """Copies the rank's part to the host; training may change the state once this returns."""
        self.planner.set_up_planner(state)
        for item in self.items:
            found, name = self.planner.resolve_data(item), item.index.fqn
            assert isinstance(found, Tensor)
            if name not in self.data:
                self.data[name] = piece_of(item), device.host_buffer(found)
            self.data[name][1].copy_(found.detach(), non_blocking=True)
        self.planner.state_dict = {}  # keeps no reference to the live state
        device.synchronize()

    def write(self, store: CheckpointStore, step: int) -> dict[str, FileSum]:
        """Writes the rank's file, if it has a part, to the checkpoint that was begun.

        It is durable when this returns.
        """
        if not self.data:
            return {}
        return {self.file: files.write_tensors(store, step, self.file, self.data)}

    def write_index(self, store: CheckpointStore, step: int, parts: list[dict[str, FileSum]]) -> dict[str, FileSum]:
        """Writes the index of all parts, at rank 0; returns all files of the checkpoint."""
        written = {name: file for part in parts for name, file in part.items()}
        text = index.render(self.index)
        return written | {index.FILE: files.write(store, step, index.FILE, [text])}


def agree(peers: Peers, planner: DefaultSavePlanner) -> tuple[CheckpointIndex, SavePlan]:
    """At rank 0 the index of the whole state; at each rank the plan of its part."""
    plans = peers.gather(planner.create_local_plan())
    made, failure = attempt(0, PLANNING, lambda: whole_plan(planner, plans)) if peers.first else (None, None)
    if failure := peers.tell(failure):
        raise CheckpointError([failure])
    shares, found = made or ([], CheckpointIndex({}, {}))
    return found, planner.finish_plan(peers.scatter(shares))


def whole_plan(planner: DefaultSavePlanner, plans: list[SavePlan]) -> tuple[list[SavePlan], CheckpointIndex]:
    """What each rank writes, and the index of all of it."""
    shares, _ = planner.create_global_plan(plans)
    entries: dict[str, pieces.Tensor] = {}
    placed: dict[pieces.Key, ArchivePiece] = {}
    for rank, share in enumerate(shares):
        for item in share.items:
            name, piece = item.index.fqn, piece_of(item)
            offsets, sizes = piece.chunks[0]
            chunks = (*entries[name].chunks, *piece.chunks) if name in entries else piece.chunks
            entries[name] = pieces.Tensor(piece.size, piece.dtype, chunks)
            placed[name, offsets] = ArchivePiece(name, file_of(rank), sizes, piece.dtype)
    return shares, CheckpointIndex(entries, placed)


def piece_of(item: WriteItem) -> pieces.Tensor:
    """A piece that a rank writes: the whole tensor's size, and the one chunk.

    TypeError when it is not of a tensor, or of another number format.
    """
    data = item.tensor_data
    if data is None or data.properties.dtype not in NAMES:
        raise TypeError(f"{item.index.fqn} is not a tensor of a format that checkpoints have")
    chunk = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    return pieces.Tensor(tuple(data.size), NAMES[data.properties.dtype], (chunk,))
