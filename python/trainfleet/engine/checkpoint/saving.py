"""Background checkpoint saves.

Between two steps, each rank copies its part of the state to the host. A background thread writes
and commits it while training continues.

At the first save, all ranks plan together which rank writes which pieces. If several ranks hold the
same tensor, only one of them copies and writes it. Later saves reuse the first one's host buffers,
so they need no additional host memory.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from ...checkpoints import index
from ...checkpoints.index import NUMBERS, CheckpointIndex, IndexedTensor, TensorPiece
from ...checkpoints.marker import Commit, FileSum, render
from ...checkpoints.store import CheckpointStore
from ...config.types import Checkpoint
from ...devices import Device
from ..parallel.rank_model import State
from . import files
from .checkpoint_group import CheckpointError, Peers, attempt

NICE = 10  # niceness of the writer thread, which shares the CPU cores with training
ROOM = 1.02  # free disk space required, relative to the size of the tensors

PLANNING = "can't plan a checkpoint"


class Save(threading.Thread):
    """Background save. If it failed, `error` is the exception.

    Uses a daemon thread rather than an executor, so that waiting for another rank never keeps the
    process alive.
    """

    def __init__(self, step: int, work: Callable[[], None]) -> None:
        super().__init__(name=f"save-{step}", daemon=True)
        self.step = step
        self.work = work
        self.error: Exception | None = None
        self.began = time.monotonic()
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            self.work()
        except Exception as error:  # raised by the training loop after the next step
            self.error = error
        self.seconds = time.monotonic() - self.began


def write(
    peers: Peers, store: CheckpointStore, snapshot: Snapshot, commit: Commit, policy: Checkpoint
) -> None:
    """Writes and commits a snapshot, then removes old checkpoints by the retention policy.

    Must be called on all ranks.

    Raises:
        CheckpointError: raised on all ranks. Either the new checkpoint was not committed and
            earlier ones are intact, or it was committed but an old one could not be removed.
    """
    step = commit.step
    try:
        peers.one("can't begin a checkpoint", lambda: begin(store, step, snapshot.size))
        parts = peers.all("can't write a checkpoint", lambda: snapshot.write(store, step))

        def finish() -> None:
            files = snapshot.write_index(store, step, parts)
            store.commit(step, render(replace(commit, files=files)))

        peers.one("can't commit a checkpoint", finish)
    except CheckpointError:
        if peers.first:
            # If this cleanup fails, the next start or the next save of this step removes the files.
            with suppress(OSError):
                store.abandon(step)
        raise
    peers.one(
        "can't remove old checkpoints",
        lambda: store.retain(step, policy.keep, policy.keep_every),
    )


def begin(store: CheckpointStore, step: int, size: int) -> None:
    """Creates a checkpoint's folder.

    Raises:
        OSError: the disk has too little free space. Raised before any file is written.
    """
    store.begin(step)
    free, needed = store.free(), int(size * ROOM)
    if free is not None and free < needed:
        why = (
            f"{os.strerror(errno.ENOSPC)}: a checkpoint needs {needed / 1e6:,.1f} MB, but only "
            f"{free / 1e6:,.1f} MB are free"
        )
        raise OSError(errno.ENOSPC, why)


class Snapshot:
    """Host copy of this rank's part of the state, refreshed by `take`."""

    def __init__(self, peers: Peers, state: State) -> None:
        """Plans the save together with all other ranks."""
        self.planner = DefaultSavePlanner()
        self.planner.set_up_planner(state, is_coordinator=peers.first)
        self.index, plan = agree(peers, self.planner)
        self.items = plan.items
        self.parts = parts_of(plan, peers.rank)
        self.file = index.file_of(peers.rank)
        self.data: dict[str, Tensor] = {}

    @property
    def size(self) -> int:
        """Total size of all tensors in bytes, valid only on rank 0."""
        return sum(tensor.bytes_of(tensor.shape) for tensor in self.index.values())

    def take(self, state: State, device: Device) -> None:
        """Copies this rank's part of the state to the host.

        Training may modify the state once this returns.
        """
        self.planner.set_up_planner(state)
        for item in self.items:
            found, name = self.planner.resolve_data(item), item.index.fqn
            assert isinstance(found, Tensor)
            if name not in self.data:
                self.data[name] = device.host_buffer(found)
            self.data[name].copy_(found.detach(), non_blocking=True)
        self.planner.state_dict = {}  # drop the references to the live state
        device.synchronize()

    def write(self, store: CheckpointStore, step: int) -> dict[str, FileSum]:
        """Durably writes this rank's file to the uncommitted checkpoint, unless the rank has no
        pieces to write.
        """
        if not self.data:
            return {}
        pieces = (files.bytes_of(self.data[name]) for name in self.parts)
        chunks = (index.header(self.parts), *pieces)
        return {self.file: files.write(store, step, self.file, chunks)}

    def write_index(
        self, store: CheckpointStore, step: int, parts: list[dict[str, FileSum]]
    ) -> dict[str, FileSum]:
        """Writes the checkpoint's index, and returns all of the checkpoint's files. Rank 0 only."""
        written = {name: file for part in parts for name, file in part.items()}
        text = index.render(self.index)
        return written | {index.FILE: files.write(store, step, index.FILE, [text])}


def agree(peers: Peers, planner: DefaultSavePlanner) -> tuple[CheckpointIndex, SavePlan]:
    """Returns the index of the entire state, and this rank's save plan.

    The index is empty on all ranks but rank 0.
    """
    plans = peers.gather(planner.create_local_plan())
    made, failure = (
        attempt(0, PLANNING, lambda: whole_plan(planner, plans)) if peers.first else (None, None)
    )
    if failure := peers.tell(failure):
        raise CheckpointError([failure])
    shares, found = made or ([], {})
    return found, planner.finish_plan(peers.scatter(shares))


def whole_plan(
    planner: DefaultSavePlanner, plans: list[SavePlan]
) -> tuple[list[SavePlan], CheckpointIndex]:
    """Merges all ranks' plans. Returns each rank's final plan and the index of the entire state."""
    shares, _ = planner.create_global_plan(plans)
    whole: dict[str, IndexedTensor] = {}
    for rank, share in enumerate(shares):
        for name, part in index.placed(parts_of(share, rank)).items():
            before = whole[name].pieces if name in whole else ()
            whole[name] = replace(part, pieces=(*before, *part.pieces))
    return shares, whole


def parts_of(share: SavePlan, rank: int) -> CheckpointIndex:
    """Returns the pieces in a rank's file, sorted by element size, largest first, so that all are
    aligned.
    """
    parts = {item.index.fqn: part_of(item, index.file_of(rank)) for item in share.items}
    return dict(sorted(parts.items(), key=lambda entry: -NUMBERS[entry[1].dtype]))


def part_of(item: WriteItem, file: str) -> IndexedTensor:
    """Returns the piece that a rank writes for an item.

    Raises:
        TypeError: the item is not a tensor, or its dtype is not supported.
    """
    data = item.tensor_data
    if data is None or data.properties.dtype not in files.NAMES:
        raise TypeError(f"{item.index.fqn} is not a tensor with a supported dtype")
    piece = TensorPiece(file, 0, tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return IndexedTensor(files.NAMES[data.properties.dtype], tuple(data.size), (piece,))
