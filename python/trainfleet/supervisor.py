"""One node's process: `python -m trainfleet.supervisor LOG -- COMMAND...` runs a command as this node's part of a job.

It keeps everything that the command prints in LOG, each line with its time and rank; passes SIGTERM on; and when it ends, however
it ends, no process of the command is left. It uses only the standard library, so it starts in a few milliseconds anywhere.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from .processes import die_with_parent, signal_group

TERM_GRACE = 20.0  # seconds from SIGTERM to SIGKILL: long enough to finish a step and a small checkpoint
RANK_PREFIX = "rank ${rank} | "  # a torchrun template: the prefix that --tee puts before a worker's lines
_RANKED = re.compile(rb"^(rank \d+) \| ?")


def main(arguments: list[str]) -> int:
    die_with_parent()
    log, separator, *command = arguments
    assert separator == "--" and command, arguments
    scratch = Path(log).with_suffix(".parts")  # torchrun's own copies of the logs; ours is the one that stays
    shutil.rmtree(scratch, ignore_errors=True)  # an earlier one's, if that was killed
    try:
        return run(Path(log), [word.replace("{scratch}", str(scratch)) for word in command])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def run(log: Path, command: list[str]) -> int:
    """The command's exit code (128 + n for signal n), once nothing of it is left."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": RANK_PREFIX}
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             env=environment, start_new_session=True, preexec_fn=die_with_parent)  # fmt: skip
    pass_on(child)
    assert child.stdout is not None
    with open(log, "ab", buffering=0) as file:
        for line in child.stdout:
            file.write(stamp(line))
    code = child.wait()
    signal_group(child.pid, signal.SIGKILL)  # stragglers of the group
    return code if code >= 0 else 128 - code


def pass_on(child: subprocess.Popen[bytes]) -> None:
    """From now on SIGTERM ends the child: politely, and after TERM_GRACE for certain."""

    def terminate(number: int, frame: FrameType | None) -> None:
        signal_group(child.pid, signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, TERM_GRACE)

    def kill(number: int, frame: FrameType | None) -> None:
        signal_group(child.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGALRM, kill)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def stamp(line: bytes) -> bytes:
    """`rank 0 12:03:44.123 | text`: who, when, what. Lines of no rank are the agent's."""
    now = time.time()
    clock = time.strftime("%H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1000):03d}"
    match = _RANKED.match(line)
    who, text = (match[1], line[match.end() :]) if match else (b"agent", line)
    return who.ljust(7) + b" " + clock.encode() + b" | " + text


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
