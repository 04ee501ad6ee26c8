"""Writes and commits a checkpoint from the copy on the host, in a background thread."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from ...checkpoints import listing
from ...checkpoints.marker import Commit, render
from ...checkpoints.store import CheckpointStore
from ...config.types import Checkpoint
from .checkpoint_group import CheckpointError, Peers
from .snapshot import Snapshot

NICE = 10  # niceness of the writing thread: on a CPU it shares the cores with training
ROOM = 1.02  # bytes of a checkpoint per byte of tensors


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
