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
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from . import fence
from .kernel import Kernel
from .output import hide_bytes
from .processes import die_with_parent, signal_group
from .runs import Run
from .runs import scratch as scratch_of
from .uplink import carrier
from .watchdog import Alarm, Sentry

TERM_GRACE = 20.0  # seconds from SIGTERM to SIGKILL: long enough to finish a step and a small checkpoint
UNLOGGED = 74  # the exit code of a command that failed and whose log can't be written (sysexits.h: input/output error)
KEPT = 1 << 20  # bytes of lines that wait for a disk
TRY_EVERY = 1.0  # seconds
WATCH = "TRAINFLEET_WATCH"  # how many ranks this node watches over
POLL = 0.5  # seconds
SCRATCH = "trainfleet-scratch-"
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
    with on_own_disk(scratch_of(Path(log))), carrier(Path(log)):
        return run(Path(log), command)


@contextlib.contextmanager
def on_own_disk(scratch: Path) -> Iterator[None]:
    """`scratch` leads to a folder on this node's own disk: ranks print into it, and a full shared disk must not end them."""
    remove_scratch(scratch)  # an earlier one's, if that was killed
    with contextlib.suppress(OSError):  # else it is where its name is
        scratch.parent.mkdir(parents=True, exist_ok=True)
        scratch.symlink_to(tempfile.mkdtemp(prefix=SCRATCH))
    try:
        yield
    finally:
        remove_scratch(scratch)


def remove_scratch(scratch: Path) -> None:
    """Removes it and what it leads to, if that is a folder which this program makes."""
    folder = scratch.resolve()
    if folder.parent == Path(tempfile.gettempdir()).resolve() and folder.name.startswith(SCRATCH):
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        scratch.unlink() if scratch.is_symlink() else shutil.rmtree(scratch)


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
        with contextlib.suppress(OSError):  # where that is full too, the missing file says that it failed (nodes/jobs.py)
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
    kernel, file = Kernel(), Log(log)
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": RANK_PREFIX}
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             env=environment, start_new_session=True, preexec_fn=die_with_parent)  # fmt: skip
    pass_on(child, Run(log.parent.parent) if TORCHRUN in command else None)
    guard = Guard(log.parent.parent, child.pid)
    assert child.stdout is not None
    for line in child.stdout:
        file.write(stamp(hide_bytes(line)))
    code = child.wait()
    signal_group(child.pid, signal.SIGKILL)  # stragglers of the group
    guard.ended.set()
    if guard.alarm:
        file.note("watch", guard.alarm.words)
    elif code < 0:
        file.note("node", f"{Path(command[0]).name} was killed by signal {-code}; nothing of it is left")
    for words in kernel.words() if code else ():
        file.note("kernel", words.text, words.time)
    if not file.close() and code:
        return UNLOGGED
    return code if code >= 0 else 128 - code


class Guard(threading.Thread):
    """Watches over the ranks of all nodes from this one, where WATCH says that no launcher does, and ends its part at an alarm.

    The engine then starts the job again, or gives it up; the node's log says why (watch/verdict.py).
    """

    def __init__(self, folder: Path, group: int) -> None:
        super().__init__(name="watch", daemon=True)
        self.group, self.ended = group, threading.Event()
        self.alarm: Alarm | None = None
        if ranks := int(os.environ.get(WATCH, "0")):
            self.sentry = Sentry(folder, ranks, int(os.environ.get(fence.VARIABLE, "0")))
            self.start()

    def run(self) -> None:
        while not self.ended.wait(POLL):
            try:
                self.alarm = self.sentry.look()
            except OSError:  # the shared folder is away: ranks that need it say so
                continue
            if self.alarm:
                signal_group(self.group, signal.SIGKILL)
                return


class Log:
    """A node's log. It never ends what it logs: lines that can't be written wait in memory until they can, the newest of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting = deque[bytes]()
        self.size = self.lost = 0  # bytes that wait; lines that had no room even here
        self.file: io.FileIO | None = None
        self.failed: float | None = None  # since when lines are refused
        self.tried, self.why = 0.0, ""

    def write(self, line: bytes) -> None:
        """Takes a line. Where lines are refused, they are tried again once in TRY_EVERY seconds."""
        self.waiting.append(line)
        self.size += len(line)
        while self.size > KEPT:
            self.size -= len(self.waiting.popleft())
            self.lost += 1
        if self.failed is None or time.monotonic() - self.tried > TRY_EVERY:
            self._flush()

    def note(self, who: str, text: str, when: float | None = None) -> None:
        """A line that the command did not write, with the time of what it tells of."""
        self.write(stamp(f"{text}\n".encode(), when).replace(b"agent  ", who.ljust(7).encode(), 1))

    def close(self) -> bool:
        """Whether all of it is in the file now."""
        self._flush()
        if self.file is not None:
            self.file.close()
        return not self.waiting

    def _flush(self) -> None:
        self.tried = time.monotonic()
        try:
            self._write_all()
        except OSError as error:
            self._fail(error)
            return
        if self.failed is not None:
            seconds, self.failed = time.monotonic() - self.failed, None
            self.note("node", f"this log was closed to its node for {seconds:.0f} s ({self.why}); {self.lost} lines are lost")

    def _write_all(self) -> None:
        if self.file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - it stays open
        while self.waiting:
            line = self.waiting[0]
            done = self.file.write(line)
            self.size -= done
            self.waiting[0] = line[done:]  # of the last one a full disk may take a part
            if done == len(line):
                self.waiting.popleft()

    def _fail(self, error: OSError) -> None:
        with contextlib.suppress(OSError):
            if self.file is not None:
                self.file.close()
        self.file = None
        if self.failed is None:
            self.failed, self.why = self.tried, error.strerror or str(error)
            with contextlib.suppress(OSError):
                print(f"{self.path} can't be written: {self.why}; what it is the log of goes on", file=sys.stderr, flush=True)


def pass_on(child: subprocess.Popen[bytes], run: Run | None) -> None:
    """From now on SIGTERM ends the child: politely, and after TERM_GRACE for certain; SIGUSR1, Slurm's early notice, only asks.

    The ranks of a `run` are asked by its stop file. A torchrun that is signalled itself takes its own ranks away from those of
    other nodes, and leaves without the barrier at which the other nodes' torchruns then wait for five minutes.
    """

    def ask(number: int, frame: FrameType | None) -> None:
        try:
            if run:
                return run.stop.touch()
        except OSError:  # there is no room for the file: torchrun asks its own ranks then
            pass
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
