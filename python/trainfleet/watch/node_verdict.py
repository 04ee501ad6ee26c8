"""Decides on node 0 whether a failed job is worth another attempt, for schedulers that retry
automatically.

python -m trainfleet.watch.node_verdict FOLDER NODES CODE BEGAN

Node 0 runs this command with the job's exit code and the attempt's start time. It downloads all
nodes' files from S3 into a temporary folder, reaches a verdict as a launcher would (verdict.py),
and prints it. The exit code is AGAIN if another attempt may succeed, or 0 if the program would fail
the same way or the cause is unknown.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from ..backends.base import REQUEST, Phase, Status
from ..health import fence
from ..node.entrypoint import AGAIN
from ..plan.job import Job, Request
from ..process import file_systems
from ..run import records
from ..run.run_folder import Run, read_json
from ..storage.folder_sync import FolderSync
from ..storage.s3_sync_agent import BUCKET, EVERY
from ..trust.errors import InputError, telling
from ..trust.untrusted_input import parse_line
from .causes import Then
from .lines import DAY, stamp_of, time_of_day
from .monitor import AttemptOutcome
from .verdict import Start, Verdict, judge

SAME = 2.0  # maximum clock difference between two AWS machines, in seconds
SETTLE = 2 * EVERY + 1.0  # seconds for the other nodes' last log lines to reach S3


@telling
def main(arguments: list[str]) -> int:
    folder, began = Path(arguments[0]), float(arguments[3])
    nodes, code = map(int, arguments[1:3])
    home = Path.cwd()
    time.sleep(SETTLE)
    with tempfile.TemporaryDirectory(prefix="trainfleet-verdict-") as own:
        held = file_systems.hold(Path(own))
        os.chdir(own)
        FolderSync(folder, f"{os.environ[BUCKET].rstrip('/')}/{folder}").pull(lambda name: True)
        for log in (folder / "logs").glob("node-*.log"):
            cut(log, began)
        for feed in (folder / "events").glob("*.jsonl"):
            newer = [line for line in feed.read_text().splitlines() if is_since(line, began)]
            feed.write_text("".join(f"{line}\n" for line in newer))
        verdict = judge(
            request_of(folder, nodes),
            AttemptOutcome(Status(Phase.ENDED, exits={0: code}), None),
            Run(folder),
            Start(began, {}),
        )
        os.close(held)
        os.chdir(home)
    print(verdict)
    return again(folder, verdict)


def again(folder: Path, verdict: Verdict) -> int:
    """Returns this program's exit code. Records the verdict if the scheduler will retry the job,
    because the launcher does not see that failure.
    """
    if verdict.then is Then.STOP or verdict.cause == "unknown":
        return 0
    attempt = int(os.environ.get(fence.VARIABLE, "0"))
    Run(folder, records.node(0, attempt)).note("verdict", **verdict.record())
    return AGAIN


def is_since(line: str, began: float) -> bool:
    """Returns whether an event belongs to this attempt, allowing for clock differences."""
    try:
        return float(parse_line(line.encode(), "")["time"]) > began - SAME
    except (InputError, KeyError, TypeError, ValueError):
        return False


def cut(log: Path, began: float) -> None:
    """Removes the lines of earlier attempts from a log."""
    first = time_of_day(int(began))
    lines = log.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines):
        stamp = stamp_of(line.decode(errors="replace"))
        if stamp is not None and (stamp - first + SAME) % DAY < DAY / 2:
            log.write_bytes(b"".join(lines[number:]))
            return


def request_of(folder: Path, nodes: int) -> Request:
    """Returns the launcher's request, or a minimal request for this node count if request.json is
    missing.
    """
    record = read_json(folder / REQUEST)
    if record is not None:
        return Request.of(record, str(folder / REQUEST))
    return Request(Job("train", folder.name, folder, nodes, 1, "", (), True), ())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
