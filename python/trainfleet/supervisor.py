"""One node's process: `python -m trainfleet.supervisor LOG -- COMMAND...` runs a command as this node's part of a job.

It keeps everything that the command prints in LOG, each line with its time and rank; passes requests to leave on; and when it
ends, however it ends, no process of the command is left. It uses only the standard library, so it starts in a few milliseconds
anywhere.

As `python -m trainfleet.supervisor --detach FILE < ORDER` it returns at once and goes on alone, in a session of its own, so that
nothing that happens to who started it changes anything: ORDER is {argv, environment, log} as JSON (by stdin: a process list shows
no value of it), FILE then says `pid start boot` (when that pid started, the kernel's boot id) and FILE.exit its exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from .kernel import Kernel
from .output import hide_bytes
from .processes import die_with_parent, signal_group
from .runs import Run
from .runs import scratch as scratch_of
from .uplink import carrier

TERM_GRACE = 20.0  # seconds from SIGTERM to SIGKILL: long enough to finish a step and a small checkpoint
TORCHRUN = "torch.distributed.run"
RANK_PREFIX = "rank ${rank} | "  # a torchrun template: the prefix that --tee puts before a worker's lines
_RANKED = re.compile(rb"^(rank \d+) \| ?")


def main(arguments: list[str]) -> int:
    if arguments[0] == "--detach":
        return detach(Path(arguments[1]), json.load(sys.stdin))
    die_with_parent()
    return supervise(arguments)


def supervise(arguments: list[str]) -> int:
    """Runs `LOG -- COMMAND...` to its end; its exit code."""
    log, separator, *command = arguments
    assert separator == "--" and command, arguments
    scratch = scratch_of(Path(log))
    shutil.rmtree(scratch, ignore_errors=True)  # an earlier one's, if that was killed
    try:
        with carrier(Path(log)):
            return run(Path(log), command)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def detach(file: Path, order: dict[str, Any]) -> int:
    """Carries `order` out in a process of its own; 0 as soon as `file` says which."""
    exit_file = file.with_name(f"{file.name}.exit")
    exit_file.unlink(missing_ok=True)
    ready, started = os.pipe()
    if os.fork():
        os.close(started)
        return 0 if os.read(ready, 1) else 1  # nothing comes when it died before it was ready
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.environ |= order["environment"]
    write(file, identity(os.getpid()))
    os.write(started, b".")
    os.close(started)
    code = 1
    try:
        code = supervise([order["log"], "--", *order["argv"]])
    finally:
        write(exit_file, str(code))
    return code


def identity(pid: int) -> str:
    """What tells this process from any other that will ever have its number: `pid start boot`."""
    start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]  # field 22, in ticks since boot
    return f"{pid} {start} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def write(path: Path, text: str) -> None:
    """Replaces a file of one line whole."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(f"{text}\n")
    temporary.replace(path)


def run(log: Path, command: list[str]) -> int:
    """The command's exit code (128 + n for signal n), once nothing of it is left."""
    log.parent.mkdir(parents=True, exist_ok=True)
    kernel = Kernel()
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": RANK_PREFIX}
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             env=environment, start_new_session=True, preexec_fn=die_with_parent)  # fmt: skip
    pass_on(child, Run(log.parent.parent) if TORCHRUN in command else None)
    assert child.stdout is not None
    with open(log, "ab", buffering=0) as file:
        for line in child.stdout:
            file.write(stamp(hide_bytes(line)))
    code = child.wait()
    signal_group(child.pid, signal.SIGKILL)  # stragglers of the group
    if code < 0:
        note(log, "node", f"{Path(command[0]).name} was killed by signal {-code}; nothing of it is left")
    for words in kernel.words() if code else ():
        note(log, "kernel", words.text, words.time)
    return code if code >= 0 else 128 - code


def note(log: Path, who: str, text: str, when: float | None = None) -> None:
    """A line in the log that the command did not write, with the time of what it tells of."""
    with open(log, "ab", buffering=0) as file:
        file.write(stamp(f"{text}\n".encode(), when).replace(b"agent  ", who.ljust(7).encode(), 1))


def pass_on(child: subprocess.Popen[bytes], run: Run | None) -> None:
    """From now on SIGTERM ends the child: politely, and after TERM_GRACE for certain; SIGUSR1, Slurm's early notice, only asks.

    The ranks of a `run` are asked by its stop file. A torchrun that is signalled itself takes its own ranks away from those of
    other nodes, and leaves without the barrier at which the other nodes' torchruns then wait for five minutes.
    """

    def ask(number: int, frame: FrameType | None) -> None:
        if run:
            run.stop.touch()
        else:
            signal_group(child.pid, signal.SIGTERM)

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, TERM_GRACE)
        ask(number, frame)

    def kill(number: int, frame: FrameType | None) -> None:
        signal_group(child.pid, signal.SIGKILL)

    signal.signal(signal.SIGUSR1, ask)
    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGALRM, kill)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def stamp(line: bytes, when: float | None = None) -> bytes:
    """`rank 0 12:03:44.123 | text`: who, when (else now), what. Lines of no rank are the agent's."""
    now = time.time() if when is None else when
    clock = time.strftime("%H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1000):03d}"
    match = _RANKED.match(line)
    who, text = (match[1], line[match.end() :]) if match else (b"agent", line)
    return who.ljust(7) + b" " + clock.encode() + b" | " + text


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1:]))
