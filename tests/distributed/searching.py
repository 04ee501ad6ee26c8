"""As ranks.py, on a device of which rank 1 has room for 2 sequences: `python searching.py N PORT RUN_FOLDER`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import ranks
import torch
from torch import Tensor

from trainfleet.engine import micro_batch
from trainfleet.engine.batches import MicroBatch
from trainfleet.engine.parallel import Replicas
from trainfleet.engine.timing import Stopwatch

ROOM = 2
train = Replicas.train


def hindered(self: Replicas, batches: Iterator[tuple[int, MicroBatch]], watch: Stopwatch) -> Tensor:
    def measured() -> Iterator[tuple[int, MicroBatch]]:
        for left, batch in batches:
            if os.environ["RANK"] == "1" and len(batch.inputs) > ROOM:
                raise torch.OutOfMemoryError("out of memory, as planted")
            yield left, batch

    return train(self, measured(), watch)


if __name__ == "__main__":
    Replicas.train = hindered  # type: ignore[method-assign]
    micro_batch.PROGRAM = (__file__, "trial")
    if sys.argv[1] == "trial":
        micro_batch.leave(sys.argv[2:])
    ranks.run_all(sys.argv[1:])
