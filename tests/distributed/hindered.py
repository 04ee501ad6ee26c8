"""As ranks.py, with saves hindered: `python hindered.py WHAT N PORT RUN_FOLDER`, WHAT being one of

full:RANK:STEP,STEP...:SECONDS   that rank finds no room on the disk at the saves of these steps, after so many seconds
slow:SECONDS                     a file of a checkpoint takes so long to open
lost:RANK                        that rank can't read a Hugging Face folder's weights
fast:FACTOR                      on rank 0, the clock by which saves are due runs so many times as fast
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import ranks
from torch import Tensor

from trainfleet.checkpoints.store import CheckpointStore
from trainfleet.engine.checkpoint import checkpoints
from trainfleet.models import huggingface_weights
from trainfleet.trust.errors import RunError

create = CheckpointStore.create


def full(rank: str, steps: str, seconds: str) -> None:
    @contextmanager
    def hindered(store: CheckpointStore, step: int, file: str) -> Iterator[BinaryIO]:
        with create(store, step, file) as stream:
            yield stream
            if os.environ["RANK"] == rank and str(step) in steps.split(","):
                time.sleep(float(seconds))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file)

    CheckpointStore.create = hindered  # type: ignore[method-assign]


def lost(rank: str) -> None:
    load = huggingface_weights.load

    def hindered(*arguments: Any) -> dict[str, Tensor]:
        if os.environ["RANK"] == rank:
            raise RunError("is missing", where="model.safetensors")
        return load(*arguments)

    huggingface_weights.load = hindered


def slow(seconds: str) -> None:
    @contextmanager
    def hindered(store: CheckpointStore, step: int, file: str) -> Iterator[BinaryIO]:
        time.sleep(float(seconds))
        with create(store, step, file) as stream:
            yield stream

    CheckpointStore.create = hindered  # type: ignore[method-assign]


def fast(factor: str) -> None:
    class Clock:
        time = staticmethod(time.time)

        @staticmethod
        def monotonic() -> float:
            return time.monotonic() * (float(factor) if os.environ.get("RANK") == "0" else 1)

    checkpoints.time = Clock  # type: ignore[attr-defined, assignment]


if __name__ == "__main__":
    what, *how = sys.argv[1].split(":")
    {"full": full, "slow": slow, "lost": lost, "fast": fast}[what](*how)
    ranks.run_all(sys.argv[2:])
