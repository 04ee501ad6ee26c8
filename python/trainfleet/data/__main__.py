"""Tokenizes this node's share of the data: `python -m trainfleet.data CONFIG_YAML`.

The environment variables NODE_RANK, NODES and WORKERS select the share. Each process has a memory
limit, so a file that needs too much memory raises an error instead of exhausting the host.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

# Each process encodes with a single thread, so that WORKERS processes keep WORKERS cores busy. The
# libraries read these variables at import time.
os.environ |= {
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}

from ..config import load_resolved
from ..health import fence
from ..node.placement import require_numbers
from ..process.processes import limit_memory
from ..run import records
from ..run.run_folder import Run
from ..trust.errors import DataError, TrainfleetError, tell
from ..trust.safe_output import install
from .sources import MEMORY
from .tokenize_worker import Share, exit_on, tokenize


def main(arguments: list[str]) -> int:
    """Tokenizes this node's share and returns the exit code."""
    exit_on(signal.SIGTERM)
    exit_on(signal.SIGINT)
    try:
        require_numbers(fence.VARIABLE, "NODE_RANK", "NODES", "WORKERS")
    except TrainfleetError as error:
        return tell(error)
    order = int(os.environ.get(fence.VARIABLE, "0"))
    share = Share(
        *(
            int(os.environ.get(name, default))
            for name, default in (("NODE_RANK", 0), ("NODES", 1), ("WORKERS", 1))
        )
    )
    path = Path(arguments[0])
    try:
        config = load_resolved(path)
        finished = tokenize(config.data, share)
    except TrainfleetError as error:
        print(error, file=sys.stderr)
        with suppress(TrainfleetError):  # if the disk is full, only the log shows the error
            record_fault(Run(path.parent, records.node(share.node, order)), share, error)
        return error.exit_code
    if finished:
        print(
            f"finished: {finished.tokens:,} training tokens, {finished.validation_tokens:,} "
            "validation tokens"
        )
        print("".join(f"skipped: {record}\n" for record in finished.skipped_records), end="")
    return 0


def record_fault(run: Run, share: Share, error: TrainfleetError) -> None:
    """Records a fault event with the error message, for use by the verdict (watch/verdict.py)."""
    # The verdict recognizes DataError, but not all of its subclasses.
    kind = DataError if isinstance(error, DataError) else type(error)
    fields = {"error": kind.__name__, "message": error.head, "why": error.why, "next": error.next}
    run.record(
        "fault",
        order=int(os.environ.get(fence.VARIABLE, "0")),
        node=share.node,
        rank=None,
        **fields,
    )


if __name__ == "__main__":
    install()
    limit_memory(MEMORY)
    sys.exit(main(sys.argv[1:]))
