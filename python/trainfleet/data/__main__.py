"""`python -m trainfleet.data CONFIG_YAML`: this node's part of tokenizing, NODE_RANK of NODES, with WORKERS processes."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

# Each process encodes with one thread, so that WORKERS alone says how many cores are busy. Read by the libraries on import.
os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

from .. import events, fence
from ..config import load_resolved
from ..errors import DataError, TrainfleetError, tell
from ..output import install
from ..runs import Run
from ..seat import require_numbers
from .share import Share, exit_on, tokenize


def main(arguments: list[str]) -> int:
    exit_on(signal.SIGTERM)
    exit_on(signal.SIGINT)
    try:
        require_numbers(fence.VARIABLE, "NODE_RANK", "NODES", "WORKERS")
    except TrainfleetError as error:
        return tell(error)
    order = int(os.environ.get(fence.VARIABLE, "0"))
    share = Share(*(int(os.environ.get(name, default)) for name, default in (("NODE_RANK", 0), ("NODES", 1), ("WORKERS", 1))))
    try:
        finished = tokenize(load_resolved(Path(arguments[0])).data, share)
    except TrainfleetError as error:
        print(error, file=sys.stderr, flush=True)
        with suppress(TrainfleetError):  # the disk may be full; the words are in the log then
            record_fault(Run(Path(arguments[0]).parent, events.node(share.node, order)), share, error)
        return error.exit_code
    if finished:
        print(f"finished: {finished.tokens:,} tokens to train on, {finished.validation_tokens:,} to validate", flush=True)
    return 0


def record_fault(run: Run, share: Share, error: TrainfleetError) -> None:
    """Leaves an event from which the verdict has its words (watch/verdict.py)."""
    kind = DataError if isinstance(error, DataError) else type(error)  # of the tree that causes.py knows
    fields = {"error": kind.__name__, "message": error.head, "why": error.why, "next": error.next}
    run.record("fault", order=int(os.environ.get(fence.VARIABLE, "0")), node=share.node, rank=None, **fields)


if __name__ == "__main__":
    install()
    sys.exit(main(sys.argv[1:]))
