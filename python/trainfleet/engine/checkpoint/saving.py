"""Copies a rank's part of the state to the host at a step boundary; then writes and commits it, in
a background thread, while training continues.

All ranks plan together, once, which rank writes which part: a tensor that several ranks hold is
copied and written by one of them. The copies' memory is allocated at the first save and used again
later, so that further saves need no more memory of the host.
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

from ...checkpoints import index, listing
from ...checkpoints.index import NUMBERS, CheckpointIndex, IndexedTensor, TensorPiece
from ...checkpoints.marker import Commit, FileSum, render
from ...checkpoints.store import CheckpointStore
from ...config.types import Checkpoint
from ...devices import Device
from ..parallel.rank_model import State
from . import files
from .checkpoint_group import CheckpointError, Peers, attempt

NICE = 10  # niceness of the writing thread: on a CPU it shares the cores with training
ROOM = 1.02  # bytes of a checkpoint per byte of tensors

PLANNING = "can't plan a checkpoint"


class Save(threading.Thread):
    """A save in progress; once it has ended, `error` has its error.

    It dies with the process, even while it waits for another rank: it is a daemon, unlike an
    executor's threads.
    """

    def __init__(self, step: int, work: Callable[[], None]) -> None:
        super().__init__(name=f"save-{step}", daemon=True)
        self.step, self.work = step, work
        self.error: Exception | None = None
        self.began, self.seconds = time.monotonic(), 0.0
        self.start()

    def run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            self.work()
        except Exception as error:  # for the training loop to raise, at the next step boundary
            self.error = error
        self.seconds = time.monotonic() - self.began


def write(
    peers: Peers, store: CheckpointStore, snapshot: Snapshot, commit: Commit, policy: Checkpoint
) -> None:
    """Commits a snapshot as a checkpoint, then removes older ones by the retention policy; all
    ranks call it.

    Raises:
        CheckpointError: on all ranks. Then either the checkpoint is invisible, and earlier ones are
            unchanged; or it is committed, and an older one could not be removed.
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
            # then the next save at this step or the next start removes the files
            with suppress(OSError):
                store.abandon(step)
        raise
    peers.one(
        "can't remove old checkpoints",
        lambda: listing.retain(store, step, policy.keep, policy.keep_every),
    )


def begin(store: CheckpointStore, step: int, size: int) -> None:
    """Creates the folder of a checkpoint. Raises OSError if the disk has no room for it, before a
    byte is written.
    """
    store.begin(step)
    free, needed = store.free(), int(size * ROOM)
    if free is not None and free < needed:
        why = (
            f"{os.strerror(errno.ENOSPC)}: a checkpoint needs {needed / 1e6:,.1f} MB and "
            f"{free / 1e6:,.1f} MB are free"
        )
        raise OSError(errno.ENOSPC, why)


class Snapshot:
    """This rank's part of the state at the last `take`."""

    def __init__(self, peers: Peers, state: State) -> None:
        """Plans together with all other ranks."""
        self.planner = DefaultSavePlanner()
        self.planner.set_up_planner(state, is_coordinator=peers.first)
        self.index, plan = agree(peers, self.planner)
        self.items = plan.items
        self.parts = parts_of(plan, peers.rank)
        self.file = index.file_of(peers.rank)
        self.data: dict[str, Tensor] = {}

    @property
    def size(self) -> int:
        """Bytes of all ranks' tensors; known to rank 0."""
        return sum(tensor.bytes_of(tensor.shape) for tensor in self.index.values())

    def take(self, state: State, device: Device) -> None:
        """Copies the rank's part to the host; training may change the state once this returns."""
        self.planner.set_up_planner(state)
        for item in self.items:
            found, name = self.planner.resolve_data(item), item.index.fqn
            assert isinstance(found, Tensor)
            if name not in self.data:
                self.data[name] = device.host_buffer(found)
            self.data[name].copy_(found.detach(), non_blocking=True)
        self.planner.state_dict = {}  # keeps no reference to the live state
        device.synchronize()

    def write(self, store: CheckpointStore, step: int) -> dict[str, FileSum]:
        """Writes the rank's file, if it has a part, to the checkpoint that was begun.

        It is durable when this returns.
        """
        if not self.data:
            return {}
        return {self.file: files.write_tensors(store, step, self.file, self.parts, self.data)}

    def write_index(
        self, store: CheckpointStore, step: int, parts: list[dict[str, FileSum]]
    ) -> dict[str, FileSum]:
        """Writes the index of all parts, at rank 0. Returns all files of the checkpoint."""
        written = {name: file for part in parts for name, file in part.items()}
        text = index.render(self.index)
        return written | {index.FILE: files.write(store, step, index.FILE, [text])}


def agree(peers: Peers, planner: DefaultSavePlanner) -> tuple[CheckpointIndex, SavePlan]:
    """Returns at rank 0 the index of the entire state; at each rank the plan of its part."""
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
    """Returns each rank's share of the writing, and the index of all shares."""
    shares, _ = planner.create_global_plan(plans)
    whole: dict[str, IndexedTensor] = {}
    for rank, share in enumerate(shares):
        for name, part in index.placed(parts_of(share, rank)).items():
            before = whole[name].pieces if name in whole else ()
            whole[name] = replace(part, pieces=(*before, *part.pieces))
    return shares, whole


def parts_of(share: SavePlan, rank: int) -> CheckpointIndex:
    """Returns the pieces in a rank's file. The largest numbers come first, so that each is aligned
    there.
    """
    parts = {item.index.fqn: part_of(item, index.file_of(rank)) for item in share.items}
    return dict(sorted(parts.items(), key=lambda entry: -NUMBERS[entry[1].dtype]))


def part_of(item: WriteItem, file: str) -> IndexedTensor:
    """Returns a piece that a rank writes. Raises TypeError if it is not part of a tensor, or has
    another number format.
    """
    data = item.tensor_data
    if data is None or data.properties.dtype not in files.NAMES:
        raise TypeError(f"{item.index.fqn} is not a tensor of a format that checkpoints have")
    piece = TensorPiece(file, 0, tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return IndexedTensor(files.NAMES[data.properties.dtype], tuple(data.size), (piece,))
